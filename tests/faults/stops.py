"""Ask a run to stop, by each way there is, and resume it; it must end as if never stopped.

    python -m tests.faults.stops          # about 12 minutes; writes benchmarks/results/stops.*

The launcher is `--nprocs 2` or an mpirun of the user's own. Every run is stopped up to five times,
each time a few updates later, and in the end let through. A trial holds when the job leaves with
exit code 75 one update and one save later (here: no more than two updates after the signal was
sent), and when the run ends with the parameters and metrics of one that was never stopped.
A TERM to a bare mpirun leaves its ranks half a second and always ends with mpirun's own code:
there the trial holds when no more than one checkpoint interval is lost and the end is exact.
It can be stopped and started again: trials that are done stay done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.parallel.spawn import mpirun_command
from tests.children import ROOT, train_command
from tests.faults.kills import SIZES, UPDATES, finish, outcome, ranks_of

EXIT_STOPPED = 75
STOPS = 5  # of one run
INTERVAL = 3  # updates between two checkpoints, as SIZES say
WAYS = [
    (target, number)
    for target in ("--nprocs", "mpirun", "one rank")
    for number in (signal.SIGUSR1, signal.SIGTERM)
]


@dataclass(frozen=True)
class Trial:
    target: str
    signal: str
    code: int
    seconds: float  # from the signal to the end of the job
    seen: int  # updates done when the signal was sent
    saved: int  # update of the newest checkpoint afterwards
    exact: bool

    @property
    def held(self) -> bool:
        if (self.target, self.signal) == ("mpirun", "SIGTERM"):
            return self.exact and self.code != 0 and self.saved > self.seen - INTERVAL
        return self.exact and self.code == EXIT_STOPPED and 0 <= self.saved - self.seen <= 2


def start(run_dir: Path, target: str) -> subprocess.Popen[str]:
    command = train_command(*SIZES, "--run-dir", run_dir)
    if target == "--nprocs":
        command += ["--nprocs", "2"]
    else:
        command = [*mpirun_command(2), *command]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def updates_done(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def newest(run_dir: Path) -> int:
    return max(int(p.name.split("-")[1]) for p in (run_dir / "checkpoints").glob("update-*"))


def stop_once(run_dir: Path, target: str, number: int, rng: random.Random) -> Trial:
    aim = updates_done(run_dir) + rng.randrange(2, 9)
    job = start(run_dir, target)
    while updates_done(run_dir) < aim and job.poll() is None:
        time.sleep(0.002)
    pid = rng.choice(ranks_of(job)) if target == "one rank" else job.pid
    seen, sent = updates_done(run_dir), time.monotonic()
    os.kill(pid, number)
    job.communicate(timeout=120)
    name, seconds = signal.Signals(number).name, time.monotonic() - sent
    return Trial(target, name, job.returncode, seconds, seen, newest(run_dir), exact=False)


def run_chain(folder: Path, target: str, number: int, reference: Any, seed: int) -> list[Trial]:
    """One run that is stopped several times; if its end is exact, every stop was."""
    rng, trials = random.Random(f"{target} {number} {seed}"), list[Trial]()
    run_dir = folder / f"{target}-{number}-{seed}".replace(" ", "-")
    while len(trials) < STOPS and updates_done(run_dir) < UPDATES - 12:
        trials.append(stop_once(run_dir, target, number, rng))
    finish(start(run_dir, target))
    exact = outcome(run_dir) == reference
    return [replace(trial, exact=exact) for trial in trials]


def table(trials: list[Trial]) -> str:
    lines = [
        "| signal | sent to | trials | held | exit codes | seconds to the end, median (max) | "
        "updates saved after the signal |",
        "|---|---|---|---|---|---|---|",
    ]
    for target, name in sorted({(t.target, t.signal) for t in trials}):
        some = [t for t in trials if (t.target, t.signal) == (target, name)]
        codes = ", ".join(sorted({str(t.code) for t in some}))
        times, later = [t.seconds for t in some], [t.saved - t.seen for t in some]
        lines.append(
            f"| {name} | {target} | {len(some)} | {sum(t.held for t in some)} | {codes} | "
            f"{statistics.median(times):.2f} ({max(times):.2f}) | {min(later)} to {max(later)} |"
        )
    return "\n".join(lines)


def read(file: Path) -> list[Trial]:
    return [Trial(**json.loads(line)) for line in file.open()] if file.exists() else []


def run_trials(count: int, folder: Path, out: Path) -> None:
    finish(start(folder / "reference", "--nprocs"))
    reference = outcome(folder / "reference")
    for target, number in WAYS:
        name = signal.Signals(number).name
        for seed in itertools.count():
            if sum((t.target, t.signal) == (target, name) for t in read(out)) >= count:
                break
            trials = run_chain(folder, target, number, reference, seed)
            with out.open("a") as file:
                file.writelines(json.dumps(asdict(trial)) + "\n" for trial in trials)
            for trial in trials:
                print(trial, "held" if trial.held else "NOT HELD", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "stops.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_trials(args.trials, Path(folder), args.out)
    trials = read(args.out)
    text = f"Made by `python -m tests.faults.stops`: {UPDATES} updates of CartPole on 2 ranks.\n\n"
    args.out.with_suffix(".md").write_text(f"{text}{table(trials)}\n")
    print(table(trials))
    return 0 if all(t.held for t in trials) else 1


if __name__ == "__main__":
    sys.exit(main())

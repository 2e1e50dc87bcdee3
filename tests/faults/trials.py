"""Break one rank of a real job in every way we can think of, and time how the job ends.

    python -m tests.faults.trials          # about 70 minutes; writes benchmarks/results/faults.*

It can be stopped and started again: trials that are done stay done.
A trial holds when the fault did happen, and the job then ends in time, with a code other than 0,
leaves no process behind, and makes one report, which names the rank, phase and update (judge.py).
In time is: within 5 s; of a hang, 5 s after the phase limit; of ranks that were started in
different ways, 30 s after the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.children import ROOT
from tests.faults.judge import KINDS, Fault, Verdict, judge
from tests.faults.places import PHASE_LIMIT, Place, command, environment, places_of

__all__ = ["Trial", "read", "run_trial", "table"]

JUDGE = 3  # raised when the rules change: trials by older rules are not counted
LIMITS_S = {"hang": PHASE_LIMIT + 5.0, "different config": 30.0, "different jax": 30.0}
FIRST_HEARTBEAT_S = 1.0  # after the start of a process, on a busy machine
MARK = "SPMDRL_FAULT_TRIAL"  # in the environment of all processes of a trial


@dataclass(frozen=True)
class Trial:
    kind: str
    place: str
    ranks: int
    rank: int
    seconds: float  # from the fault to the end of the job; infinite: there was no fault
    code: int
    line: str  # the report
    why: str  # it is not the right one
    orphans: int
    judge: int = field(default=JUDGE)

    @property
    def in_time(self) -> bool:
        return self.seconds <= LIMITS_S.get(self.kind, 5.0)

    @property
    def told(self) -> bool:
        return bool(self.line) and not self.why

    @property
    def held(self) -> bool:
        return self.in_time and self.code != 0 and self.told and self.orphans == 0


@dataclass(frozen=True)
class Moment:
    """When the fault happened, and the updates that may be named for it."""

    time: float
    updates: tuple[int, int]
    before_heartbeat: bool = False

    def until(self, rows: int) -> Moment:
        """Ranks are one update apart at most, and rank 0 writes its row at the end of one."""
        return replace(self, updates=(self.updates[0], rows + 1))


def run_trial(
    place: Place, ranks: int, rng: random.Random, env: dict[str, str]
) -> tuple[Trial, str]:
    rank = place.choose_rank(ranks, rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(command(place, ranks, rank, rng, folder), environment(env) | {MARK: name})
        by_signal = place.by == "signal"
        moment = strike(place, job, rank, rng, folder) if by_signal else None
        output, ended = wait_for(job)
        if by_signal and moment:
            moment = moment.until(rows(folder))
        elif not by_signal:
            moment = read_mark(folder)
        orphans = end_orphans(name)
    verdict = judged(place, ranks, rank, moment, output)
    seconds = ended - moment.time if moment else math.inf
    told = (verdict.line.replace(f"{ROOT}/", ""), verdict.why)
    return Trial(
        place.kind, place.name, ranks, rank, seconds, job.returncode, *told, orphans
    ), output


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
    )


def judged(place: Place, ranks: int, rank: int, moment: Moment | None, output: str) -> Verdict:
    if moment is None:
        return Verdict("", "the fault never happened")
    fault = Fault(
        place.kind, ranks, rank, place.phases, moment.updates, place.says, moment.before_heartbeat
    )
    return judge(fault, output)


def strike(
    place: Place, job: subprocess.Popen[str], rank: int, rng: random.Random, folder: Path
) -> Moment | None:
    """A signal at a random moment: KILL also during the start, STOP in the first updates."""
    while not (pids := list(processes(str(folder), rank))):
        time.sleep(0.02)
    delay = rng.uniform(0.0, 20.0)
    if place.name == "SIGSTOP":
        target, delay = rng.randrange(2, 12), rng.uniform(0.0, 0.1)
        while rows(folder) < target and job.poll() is None:
            time.sleep(0.01)
    time.sleep(delay)
    first = max(0, rows(folder) - 1)
    if job.poll() is not None:
        return None
    now = time.time()
    os.kill(pids[0], getattr(signal, place.name))
    return Moment(now, (first, first), delay < FIRST_HEARTBEAT_S)


def rows(folder: Path) -> int:
    """Updates that rank 0 has reported."""
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def read_mark(folder: Path) -> Moment | None:
    mark = folder / "fault"
    if not mark.exists():
        return None
    written = json.loads(mark.read_text())
    return Moment(written["time"], (written["update"], written["update"]))


def wait_for(job: subprocess.Popen[str]) -> tuple[str, float]:
    """The output, and when the job ended."""
    try:
        output, _ = job.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        job.kill()
        output = "(the job did not end)"
    ended = time.time()
    job.wait()
    return output, ended


def processes(mark: str, rank: int | None = None) -> Iterator[int]:
    """Of this trial, or of one of its ranks; what the kernel only remembers has no environment."""
    wanted = {f"{MARK}={mark}".encode()}
    if rank is not None:
        wanted.add(f"OMPI_COMM_WORLD_RANK={rank}".encode())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)
        except OSError:
            continue


def end_orphans(mark: str) -> int:
    """Processes that outlived the job, a moment later; there should be none."""
    deadline = time.time() + 2.0
    while (left := list(processes(mark))) and time.time() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def table(trials: list[Trial]) -> str:
    lines = [
        "| fault | ranks | trials | held | seconds to the end, median (max) | rank, phase and "
        "update named | exit codes |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, ranks in dict.fromkeys((t.kind, t.ranks) for t in trials):
        some = [t for t in trials if (t.kind, t.ranks) == (kind, ranks)]
        places = sorted({t.place for t in some})
        times, codes = [t.seconds for t in some], sorted({t.code for t in some})
        held = sum(t.held for t in some)
        lines.append(
            f"| {kind} ({', '.join(places)}) | {ranks} | {len(some)} | {held} | "
            f"{statistics.median(times):.1f} ({max(times):.1f}) | {sum(t.told for t in some)} | "
            f"{', '.join(map(str, codes))} |"
        )
    return "\n".join(lines)


def read(file: Path) -> list[Trial]:
    """The trials that were judged by today's rules."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [Trial(**trial) for trial in found if trial.get("judge") == JUDGE]


def run_trials(kind: str, ranks: int, count: int, out: Path, env: dict[str, str]) -> None:
    """Those that are missing; the places of a kind take turns."""
    done = sum((t.kind, t.ranks) == (kind, ranks) for t in read(out))
    for number in range(done, count):
        places = places_of(kind)
        rng = random.Random(f"{kind} {ranks} {number}")
        trial, output = run_trial(places[number % len(places)], ranks, rng, env)
        with out.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
        print(trial, "held" if trial.held else f"NOT HELD\n{output[-3000:]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--faults", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "faults.jsonl"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        for kind, ranks in itertools.product(args.faults, args.ranks):
            run_trials(kind, ranks, args.trials, args.out, env)
    trials = read(args.out)
    text = "Made by `python -m tests.faults.trials`; what the columns mean: docs/faults.md.\n\n"
    args.out.with_suffix(".md").write_text(f"{text}{table(trials)}\n")
    print(table(trials))
    return 0 if all(t.held for t in trials) else 1


if __name__ == "__main__":
    sys.exit(main())

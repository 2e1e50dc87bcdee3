"""Kill a run at random moments and resume it; it must end as if nothing had happened.

    python -m tests.faults.kills --trials 30          # writes benchmarks/results/kills.md

Every trial starts a 60-update run on two ranks, sends SIGKILL to a random rank at a random moment
(compiling, rolling out, averaging, saving), starts the same command again, and sometimes kills
that too. It holds when parameters and metrics equal those of the run that was never interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.children import ROOT, train_command

UPDATES = 60
SIZES = [
    "--env.num-envs", "8", "--algo.num-steps", "32", "--total-steps", str(8 * 32 * UPDATES),
    "--checkpoint.every", "3", "--log.panel", "off",
]  # fmt: skip
Flags = Sequence[str]  # of the run, besides its sizes
TIMED = ("time/", "perf/", "comm/", "rank/", "roles/", "progress/eta")


def start(run_dir: Path, ranks: int, cache: Path, flags: Flags) -> subprocess.Popen[str]:
    command = train_command(*SIZES, *flags, "--run-dir", run_dir)
    if ranks > 1:
        command += ["--nprocs", str(ranks)]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate(timeout=600)
    if job.returncode != 0:
        raise RuntimeError(f"exit code {job.returncode}:\n{output[-3000:]}")
    return output


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The processes that train: the last generation below the job."""
    young, found = [job.pid], []
    while young:
        found = young
        young = [child for pid in young for child in _children(pid)]
    return found


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(p) for p in text.split() if "spmdrl" in _command(int(p)) or _children(int(p))]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def outcome(run_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """Hash and metrics of a finished run, without what depends on the clock."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]
    return summary["params_sha256"], kept


@dataclass(frozen=True)
class Trial:
    kills: int
    resumed_at: list[int]
    same_hash: bool
    same_metrics: bool
    damaged: int  # checkpoints found unreadable

    @property
    def held(self) -> bool:
        return self.same_hash and self.same_metrics and self.damaged == 0


def wait_for_moment(job: subprocess.Popen[str], run_dir: Path, rng: random.Random) -> None:
    """Sometimes anywhere in start-up and compilation, else within a random update."""
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.1, 10.0))
        return
    metrics = run_dir / "metrics.jsonl"
    have = metrics.read_text().count("\n") if metrics.exists() else 0
    last = UPDATES - 12  # a run on one rank takes milliseconds for each of those after it
    target = rng.randrange(min(have + 1, last - 1), last)
    while job.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= target:
            time.sleep(rng.uniform(0.0, 0.03))
            return
        time.sleep(0.005)


def run_trial(
    folder: Path, ranks: int, reference: tuple[str, Any], cache: Path, seed: int, flags: Flags
) -> Trial:
    rng, run_dir, kills = random.Random(seed), folder / f"trial-{seed}", 0
    again = True
    while again and kills < 3:
        job = start(run_dir, ranks, cache, flags)
        wait_for_moment(job, run_dir, rng)
        if job.poll() is None:
            os.kill(rng.choice(ranks_of(job)), signal.SIGKILL)
            kills += 1
        job.communicate(timeout=120)
        again = rng.random() < 0.4
    finish(start(run_dir, ranks, cache, flags))
    log = (run_dir / "log.txt").read_text().splitlines()
    resumed = [int(n.split("resumed at update ")[1].split()[0]) for n in log if "resumed at" in n]
    damaged = sum("is damaged" in line for line in log)
    found_hash, found_rows = outcome(run_dir)
    return Trial(kills, resumed, found_hash == reference[0], found_rows == reference[1], damaged)


def table(trials: list[Trial], ranks: int) -> str:
    lines = [
        f"{sum(t.held for t in trials)} of {len(trials)} trials on {ranks} rank(s) held; "
        f"{sum(t.kills for t in trials)} kills, {sum(t.damaged for t in trials)} unreadable "
        "checkpoints.",
        "",
        "| trial | kills | resumed at update | same hash | same metrics |",
        "|---|---|---|---|---|",
    ]
    for i, t in enumerate(trials):
        resumed = ", ".join(map(str, t.resumed_at)) or "the start"
        lines.append(f"| {i} | {t.kills} | {resumed} | {t.same_hash} | {t.same_metrics} |")
    return "\n".join(lines)


def run_trials(
    count: int, ranks: int, folder: Path, first_seed: int = 0, flags: Flags = ()
) -> list[Trial]:
    cache = folder / "cache"
    finish(start(folder / "reference", ranks, cache, flags))
    reference, trials = outcome(folder / "reference"), []
    for seed in range(first_seed, first_seed + count):
        trials.append(run_trial(folder, ranks, reference, cache, seed, flags))
        print(trials[-1], "held" if trials[-1].held else "NOT HELD", flush=True)
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kills.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trials = run_trials(args.trials, args.ranks, Path(folder))
    args.out.write_text(table(trials, args.ranks) + "\n")
    print(table(trials, args.ranks))
    return 0 if all(t.held for t in trials) else 1


if __name__ == "__main__":
    sys.exit(main())

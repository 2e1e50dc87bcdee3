"""Break one rank of a real job in every way we can think of, and time how the job ends.

    python tests/faults/trials.py          # about 45 minutes; writes benchmarks/results/faults.*

It can be stopped and started again: trials that are done stay done.
A trial holds when the job ends within 5 s of the fault (a stopped rank: the phase limit + 5 s),
with a code other than 0, naming the rank and the phase, and leaves no process behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PHASE_LIMIT = 4.0
# Programs hold addresses of their process. Where these are the same each time, they need not be
# compiled again for every one of some hundred trials.
SAME_ADDRESSES = ["setarch", "-R"]
if not shutil.which("setarch") or subprocess.run(["setarch", "-R", "true"]).returncode != 0:
    SAME_ADDRESSES = []  # some containers do not allow it
FAULTY = Path(__file__).with_name("faulty.py")
GRACE = 5.0
# What happens, and the places of which each trial takes one at random.
FAULTS = {
    "SIGKILL": ["kill"],
    "exception": ["env", "update", "logger", "exit"],
    "SIGSTOP": ["stop"],
    "not finite": ["nan-gradient", "nan-reward", "nan-obs"],
    "flipped bit": ["bit"],
    "different config": ["config"],
    "different jax": ["version"],
}
SIZES = [
    "--env.num-envs", "8", "--algo.num-steps", "16", "--total-steps", "12800000",
    "--sync.check-every", "1", "--sync.phase-timeout-s", str(PHASE_LIMIT), "--log.panel", "off",
    "--net.hidden", "16",
]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    kind: str
    fault: str
    ranks: int
    rank: int
    seconds: float  # from the fault to the end of the job
    code: int
    named: bool  # the output names the rank
    phase: bool  # and the phase it was in
    orphans: int

    @property
    def held(self) -> bool:
        limit = GRACE + (PHASE_LIMIT if self.fault == "stop" else 0.0)
        told = self.named and self.phase
        return self.seconds <= limit and self.code != 0 and told and self.orphans == 0


def run_trial(kind: str, fault: str, ranks: int, rng: random.Random, env: Any) -> tuple[Trial, str]:
    from spmdrl.parallel.spawn import mpirun_command

    rank = 0 if fault == "logger" else rng.randrange(ranks)
    if fault in ("config", "version"):
        rank = rng.randrange(1, ranks)
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder)
        command = [
            *SAME_ADDRESSES, *mpirun_command(ranks), sys.executable, str(FAULTY),
            fault, str(rank), str(rng.randrange(2, 12)), folder,
            str(ROOT / "configs" / "cartpole.py"), *SIZES, "--run-dir", f"{folder}/run",
        ]  # fmt: skip
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
        )
        if fault == "kill":
            _kill_later(marks, rank, rng)
        try:
            output, _ = job.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            job.kill()
            output = "(the job did not end)"
        ended = time.time()
        mark = marks / "fault"
        seconds = ended - float(mark.read_text()) if mark.exists() else float("inf")
        orphans = _end_orphans(marks)
    named, phase = f"rank {rank}" in output.lower(), "phase " in output
    return Trial(kind, fault, ranks, rank, seconds, job.returncode, named, phase, orphans), output


def _kill_later(marks: Path, rank: int, rng: random.Random) -> None:
    """SIGKILL at a random moment between the start of the process and training."""
    pid = marks / f"pid-{rank}"
    while not pid.exists():
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 20.0))
    (marks / "fault").write_text(str(time.time()))
    os.kill(int(pid.read_text()), signal.SIGKILL)


def _end_orphans(marks: Path) -> int:
    """Ranks that outlived the job, a moment later; none should."""
    from spmdrl.runtime.watchdog import is_running

    deadline, left = time.time() + 2.0, [int(p.read_text()) for p in marks.glob("pid-*")]
    while left and time.time() < deadline:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def table(trials: list[Trial]) -> str:
    lines = [
        "| fault | ranks | trials | held | seconds to the end, median (max) | rank named | "
        "phase named | exit codes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, ranks in dict.fromkeys((t.kind, t.ranks) for t in trials):
        some = [t for t in trials if (t.kind, t.ranks) == (kind, ranks)]
        places = sorted({t.fault for t in some})
        fault = kind if len(places) == 1 else f"{kind} ({', '.join(places)})"
        times = [t.seconds for t in some]
        codes = ", ".join(sorted({str(t.code) for t in some}))
        held = sum(t.held for t in some)
        lines.append(
            f"| {fault} | {ranks} | {len(some)} | {held} | "
            f"{statistics.median(times):.1f} ({max(times):.1f}) | {sum(t.named for t in some)} | "
            f"{sum(t.phase for t in some)} | {codes} |"
        )
    return "\n".join(lines)


def read(file: Path) -> list[Trial]:
    return [Trial(**json.loads(line)) for line in file.open()] if file.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "faults.jsonl"
    )
    args = parser.parse_args()
    cache = tempfile.TemporaryDirectory()
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    for kind, ranks in itertools.product(args.faults, args.ranks):
        done = [t for t in read(args.out) if (t.kind, t.ranks) == (kind, ranks)]
        for number in range(len(done), args.trials):
            rng = random.Random(f"{kind} {ranks} {number}")
            trial, output = run_trial(kind, rng.choice(FAULTS[kind]), ranks, rng, env)
            with args.out.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
            print(trial, "held" if trial.held else f"NOT HELD\n{output[-3000:]}", flush=True)
    trials = read(args.out)
    text = "Made by `python tests/faults/trials.py`; what the columns mean: docs/faults.md.\n\n"
    args.out.with_suffix(".md").write_text(f"{text}{table(trials)}\n")
    print(table(trials))
    return 0 if all(t.held for t in trials) else 1


if __name__ == "__main__":
    sys.exit(main())

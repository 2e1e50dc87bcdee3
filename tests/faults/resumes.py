"""A run is killed as a whole, or asked to stop, at a random moment, and resumed: same end.

Each case has a reference that was never interrupted. Parameters and metrics must equal it, bit for
bit; where the topology changes in between, `--sync.deterministic` is what promises that.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.children import ROOT, train_command
from tests.faults.kills import outcome
from tests.faults.result import Bench, Result, start, wait_until
from tests.faults.trials import end_orphans, processes

__all__ = ["CASES", "trial"]

UPDATES = 30


@dataclass(frozen=True)
class Case:
    name: str
    config: str = "cartpole"
    num_envs: int = 12
    num_steps: int = 16
    updates: int = UPDATES
    flags: tuple[str, ...] = ()
    before: tuple[str, ...] = ()  # how it is started, until it is killed
    after: tuple[str, ...] | None = None  # and resumed, where that differs

    @property
    def steps(self) -> int:
        return self.num_envs * self.num_steps * self.updates


SAME = "--sync.deterministic"
CASES = (
    Case("1 rank"),
    Case("2 ranks", before=("--nprocs", "2")),
    Case("3 ranks", before=("--nprocs", "3")),
    Case("2 devices", before=("--devices", "2")),
    Case("gather, 2 ranks", flags=("--sync.strategy", "gather"), before=("--nprocs", "2")),
    Case("jax, 2 ranks", flags=("--sync.strategy", "jax"), before=("--nprocs", "2")),
    Case("lag 1", flags=("--lag", "1")),
    Case("lag 2, 2 ranks", "cartpole_impala", flags=("--lag", "2"), before=("--nprocs", "2")),
    Case("2 ranks, then 2 devices", flags=(SAME,), before=("--nprocs", "2"),
         after=("--devices", "2")),
    Case("2 devices, then 2 ranks", flags=(SAME,), before=("--devices", "2"),
         after=("--nprocs", "2")),
    Case("float64 simulator", "halfcheetah", 4, 32, 12, ("--algo.minibatches", "4")),
    Case("Atari", "pong", 4, 16, 4),
    Case("simulator in JAX", flags=("--env.backend", "jax", "--env.id", "tests.jax_envs:CartPole"),
         before=("--nprocs", "2")),
    Case("LSTM", "cartpole_memory"),
)  # fmt: skip


def trial(case: Case, number: int, rng: random.Random, bench: Bench) -> Result:
    folder = bench.folder / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    expected = reference(case, bench)
    began, resumed = time.time(), list[int]()
    for _ in range(1 + (rng.random() < 0.3)):
        resumed.append(interrupt(case, folder, rng, bench))
    job = launch(case, case.before if case.after is None else case.after, folder, bench)
    output, _ = job.communicate(timeout=600)
    why = judged(job.returncode, folder / "run", expected)
    if why:
        print(output[-4000:], flush=True)
    said = f"interrupted after updates {', '.join(map(str, resumed))}"
    seconds = time.time() - began
    return Result(f"resume: {case.name}", number, said, not why, said, why, seconds)


def judged(code: int, run_dir: Path, expected: tuple[str, list[dict[str, object]]]) -> str:
    """What is wrong with the end of a resumed run."""
    if code != 0:
        return f"exit code {code}"
    found = outcome(run_dir)
    if found[0] != expected[0]:
        return "other parameters"
    if found[1] != expected[1]:
        rows = zip(found[1], expected[1], strict=False)
        odd = [i for i, (a, b) in enumerate(rows) if a != b]
        return f"other metrics: {len(found[1])} rows, first in row {odd[0] if odd else 'none'}"
    log = (run_dir / "log.txt").read_text()
    return "a checkpoint was damaged" if "is damaged" in log else ""


def reference(case: Case, bench: Bench) -> tuple[str, list[dict[str, object]]]:
    """Made once; of a change of topology by the first one alone."""
    name = "-".join([case.name, str(case.updates)]).replace(" ", "_").replace(",", "")
    place = bench.folder / "references" / name
    if not (place / "run" / "summary.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        job = launch(case, case.before, place, bench)
        output, _ = job.communicate(timeout=600)
        if job.returncode != 0:
            raise RuntimeError(f"{case.name} fails undisturbed:\n{output[-3000:]}")
    return outcome(place / "run")


def launch(case: Case, topology: tuple[str, ...], folder: Path, bench: Bench) -> subprocess.Popen:
    words = [
        "--env.num-envs", case.num_envs, "--algo.num-steps", case.num_steps,
        "--total-steps", case.steps, "--checkpoint.every", 3, "--log.panel", "off",
        "--run-dir", folder / "run", *case.flags, *topology,
    ]  # fmt: skip
    config = str(ROOT / "configs" / f"{case.config}.py")
    return start(train_command(*words, config=config), bench.environment(folder))


def interrupt(case: Case, folder: Path, rng: random.Random, bench: Bench) -> int:
    """Kill one process or all, or ask to stop; the updates done by then."""
    job = launch(case, case.before, folder, bench)
    metrics = folder / "run" / "metrics.jsonl"
    aim = updates(metrics) + rng.randrange(0, max(2, case.updates // 2))
    wait_until(lambda: updates(metrics) > aim, job)
    time.sleep(rng.uniform(0.0, 0.02))
    how = rng.choice(["one", "all", "stop"])
    pids = [pid for pid in processes(str(folder)) if pid != job.pid]
    if how == "stop":
        job.send_signal(signal.SIGTERM)
    elif how == "all" or not pids:
        os.killpg(job.pid, signal.SIGKILL)
        for pid in pids:
            _kill(pid)
    else:
        _kill(rng.choice(pids))
    job.communicate(timeout=120)
    end_orphans(str(folder))
    return updates(metrics)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def updates(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

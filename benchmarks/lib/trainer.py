"""Real training runs as child processes, for the benchmarks that time them.

Each rank has one core, and the same settings whether it is alone or not, unless the trainer is left
to choose (`Trainer.freely`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.common import ROOT
from spmdrl.runtime.files import read_metrics

__all__ = ["PHASES", "TIMEOUT_S", "Task", "Timing", "Trainer", "read_metrics", "read_timing",
           "shortened"]  # fmt: skip

PHASES = ("collect", "wait", "update", "other")
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Task:
    """A training run: what one rank does stays the same on however many ranks."""

    name: str
    config: str
    envs: int  # of one rank
    steps: int
    updates: int
    skip: int  # first updates that are left out: they hold the compilation
    flags: tuple[str, ...] = ()
    tail: int = 0  # last updates that are left out, too

    def arguments(self, ranks: int, run_dir: Path) -> list[str]:
        envs = self.envs * ranks
        total = envs * self.steps * (self.skip + self.updates + self.tail)
        return [
            sys.executable, "-m", "spmdrl.train", f"configs/{self.config}.py",
            "--env.num-envs", str(envs), "--algo.num-steps", str(self.steps),
            "--total-steps", str(total), "--checkpoint.every", "0", "--log.panel", "off",
            "--run-dir", str(run_dir), *self.flags,
        ]  # fmt: skip

    def with_flags(self, *flags: str) -> Task:
        return replace(self, flags=(*self.flags, *flags))


def shortened(tasks: Sequence[Task], updates: int) -> list[Task]:
    """With at most so many updates; 0 leaves the tasks as they are."""
    return [replace(task, updates=min(task.updates, updates or task.updates)) for task in tasks]


@dataclass(frozen=True)
class Timing:
    """Of a finished run: steps per second, and the seconds of one update by phase."""

    sps: float
    period: float
    phases: dict[str, float] = field(default_factory=dict)
    comm: float = 0.0  # part of the update, as the trainer estimates it
    saving: float = 0.0  # of all time, that checkpoints held training up


def read_timing(rows: Sequence[dict[str, Any]], skip: int, tail: int = 0) -> Timing:
    """Means over the rows between the first and the last few; there is one for each update."""
    kept = rows[skip : len(rows) - tail]
    steps = kept[-1]["progress/steps"] - rows[skip - 1]["progress/steps"]
    seconds = sum(steps / len(kept) / row["perf/sps"] for row in kept)

    def mean(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in kept) / len(kept)

    phases = {phase: mean(f"time/{phase}") for phase in PHASES}
    period = seconds / len(kept)
    return Timing(steps / seconds, period, phases, mean("time/comm"), mean("time/save") / period)


class Trainer:
    """Starts runs in a temporary folder and reads what they wrote."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="spmdrl-benchmark-")
        self._count = 0
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        # The trainer sets this itself where several ranks share a machine; here it holds for a
        # single rank too, so that the comparison is between equals.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
        self.env = os.environ | {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"}

    def new_run(self) -> Path:
        self._count += 1
        return Path(self._folder.name) / str(self._count)

    def alone(self, task: Task, copies: int = 1) -> list[Timing]:
        """`copies` runs of one rank at the same time that know nothing of each other."""
        runs = [self.new_run() for _ in range(copies)]
        return self._train(task, runs, lambda i, run: [*self.pinned(i), *task.arguments(1, run)])

    def together(self, task: Task) -> Timing:
        """One run of two ranks."""
        both = ",".join(str(core) for core in self.cores)
        command = ["taskset", "-c", both, *task.arguments(2, run := self.new_run())]
        return self._train(task, [run], lambda *_: [*command, "--nprocs", "2"])[0]

    def freely(self, task: Task, ranks: int) -> Timing:
        """One run on both cores; threads and everything else are as its launcher sets them."""
        both = ",".join(str(core) for core in self.cores)
        command = ["taskset", "-c", both, *task.arguments(ranks, run := self.new_run())]
        command += ["--nprocs", str(ranks)]
        return self._train(task, [run], lambda *_: command, dict(os.environ))[0]

    def pinned(self, place: int) -> list[str]:
        return ["taskset", "-c", str(self.cores[place % len(self.cores)])]

    def _train(
        self,
        task: Task,
        runs: Sequence[Path],
        command: Callable[[int, Path], list[str]],
        env: dict[str, str] | None = None,
    ) -> list[Timing]:
        logs = [run.with_suffix(".log") for run in runs]
        children = []
        try:
            for i, (run, log) in enumerate(zip(runs, logs, strict=True)):
                children.append(self._start(command(i, run), log, env or self.env))
            for child, log in zip(children, logs, strict=True):
                if child.wait(TIMEOUT_S) != 0:
                    raise RuntimeError(f"{task.name} failed:\n{log.read_text()[-3000:]}")
        finally:
            for child in children:
                child.kill()  # does nothing to those that have ended
        return [read_timing(read_metrics(run), task.skip, task.tail) for run in runs]

    def _start(
        self, command: Sequence[str], log: Path, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)

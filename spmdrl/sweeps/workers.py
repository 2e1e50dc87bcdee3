"""Training processes side by side, each with its own share of this machine's cores."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.parallel.spawn import SHARED_MARK, end_with_parent
from spmdrl.runtime.signals import StopRequest

__all__ = ["Job", "core_shares", "run_jobs"]

POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    log: Path
    """What the process prints."""


@dataclass
class Worker:
    job: Job
    process: subprocess.Popen[bytes]
    cores: set[int]
    since: float


Told = Callable[[Job, int, float], None]  # the job, its exit code, its seconds


def core_shares(count: int) -> list[set[int]]:
    """This process's cores in as many parts; cores are shared where there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    return [set(mine[n::count]) or {mine[n % len(mine)]} for n in range(count)]


def run_jobs(jobs: Sequence[Job], parallel: int, stop: StopRequest, told: Told) -> bool:
    """Run them in order, so many at a time; False if a stop was requested before the end.

    A stop request is handed on once; the runs then save a checkpoint and end.
    """
    waiting, free = list(jobs), core_shares(parallel)
    working: list[Worker] = []
    handed_on = False
    while working or (waiting and not stop.signal):
        while waiting and free and not stop.signal:
            working.append(_start(waiting.pop(0), free.pop(0), parallel > 1))
        if stop.signal and not handed_on:
            handed_on = True
            for worker in working:
                worker.process.terminate()
        for worker in [w for w in working if w.process.poll() is not None]:
            working.remove(worker)
            free.append(worker.cores)
            told(worker.job, worker.process.returncode, time.monotonic() - worker.since)
        time.sleep(POLL_S)
    return not stop.signal


def _start(job: Job, cores: set[int], shared: bool) -> Worker:
    def prepare() -> None:
        end_with_parent()
        os.sched_setaffinity(0, cores)

    # A session of its own: Ctrl-C is for the sweep, which hands it on.
    environment = os.environ | ({SHARED_MARK: "1"} if shared else {})
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True, preexec_fn=prepare,
        )  # fmt: skip
    return Worker(job, process, cores, time.monotonic())

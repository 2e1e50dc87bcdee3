"""One trial of the campaign, whatever its kind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.children import ROOT, clean_environment
from tests.faults.places import SAME_ADDRESSES
from tests.faults.trials import MARK

__all__ = ["RULES", "Bench", "Result", "start"]

RULES = 1  # raised when what a trial must show changes: older ones are not counted


@dataclass(frozen=True)
class Result:
    kind: str
    number: int
    what: str  # was done, in which way
    held: bool
    said: str  # the report, or what else shows that it held
    why: str  # it did not hold
    seconds: float = 0.0
    rules: int = field(default=RULES)


@dataclass(frozen=True)
class Bench:
    """Where a campaign keeps what its trials share."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "programs"

    def environment(self, place: Path, **more: str) -> dict[str, str]:
        """Of the processes of one trial: private places, so that leftovers can be seen."""
        for name in ("runtime", "tmp", "home"):
            (place / name).mkdir(mode=0o700, exist_ok=True, parents=True)
        return clean_environment(
            XDG_RUNTIME_DIR=str(place / "runtime"),
            XDG_CACHE_HOME=str(place / "home"),
            TMPDIR=str(place / "tmp"),
            JAX_COMPILATION_CACHE_DIR=str(self.programs),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
            PYTHONPATH=str(ROOT),
            **{MARK: str(place)},
            **more,
        )


def start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A job in a session of its own: a signal to its group reaches nobody else."""
    return subprocess.Popen(
        [*SAME_ADDRESSES, *command], env=dict(env), cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def leftovers(place: Path) -> list[str]:
    """What a job that was killed has left in temporary folders."""
    found = [p for name in ("tmp", "runtime") for p in (place / name).rglob("*") if not p.is_dir()]
    return sorted(str(p.relative_to(place)) for p in found)


def wait_until(condition, job: subprocess.Popen[str], limit_s: float = 120.0) -> bool:
    """Whether it came true while the job was running."""
    until = time.monotonic() + limit_s
    while job.poll() is None and time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""Where each rank is, to the phase, in files that outlive it.

A heartbeat is up to half a second old, which may be many updates. A place is written whenever a
rank enters a phase, so it is right at the very moment of a kill. It goes into the system's memory
of a file, for processes of the same host, at the price of one system call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from spmdrl.parallel.own_folder import read_own
from spmdrl.parallel.topology import detect

__all__ = ["Place", "PlaceFile", "has_left", "read_place", "siblings"]

LENGTH = 64  # of every record, so that a new one covers the old one
LEFT = "left"  # instead of a phase


@dataclass(frozen=True)
class Place:
    pid: int
    update: int
    phase: str


class PlaceFile:
    """This rank's, in the job's folder; does nothing without one."""

    def __init__(self, folder: Path | None, rank: int):
        self._path = _path(folder, rank) if folder is not None else None
        self._descriptor: int | None = None

    def open(self) -> None:
        if self._path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._descriptor = os.open(self._path, flags, 0o600)

    def write(self, update: int, phase: str) -> None:
        if self._descriptor is not None:
            record = f"{os.getpid()} {update} {phase}".ljust(LENGTH)
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, record.encode(), 0)

    def leave(self) -> None:
        """This rank ends in order: the others must not conclude that it was killed."""
        self.write(0, LEFT)
        if self._path is not None and self._descriptor is not None and _all_left(self._path.parent):
            shutil.rmtree(self._path.parent, ignore_errors=True)


def _all_left(folder: Path) -> bool:
    """Whether the last of the ranks has come to its end."""
    with contextlib.suppress(OSError):
        ranks = [int(file.stem.removeprefix("rank-")) for file in folder.glob("rank-*.now")]
        beats = any(folder.glob("rank-*.json"))  # of ranks that were killed, or are still there
        return not beats and all(has_left(folder, rank) for rank in ranks)
    return False


def has_left(folder: Path, rank: int) -> bool:
    place = read_place(folder, rank)
    return place is not None and place.phase == LEFT


def read_place(folder: Path, rank: int) -> Place | None:
    try:
        pid, update, phase = read_own(_path(folder, rank)).split()
        return Place(int(pid), int(update), phase)
    except (OSError, ValueError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.now"


def siblings() -> dict[int, int]:
    """{rank: pid} of the ranks that this rank's launcher has started on this host.

    Known before they have done anything themselves, so that one that is killed as it starts can
    be named. Ranks that are being started are missing at first.
    """
    found = {}
    for pid in _children(os.getppid()):
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            pairs = (word.partition("=") for word in words.split("\0"))
            topology = detect({name: value for name, _, value in pairs})
            if topology.size > 1:
                found[topology.rank] = pid
    return found


def _children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in thread.read_text().split()]
    return found

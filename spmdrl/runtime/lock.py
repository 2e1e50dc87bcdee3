"""One job for a run directory: a lock that the kernel gives back when its owner dies.

POSIX record locks work over NFS too, and a forked worker does not inherit them. They have one
trap: closing *any* descriptor of the file gives up the lock, so a process never opens a lock file
that it holds. Nothing here imports jax.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError, parse_json
from spmdrl.runtime.files import read_plain

__all__ = ["LOCK_NAME", "check_free", "is_taken", "release", "take"]

LOCK_NAME = ".lock"
REQUEUE_WAIT_S = 60.0  # Slurm may start a requeued job while the old one is still ending
POLL_S = 0.2
_IN_USE = (errno.EAGAIN, errno.EACCES)
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid

_held: dict[tuple[int, int], int] = {}  # descriptors by device and inode of their lock files


def take(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Lock the directory for the life of this process; ConfigError where another one has it."""
    _wait_or_refuse(folder, environ, lambda: _try_take(folder))


def check_free(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """ConfigError where another process has the directory; changes nothing."""
    _wait_or_refuse(folder, environ, lambda: _is_mine(folder) or not is_taken(folder))


def release(folder: Path) -> None:
    """Give the directory back before this process ends."""
    file = folder / LOCK_NAME
    descriptor = _held.pop(_identity(file), None) if file.exists() else None
    if descriptor is not None:
        os.close(descriptor)


def _wait_or_refuse(folder: Path, environ: Mapping[str, str], attempt: Callable[[], bool]) -> None:
    """Try until it works: at once or not at all, except for a requeued job."""
    patience = REQUEUE_WAIT_S if int(environ.get("SLURM_RESTART_COUNT") or 0) > 0 else 0.0
    started, said = time.monotonic(), False
    while not attempt():
        if time.monotonic() - started >= patience:
            raise ConfigError(
                f"run_dir {folder} is in use by {_owner(folder)}; wait for it to end or choose "
                "another --run-dir"
            )
        if not said:
            print(f"spmdrl: waiting for {_owner(folder)} to leave {folder}", file=sys.stderr)
            said = True
        time.sleep(POLL_S)


def _try_take(folder: Path) -> bool:
    file = folder / LOCK_NAME
    if file.exists() and _identity(file) in _held:
        return True
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o666)  # less the umask: a group may share its runs
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _IN_USE:
            return False
        _say_unlocked(folder, error)
        return True
    found = os.fstat(descriptor)
    if not file.exists() or _identity(file) != (found.st_dev, found.st_ino):
        os.close(descriptor)  # the directory was moved aside in between
        return False
    _held[found.st_dev, found.st_ino] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_about_me()).encode(), 0)
    return True


def is_taken(folder: Path) -> bool | None:
    """Whether a process has the directory; None where nobody can tell."""
    file = folder / LOCK_NAME
    if not file.is_file():
        return None
    if _identity(file) in _held:
        return True
    wish = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # whoever takes it will say why that cannot be done
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, wish)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _is_mine(folder: Path) -> bool:
    file = folder / LOCK_NAME
    return file.is_file() and _identity(file) in _held


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


def _about_me() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _owner(folder: Path) -> str:
    """Who holds the lock, by what it wrote there."""
    try:
        found = parse_json(read_plain(folder / LOCK_NAME, 10_000))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["time"]))
        job = f" (Slurm job {found['slurm_job']})" if found["slurm_job"] else ""
        return f"pid {found['pid']} on {found['host']} since {since}{job}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"  # which has it since this very moment


def _say_unlocked(folder: Path, error: OSError) -> None:
    print(
        f"spmdrl: the file system of {folder} has no locks ({error.strerror}); make sure that only "
        "one job uses this run_dir",
        file=sys.stderr,
    )

"""A private folder of one job on this host, where its ranks tell each other where they are.

Nothing here imports jax or MPI: it is used from the first moment of a process on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from spmdrl.parallel.own_folder import cache_folder, own_folder

__all__ = ["JOB_MARK", "start_folder"]

JOB_MARK = "SPMDRL_JOB"  # names the job that --nprocs started
DAY = 86400.0  # seconds


def start_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this job's ranks keep their places, and their heartbeats before there is a run.

    A rank that is killed while it still imports jax shall be named too. The job's name can be
    guessed, so the folder stands where no other user can write; None if there is no such place.
    """
    job = environ.get(JOB_MARK) or environ.get("PMIX_NAMESPACE")
    if job is None and "SLURM_STEP_ID" in environ:
        job = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    if job is None:
        return None
    base = own_folder(_user_folder(environ), "jobs")
    if base is None:
        return None
    _prune(base)
    return own_folder(base, re.sub(r"[^\w.-]", "-", f"job-{job}"))


def _user_folder(environ: Mapping[str, str]) -> Path:
    """On this host and gone at logout, where there is such a place; else in the user's cache."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    with contextlib.suppress(OSError):
        found = os.lstat(runtime)
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if private and found.st_uid == os.geteuid():
            return runtime / "spmdrl"
    return cache_folder(environ)


def _prune(base: Path) -> None:
    """Drop the folders that killed jobs left."""
    for folder in base.iterdir():
        with contextlib.suppress(OSError):  # another rank does the same at this moment
            newest = max(os.lstat(path).st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > DAY:
                shutil.rmtree(folder)

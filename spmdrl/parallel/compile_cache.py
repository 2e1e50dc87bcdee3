"""Compiled programs kept between runs, so that the second start is fast.

jax writes its cache in place: a killed process leaves half a file, which is then never replaced.
So every process works in a folder of links to what is known to be whole, and hands its new
programs over by a link. Nothing here imports jax before it is asked to compile.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from spmdrl.parallel.own_folder import cache_folder, is_own_file, own_folder

__all__ = ["open_cache", "private_jit", "publish"]

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
WORK = ".work-"
LIMIT_BYTES = 1 << 29
DAY = 86400.0
PRIVATE = "private_"  # how the names of such functions begin


def open_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let jax work in a folder of its own, filled from the cache; what the user set stays."""
    if VARIABLE in environ or environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() == "false":
        return
    shared = own_folder(cache_folder(environ), f"programs-{_processor()}")
    if shared is None:
        return  # no cache, no harm: a read-only home, or somebody else's folder
    try:
        _prune(shared)
        work = Path(tempfile.mkdtemp(prefix=WORK, dir=shared))
        for entry in _entries(shared):
            with contextlib.suppress(FileNotFoundError):  # another process has just pruned it
                os.link(entry, work / entry.name)
    except OSError:
        return  # a file system without links, or one that is full
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    environ[VARIABLE] = str(work)
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    # XLA's own caches would put the folder's name into the key of every program.
    environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")


def publish(environ: MutableMapping[str, str] = os.environ) -> None:
    """Hand this process's new programs over to those that start later."""
    work = Path(environ.get(VARIABLE, "."))
    if not work.name.startswith(WORK):
        return
    for file in work.glob("*-cache"):
        file.chmod(0o600)  # jax leaves that to the umask
    for entry in _entries(work):
        if not entry.name.startswith(f"jit_{PRIVATE}"):
            with contextlib.suppress(OSError):  # it is there already, or the disk is full
                os.link(entry, work.parent / entry.name)


def private_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` for a program with an address of this very process inside, never to be published.

    The simulator's and a communicator's are such addresses: no other process could use the program.
    """
    import jax

    @functools.wraps(function)
    def private(*args: Any) -> Any:
        return function(*args)

    private.__name__ = private.__qualname__ = f"{PRIVATE}{function.__name__.strip('<>')}"
    return jax.jit(private, **options)


def _processor() -> str:
    """What kind it is: programs made for one may not run on another."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = sorted({n for n in lines if n.startswith(("flags", "Features", "model name"))})
        return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:12]
    return "any"


def _entries(folder: Path) -> list[Path]:
    """The programs in it; only those of this user, for they are going to be executed."""
    named = [file for file in folder.iterdir() if file.name.endswith("-cache")]
    return [file for file in named if is_own_file(file)]


def _prune(shared: Path) -> None:
    """Keep the newest programs up to a limit, and drop what killed processes left."""
    now = time.time()
    for work in shared.glob(f"{WORK}*"):
        if now - work.stat().st_mtime > DAY:
            shutil.rmtree(work, ignore_errors=True)
    total = 0
    for entry in sorted(_entries(shared), key=lambda f: f.stat().st_mtime, reverse=True):
        total += entry.stat().st_size
        if total > LIMIT_BYTES:
            entry.unlink(missing_ok=True)

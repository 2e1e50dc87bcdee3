"""Folders that other users of the machine cannot write to, and files that are no links.

What is kept in a place whose name anybody can guess might have been put there by somebody else: a
link that leads elsewhere, or a program. Nothing here imports jax.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_folder", "is_own_file", "own_folder", "read_own", "write_own"]


def own_folder(path: Path, *inside: str) -> Path | None:
    """The folder, and those inside, made where missing; None where one is not this user's alone."""
    if not _make_own(path):
        return None
    return own_folder(path / inside[0], *inside[1:]) if inside else path


def _make_own(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if own and found.st_mode & 0o077:
            path.chmod(0o700)
        return own
    except OSError:
        return False


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """This program's part of the user's cache directory."""
    try:
        home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        home = "/nonexistent"
    return Path(home) / "spmdrl"


def is_own_file(path: Path) -> bool:
    """Whether it is a plain file that only this user can write, not a link to one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & 0o022


def write_own(path: Path, text: str) -> None:
    """Replace the file as a whole; nothing that stood there, link or not, is written through."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o644), "w") as file:
        file.write(text)
    os.replace(temporary, path)


def read_own(path: Path) -> str:
    """The text of a file that is no link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        return file.read()

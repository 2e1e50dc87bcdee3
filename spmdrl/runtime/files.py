"""Small files of a run: written whole or not at all, read even where a kill has cut them.

A run directory may be a stranger's, so nothing is read that is no plain file or has no bound, and
nothing is written through a link.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from spmdrl.config import ConfigError, parse_json

__all__ = [
    "fsync",
    "is_plain_file",
    "last_rows",
    "make_folder",
    "open_plain",
    "read_json",
    "read_metrics",
    "read_plain",
    "read_rows",
    "replace_file",
    "replace_text",
    "set_aside",
    "write_flushed",
    "write_json",
]

METRICS = "metrics.jsonl"
TAIL_BYTES = 65_536  # holds the last rows of metrics.jsonl, however long the run is
LARGEST = 1 << 26  # bytes of a file that is read as a whole; ours are a thousandth of it
LONGEST_LINE = 1 << 20
LARGEST_METRICS = 1 << 32  # six million rows

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------
# Writing


def replace_text(file: Path, text: str) -> None:
    replace_file(file, text.encode())


def write_json(file: Path, value: Any) -> None:
    replace_text(file, json.dumps(value, indent=2) + "\n")


def replace_file(file: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees half a file, not even after a power cut."""
    temporary = _beside(file)
    temporary.unlink(missing_ok=True)  # of a killed process; or a link, which leads elsewhere
    write_flushed(temporary, data)
    os.replace(temporary, file)
    fsync(file.parent)


def write_flushed(file: Path, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # By Python, not by a library's own writer: a full disk must be an OSError.
    with os.fdopen(os.open(file, flags, 0o666), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, parents: bool = False) -> None:
    """A folder whose name is on the disk when this returns; one that is there already is fine."""
    if parents and not path.parent.exists():
        make_folder(path.parent, parents=True)
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # a parent that may be written but not read
            fsync(path.parent)


def _beside(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


def set_aside(path: Path) -> Path:
    """Give what is damaged another name, beside it and free; nothing is ever thrown away."""
    number, aside = 0, path.with_name(f"damaged-{path.name}")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"damaged-{path.name}.{number}")
    os.rename(path, aside)
    return aside


# ---------------------------------------------------------------------------------------------
# Reading files that may be missing, half written or not ours


def open_plain(file: Path) -> BinaryIO:
    """A plain file for reading; OSError at once for a pipe, a device or a folder."""
    # Without O_NONBLOCK a named pipe would keep us until somebody writes into it.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a plain file", str(file))
    return os.fdopen(descriptor, "rb")


def is_plain_file(path: Path) -> bool:
    """Not a link to one either: what a link of a stranger's leads to is none of his files."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_plain(file: Path, limit: int = LARGEST) -> bytes:
    """All bytes of a plain file; OSError for one of more than `limit`."""
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, more than {limit}", str(file))
        return stream.read(limit)


def read_json(file: Path) -> dict[str, Any]:
    """The object in the file; empty if there is none that can be read."""
    try:
        value = parse_json(read_plain(file))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_rows(file: Path, last_bytes: int | None = None) -> list[Row]:
    """The objects of a file with one on each line, oldest first; others are left out.

    With `last_bytes` only those in the end of the file, which may begin amid a line.
    """
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if last_bytes is not None:
            stream.seek(max(0, size - last_bytes))
        elif size > LARGEST_METRICS:
            raise OSError(errno.EFBIG, f"has {size} bytes, more than {LARGEST_METRICS}", str(file))
        return [row for row in map(_row, _lines(stream)) if row is not None]


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines, an over-long one in parts, of which none is a row."""
    while line := stream.readline(LONGEST_LINE):
        yield line


def _row(line: bytes) -> Row | None:
    if not line.lstrip().startswith(b"{"):
        return None
    with contextlib.suppress(ValueError):
        row = parse_json(line)
        return row if isinstance(row, dict) else None
    return None


def read_metrics(run_dir: str | Path) -> list[Row]:
    """All rows that a run has logged; raise ConfigError if there are none."""
    file = Path(run_dir) / METRICS
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no {METRICS}")
    rows = read_rows(file)
    if not rows:
        raise ConfigError(f"{file} holds no rows yet")
    return rows


def last_rows(run_dir: Path) -> list[Row]:
    """The last rows that a run has logged, newest first; none if they cannot be read."""
    try:
        return read_rows(run_dir / METRICS, TAIL_BYTES)[::-1]
    except OSError:
        return []

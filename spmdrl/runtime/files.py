"""Small files of a run: written whole or not at all, read even where a kill has cut them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError

__all__ = [
    "fsync",
    "last_rows",
    "read_json",
    "read_metrics",
    "read_rows",
    "replace_file",
    "replace_text",
    "write_flushed",
    "write_json",
]

METRICS = "metrics.jsonl"
TAIL_BYTES = 65_536  # holds the last rows of metrics.jsonl, however long the run is

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------
# Writing


def replace_text(file: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = _beside(file)
    temporary.write_text(text)
    os.replace(temporary, file)


def write_json(file: Path, value: Any) -> None:
    replace_text(file, json.dumps(value, indent=2) + "\n")


def replace_file(file: Path, data: bytes) -> None:
    """The same, and flushed to the disk: it is there after a power cut too."""
    temporary = _beside(file)
    write_flushed(temporary, data)
    os.replace(temporary, file)
    fsync(file.parent)


def write_flushed(file: Path, data: bytes) -> None:
    # By Python, not by a library's own writer: a full disk must be an OSError.
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


# ---------------------------------------------------------------------------------------------
# Reading files that may be missing, half written or not ours


def read_json(file: Path) -> dict[str, Any]:
    """The object in the file; empty if there is none that can be read."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_rows(file: Path, last_bytes: int | None = None) -> list[Row]:
    """The objects of a file with one on each line, oldest first; others are left out.

    With `last_bytes` only those in the end of the file, which may begin amid a line.
    """
    with file.open("rb") as stream:
        if last_bytes is not None:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - last_bytes))
        lines = stream.read().splitlines()
    rows = (_row(line) for line in lines)
    return [row for row in rows if row is not None]


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


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

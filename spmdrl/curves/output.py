"""Where a result goes: never over something that is there, unless the user says so."""

from __future__ import annotations

import itertools
from pathlib import Path

from spmdrl.config import ConfigError

__all__ = ["place_for"]


def place_for(out: str | None, default: str, overwrite: bool) -> str:
    """The file that the user named, or a free one beside the default: curves-2.png."""
    if out is not None:
        if Path(out).exists() and not overwrite:
            raise ConfigError(f"--out {out} exists; name another file, or add --overwrite")
        return out
    if overwrite or not Path(default).exists():
        return default
    name = Path(default)
    numbered = (name.with_stem(f"{name.stem}-{n}") for n in itertools.count(2))
    return str(next(file for file in numbered if not file.exists()))

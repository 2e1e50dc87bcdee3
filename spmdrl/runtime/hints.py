"""Commands that the program suggests, spelled so that they can be pasted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

__all__ = ["suggested"]

BY_UV = "UV_RUN_RECURSION_DEPTH"  # `uv run` sets it for what it starts; mpirun and srun hand it on


def suggested(command: str, *words: object, environ: Mapping[str, str] = os.environ) -> str:
    """The command line; whoever came by `uv run` has no `python` of the project on PATH."""
    start = ["uv", "run"] if environ.get(BY_UV) else []
    return shlex.join([*start, "python", "-m", f"spmdrl.{command}", *map(str, words)])

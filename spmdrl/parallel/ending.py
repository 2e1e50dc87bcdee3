"""How ranks that `--nprocs` started hand their exit code over, and see the terminal behind mpirun.

Of a rank whose exit code is not 0, mpirun says at length that the job has failed, after our own
last words. A run that was stopped on request has not: its ranks leave with 0, the code in a file.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

__all__ = ["Ending", "hand_over"]

ENDING_MARK = "SPMDRL_ENDING"


class Ending:
    """The side of the process that starts mpirun."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="spmdrl-")

    @property
    def marks(self) -> dict[str, str]:
        """For the ranks' environment."""
        marks = {ENDING_MARK: str(self._file)}
        if sys.stdout.isatty():
            size = shutil.get_terminal_size()
            marks |= {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
        return marks

    def read(self, code: int) -> int:
        """What the ranks have said, if mpirun's `code` is a good one. Only once."""
        said = self._file.read_text() if code == 0 and self._file.exists() else ""
        shutil.rmtree(self._folder, ignore_errors=True)
        return int(said or code)

    @property
    def _file(self) -> Path:
        return Path(self._folder) / "code"


def hand_over(code: int, is_root: bool) -> int:
    """The exit code of a rank that ends together with all others; the code itself without mpirun
    or under one that the user has started."""
    place = os.environ.get(ENDING_MARK)
    if not place or code == 0:
        return code
    try:
        if is_root:
            Path(place).write_text(str(code))
    except OSError:
        return code
    return 0

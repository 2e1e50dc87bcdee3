"""Short training runs in processes of their own, for commands that compare or measure them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TrialError", "train"]


class TrialError(RuntimeError):
    """A trial run failed; the message has its command and its own last words."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def train(argv: Sequence[str], folder: Path) -> None:
    """A run into the folder, silent; raise TrialError if it fails."""
    words = ["-m", "spmdrl.train", *argv, "--run-dir", str(folder), "--log.panel", "off"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TrialError(
            f"{last_words(done.stderr or done.stdout)} (exit code {done.returncode} of: "
            f"{shlex.join(['python', *words])})",
            done.returncode,
        )


def last_words(output: str) -> str:
    """Why a run failed, in its own words: what it says of itself, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line.removeprefix("spmdrl: ") for line in lines if line.startswith("spmdrl: ")]
    return (own or lines or ["a trial run failed without any output"])[-1]

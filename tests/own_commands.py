"""Commands of spmdrl in any folder, as somebody with code of his own starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.children import ROOT, clean_environment

__all__ = ["refuses", "spmdrl", "succeeds"]


def spmdrl(
    command: str, *words: object, cwd: Path, start: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """A command, started in that folder; OWN_PROJECT_MARK says where imports leave a mark."""
    environment = clean_environment(PYTHONPATH=str(ROOT), **more)
    return subprocess.run(
        [*start, sys.executable, "-m", f"spmdrl.{command}", *map(str, words)],
        capture_output=True, text=True, cwd=cwd, env=environment, check=False,
    )  # fmt: skip


def succeeds(command: str, *words: object, cwd: Path, **more) -> str:
    done = spmdrl(command, *words, cwd=cwd, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def refuses(command: str, *words: object, cwd: Path, **more) -> str:
    """The one line that it says; with --trust it may say before what it is about to import."""
    done = spmdrl(command, *words, cwd=cwd, **more)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stderr.splitlines()
    assert all(line.startswith("spmdrl: ") for line in lines)
    assert 1 <= len(lines) <= 1 + ("--trust" in words)
    return lines[-1]

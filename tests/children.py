"""What tests start in a process of its own, at the top of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["CARTPOLE", "ROOT", "clean_environment", "python", "succeed", "train_command"]

ROOT = Path(__file__).resolve().parents[1]
CARTPOLE = str(ROOT / "configs" / "cartpole.py")
# What a launcher of this very test, uv, or settings of jax and of the tests may have left.
LEFT_OUT = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "SPMDRL_", "XLA_", "JAX_", "UV_RUN")


def clean_environment(**more: str) -> dict[str, str]:
    """As in a shell that has started nothing yet; messages are wrapped at 100 columns."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
    return kept | {"COLUMNS": "100"} | more


def python(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """A Python process with these words, and more in its clean environment."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True, text=True, cwd=ROOT, env=clean_environment(**more), check=False,
    )  # fmt: skip


def succeed(*words: object, **more: str) -> str:
    """What it prints."""
    done = python(*words, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train_command(*flags: object, config: str = CARTPOLE) -> list[str]:
    """Training, for who starts it under something else or ends it before its end."""
    return [sys.executable, "-m", "spmdrl.train", config, *map(str, flags)]

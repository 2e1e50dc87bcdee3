"""Virtual environments for programs that cannot live in the project's own.

Each is made once, from the package index, under ~/.cache/spmdrl/peers (or $SPMDRL_PEERS), and made
anew when its requirements have changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NotBuilt", "Venv", "last_line"]

TIMEOUT_S = 1800
MARK = "complete.json"  # holds the requirements; without it the environment is unfinished
LIST_PACKAGES = """
import importlib.metadata as m, json
found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in m.distributions()}
print(json.dumps(found))
"""


class NotBuilt(RuntimeError):
    """The message is the last line of what went wrong."""


@dataclass(frozen=True)
class Venv:
    """An environment by its name and requirements."""

    name: str
    packages: tuple[str, ...]
    python_version: str = "3.11"

    @property
    def folder(self) -> Path:
        return cache() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> dict[str, object]:
        return {"python": self.python_version, "packages": list(self.packages)}

    def is_built(self) -> bool:
        mark = self.folder / MARK
        return mark.is_file() and json.loads(mark.read_text()) == self.requirements

    def build(self) -> None:
        """Does nothing where it is there already."""
        if self.is_built():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _uv("venv", "--python", self.python_version, str(self.folder))
        self._install()
        (self.folder / MARK).write_text(json.dumps(self.requirements))

    def _install(self) -> None:
        install = ["pip", "install", "--python", str(self.python), *self.packages]
        if not any(package.startswith("torch==") for package in self.packages):
            return _uv(*install)
        try:
            _uv(*install, "--torch-backend", "cpu")
        except NotBuilt:  # PyTorch's own index is out of reach: the wheel with CUDA works as well
            _uv(*install)

    def versions(self) -> dict[str, str]:
        """Of all that is installed."""
        command = [str(self.python), "-c", LIST_PACKAGES]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(answer.stdout)


def cache() -> Path:
    return Path(os.environ.get("SPMDRL_PEERS") or Path.home() / ".cache" / "spmdrl" / "peers")


def _uv(*arguments: str) -> None:
    # In the cache's folder: uv would otherwise apply the constraints of the project's pyproject.
    answer = _run(["uv", *arguments], cache())
    if answer.returncode != 0:
        raise NotBuilt(f"uv {arguments[0]}: {last_line(answer.stderr) or 'no message'}")


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise NotBuilt("uv is not installed; pip install uv") from error
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"not ready after {TIMEOUT_S} s") from error


def last_line(text: str) -> str:
    """Where programs write what went wrong; fit for a cell of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return last.replace(str(Path.home()), "~").replace("|", "/")[:200]

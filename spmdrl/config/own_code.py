"""Code that the user brings along: a config file is Python, with whatever it imports and registers.

Environments and algorithms defined there must be known wherever the run has a process, so each of
them executes the same file. What is imported later, such as `env.id = "myenv:MyEnv"`, is found
beside the config file and in the current directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["execute", "executed", "executed_sha256", "folders", "search_in", "search_in_cwd"]


@dataclass(frozen=True)
class _Executed:
    module: ModuleType
    sha256: str


_executed: dict[str, _Executed] = {}  # by absolute path, the latest last
_folders: list[str] = []


def execute(file: Path) -> ModuleType:
    """The file as a module of its own name, so that classes defined in it can be found again.

    Once in a process, unless the file has changed: what it registers would be registered twice.
    """
    source, path = file.read_bytes(), str(file.resolve())
    digest = hashlib.sha256(source).hexdigest()
    known = _executed.pop(path, None)
    if known is None or known.sha256 != digest:
        known = _Executed(_run(file, source), digest)
    _executed[path] = known
    return known.module


def executed() -> list[str]:
    """The config files that this process has executed: a process it starts has to as well."""
    return list(_executed)


def executed_sha256(path: str) -> str:
    """Of the file as it was when it was executed."""
    return _executed[path].sha256


def folders() -> list[str]:
    """Where the user's modules are looked for, besides where Python does."""
    return list(_folders)


def search_in(places: Iterable[str]) -> None:
    """Look for modules there too, from now on."""
    for place in places:
        if place not in _folders:
            _folders.append(place)
        # At the end: in front, a config called brax.py would be taken for the library.
        if place not in sys.path:
            sys.path.append(place)


def search_in_cwd() -> None:
    """As `python -m` does, however this process was started."""
    if not sys.flags.safe_path:
        with contextlib.suppress(OSError):  # it may have been deleted
            search_in([os.getcwd()])


def _run(file: Path, source: bytes) -> ModuleType:
    """Execute exactly these bytes, whose hash is known, not a compiled file beside them."""
    spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # a variant imports its base by name
    try:
        exec(compile(source, str(file.absolute()), "exec", dont_inherit=True), vars(module))
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(folder)
        search_in([folder])
        search_in_cwd()
    return module

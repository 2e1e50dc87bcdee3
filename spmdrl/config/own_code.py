"""Code that the user brings along: a config file is Python, with whatever it imports and registers.

Environments and algorithms defined there must be known wherever the run has a process, so each of
them executes the same file. What is imported later, such as `env.id = "myenv:MyEnv"` or
`net.torso = "mynet:Tower"`, is found beside the config file and in the current directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.config.rules import ConfigError, suggest

__all__ = [
    "check_module", "execute", "executed", "executed_sha256", "explain", "find", "folders",
    "own_network", "search_in", "search_in_cwd",
]  # fmt: skip

PACKAGE = str(Path(__file__).parents[1])
STDLIB = sysconfig.get_path("stdlib")


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


# ---------------------------------------------------------------------------------------------
# Things that a config names as `module:thing`


def own_network(torso: str) -> str:
    """`net.torso` where it names a network of the user's; empty where it is one of ours."""
    return torso if ":" in torso else ""


def check_module(named: str, field: str) -> None:
    """Raise ConfigError if the module is nowhere to be found; it is not imported yet."""
    name = named.rpartition(":")[0]
    try:
        found = _config_file(name) or sys.modules.get(name) or importlib.util.find_spec(name)
    except Exception as error:  # packages around it are imported, and may do anything
        raise ConfigError(
            f"{field} {named!r}: importing {name} failed: {explain(error)}"
        ) from error
    if found is None:
        raise ConfigError(
            f"{field} {named!r}: there is no module {name}; put {name.replace('.', '/')}.py beside "
            "the config file"
        )


def find(named: str, field: str) -> Any:
    """The thing itself, from a config file by its name without .py, or from a module."""
    module_name, _, name = named.rpartition(":")
    try:
        module = _config_file(module_name) or importlib.import_module(module_name)
    except Exception as error:  # of code that we do not know
        problem = f"importing {module_name} failed: {explain(error)}"
        raise ConfigError(f"{field} {named!r}: {problem}") from error
    if not hasattr(module, name):
        close = suggest(name, [known for known in vars(module) if known[0] != "_"])
        raise ConfigError(f"{field} {named!r}: {module_name} has no {name}{close}")
    return getattr(module, name)


def _config_file(name: str) -> ModuleType | None:
    """One that was executed: importing it would execute it a second time."""
    known = (done.module for path, done in reversed(_executed.items()) if Path(path).stem == name)
    return next(known, None)


def explain(error: BaseException) -> str:
    """Type, text and place in one line; the place where it is in code of the user's."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if _is_of_the_user(f.filename)), None)
    return f"{text} ({last.filename}, line {last.lineno})" if last else text


def _is_of_the_user(file: str) -> bool:
    return not file.startswith((PACKAGE, STDLIB, "<")) and "site-packages" not in file


# ---------------------------------------------------------------------------------------------
# Where modules are


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

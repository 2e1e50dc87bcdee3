"""Where the user's code of a run came from: `code.json` in its directory.

For whoever plays or resumes the run later. It is a record, not a permission: what a run directory
names is executed only where the user has asked for it, see `consent.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import Config, EnvConfig, own_code
from spmdrl.envs.origin import named_code, needs_own_code
from spmdrl.runtime.files import read_json, write_json

__all__ = [
    "CODE_FILE", "Code", "Source", "changed_files", "changed_since", "code_from_json", "code_named",
    "find_code", "needs_code", "read_code", "write_code",
]  # fmt: skip

CODE_FILE = "code.json"


@dataclass(frozen=True)
class Source:
    """A file of the user's, as it was."""

    name: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Code:
    """The user's code of a run."""

    config: Source | None
    """The config file; None where none was executed."""
    folders: tuple[str, ...]
    """Where its modules were found."""
    modules: tuple[Source, ...]
    needed: bool
    """Whether environments or network cannot be made without it."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return (*([self.config] if self.config else []), *self.modules)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# ---------------------------------------------------------------------------------------------
# Finding


def find_code(config: Config) -> Code:
    """The code that this process has executed or will import for a run of this config."""
    files = own_code.executed()
    return Code(
        config=Source("config file", files[-1], own_code.executed_sha256(files[-1]))
        if files
        else None,
        folders=tuple(own_code.folders()),
        modules=tuple(
            Source(name, str(file), sha256(file)) for name, file in sorted(_modules(config).items())
        ),
        needed=needs_code(config),
    )


def code_named(config: Config) -> list[str]:
    """What the config itself names as `module:thing` of the user's."""
    network = own_code.own_network(config.net.torso)
    return [*named_code(config.env), *([network] if network else [])]


def needs_code(config: Config) -> bool:
    """Whether a policy of this config can only be played with code of the user's."""
    return needs_own_code(config.env) or bool(own_code.own_network(config.net.torso))


def _modules(config: Config) -> dict[str, Path]:
    """Modules out of the user's folders that are loaded by now, and those named by the config.

    The latter may be loaded later, and only by the processes that hold the environments.
    """
    found = {name: file for name, file in _loaded() if _is_own(name, file)}
    for named in code_named(config):
        found |= _located(named.rpartition(":")[0])
    for module in [type(config.algo).__module__, *_registered(config.env)]:
        found |= {name: file for name, file in _located(module).items() if _is_own(name, file)}
    return found


def _loaded() -> Iterator[tuple[str, Path]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # no lazy module is woken up
        if isinstance(file, str):
            yield name, Path(file)


def _is_own(name: str, file: Path) -> bool:
    """Whether the module was found in one of the user's folders, rather than in one inside them,
    such as a virtual environment."""
    inside = name.replace(".", os.sep)
    places = (f"{inside}.py", os.path.join(inside, "__init__.py"))
    own = any(str(file) == os.path.join(f, place) for f in own_code.folders() for place in places)
    return own and name.split(".")[0] != "spmdrl"


def _located(module: str) -> dict[str, Path]:
    """The module's file, without executing it; nothing where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # it imports the packages that the module is in, which may do anything
        return {}
    return {module: Path(spec.origin)} if spec and spec.has_location and spec.origin else {}


def _registered(env: EnvConfig) -> list[str]:
    """Modules of the entry points under which a plain id was registered."""
    if env.backend != "gymnasium":
        return []
    import gymnasium as gym

    spec = gym.registry.get(env.id.rpartition(":")[2])
    points = (spec.entry_point, spec.vector_entry_point) if spec else ()
    return [point.partition(":")[0] for point in points if isinstance(point, str)]


def sha256(file: str | Path) -> str:
    """Of the file's bytes; empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------
# Comparing


def changed_files(before: Code, now: Code) -> list[str]:
    """Files whose code has another hash than at the last start of the run."""
    known = {source.name: source.sha256 for source in before.sources}
    return [s.file for s in now.sources if known.get(s.name, s.sha256) != s.sha256]


def changed_since(code: Code) -> list[str]:
    """Files that have changed on the disk since they were recorded."""
    return [source.file for source in code.sources if sha256(source.file) != source.sha256]


# ---------------------------------------------------------------------------------------------
# Disk


def write_code(run_dir: Path, code: Code) -> None:
    write_json(run_dir / CODE_FILE, code.to_json())


def read_code(run_dir: str | Path) -> Code | None:
    """None for a run that recorded none, as runs of older versions, or none that can be read."""
    return code_from_json(read_json(Path(run_dir) / CODE_FILE))


def code_from_json(value: Any) -> Code | None:
    """None unless it is what `Code.to_json` gives."""
    try:
        return Code(
            config=_source(value["config"]) if value["config"] is not None else None,
            folders=tuple(_text(folder) for folder in value["folders"]),
            modules=tuple(_source(row) for row in value["modules"]),
            needed=bool(value["needed"]),
        )
    except (KeyError, TypeError):
        return None


def _source(row: dict[str, Any]) -> Source:
    return Source(_text(row["name"]), _text(row["file"]), _text(row["sha256"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value

"""Libraries of environments written in JAX, one small adapter per file; own classes need none.

Light to import: ids are checked before this process is set up for jax, and all of these libraries
load it. So the names of each library stand in a list beside this file.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import ConfigError, suggest

if TYPE_CHECKING:
    from spmdrl.envs.jax_protocol import JaxEnv

__all__ = [
    "LIBRARIES", "check_jax_id", "known_names", "listed_names", "make", "split_id", "write_names",
]  # fmt: skip

NAMES = Path(__file__).with_name("names")


@dataclass(frozen=True)
class Library:
    """`module` is what Python imports, `package` what is installed."""

    module: str
    package: str
    adapter: str


LIBRARIES = {
    "gymnax": Library("gymnax", "gymnax", "gymnax"),
    "brax": Library("brax", "brax", "brax"),
    "playground": Library("mujoco_playground", "playground", "playground"),
    "craftax": Library("craftax", "craftax", "craftax"),
    "jumanji": Library("jumanji", "jumanji", "jumanji"),
    "navix": Library("navix", "navix", "navix"),
    "xminigrid": Library("xminigrid", "xminigrid", "xminigrid"),
}


def split_id(env_id: str) -> tuple[str, str]:
    """`(library or module, name)`: whoever imports it and whoever judges it must agree."""
    prefix, _, name = env_id.rpartition(":")
    return prefix, name


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """The environment of that id; ConfigError where there is none."""
    check_jax_id(env_id)
    prefix, name = split_id(env_id)
    maker = _from_library(prefix, name) if prefix in LIBRARIES else _own(prefix, name)
    try:
        return maker(**options)
    except TypeError as error:
        if _from_within(error):
            raise
        raise ConfigError(f"env.options do not fit {env_id}: {error}") from error


def _from_within(error: TypeError) -> bool:
    """Whether it was raised inside of a constructor, not by calling it wrongly."""
    return "argument" not in str(error)


def check_jax_id(env_id: str) -> None:
    """Raise ConfigError for an id that cannot be made here; loads neither jax nor the library."""
    prefix, name = split_id(env_id)
    if not prefix or not name:
        raise ConfigError(
            f"env.id {env_id!r}: with env.backend jax an id is LIBRARY:NAME or MODULE:CLASS, such "
            f"as gymnax:CartPole-v1 or my_module:MyEnv; libraries: {', '.join(LIBRARIES)}"
        )
    if prefix not in LIBRARIES:
        _check_module(env_id, prefix)
        return
    if not _installed(LIBRARIES[prefix].module):
        raise ConfigError(_lacking(f"env.id {env_id}", LIBRARIES[prefix].package, prefix))
    names = known_names(prefix)
    if names is not None:
        _check_name(env_id, names)


def _lacking(what: str, package: str, extra: str) -> str:
    return (
        f"{what} needs the package {package}, which is not installed; install it with "
        f"uv sync --extra {extra} or pip install '.[{extra}]'"
    )


def _check_name(env_id: str, names: list[str]) -> None:
    prefix, name = split_id(env_id)
    if name not in names:
        raise ConfigError(
            f"env.id {env_id!r} is not an environment of {prefix}{suggest(name, names)}"
        )


def _check_module(env_id: str, module: str) -> None:
    """Only the outermost package: to look into it would import it."""
    if not _installed(module.partition(".")[0]) and module not in sys.modules:
        raise ConfigError(
            f"env.id {env_id!r}: there is neither a library nor a module {module}"
            f"{suggest(module, LIBRARIES)} (a module of your own is found from the folder that "
            "holds it, or with that folder on PYTHONPATH)"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is there, but was made by hand and says nothing about itself
        return True


def known_names(prefix: str) -> list[str] | None:
    """The library's environments, from a list of the installed version; None for other versions."""
    version, names = listed_names(prefix)
    return names if version == importlib.metadata.version(LIBRARIES[prefix].package) else None


def listed_names(prefix: str) -> tuple[str, list[str]]:
    """The version of which there is a list, and the list."""
    file = NAMES / f"{prefix}.txt"
    version, *names = file.read_text().split() if file.exists() else ("",)
    return version, names


def write_names(prefix: str) -> None:
    """Renew the list, after an upgrade of the library."""
    version = importlib.metadata.version(LIBRARIES[prefix].package)
    lines = [version, *sorted(_adapter(prefix).names())]
    (NAMES / f"{prefix}.txt").write_text("\n".join(lines) + "\n")


def _adapter(prefix: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{LIBRARIES[prefix].adapter}")
    except ModuleNotFoundError as error:  # of the library, or of what it imports in turn
        raise ConfigError(_lacking(prefix, str(error.name), prefix)) from error


def _from_library(prefix: str, name: str) -> Callable[..., JaxEnv]:
    adapter = _adapter(prefix)
    _check_name(f"{prefix}:{name}", adapter.names())
    return lambda **options: adapter.make(name, options)


def _own(module: str, name: str) -> Any:
    """A class of the user's own, or anything else that makes an environment."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id {module}:{name}: {error}") from error
    if not hasattr(found, name):
        raise ConfigError(
            f"env.id {module}:{name}: {module} has no {name}{suggest(name, vars(found))}"
        )
    if not callable(getattr(found, name)):
        raise ConfigError(f"env.id {module}:{name} is not callable: name a class or a function")
    return getattr(found, name)

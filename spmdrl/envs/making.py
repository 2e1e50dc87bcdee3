"""From an id to an environment: registered ones, classes and functions of any module, wrappers.

An environment that makes many copies of itself, a `gymnasium.vector.VectorEnv`, is taken as it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from spmdrl.config import ConfigError, suggest
from spmdrl.envs.errors import explain

__all__ = [
    "Entry", "UnknownEnv", "arguments", "find_entry", "find_wrapper", "make_one", "make_vector",
]  # fmt: skip


class UnknownEnv(ConfigError):
    """Nothing has registered that id."""


@dataclass(frozen=True)
class Entry:
    """How an environment is made: `create(**options)`, a vector one with `num_envs` as well."""

    env_id: str
    create: Callable[..., Any]
    is_vector: bool
    is_registered: bool


def find_entry(env_id: str) -> Entry:
    """What the id stands for; ConfigError if nothing does."""
    module_name, _, name = env_id.rpartition(":")
    module = _imported(module_name, f"env.id {env_id!r}") if module_name else None
    own = getattr(module, name, None)
    if callable(own) and name not in gym.registry:
        return Entry(env_id, own, _makes_vectors(own), is_registered=False)
    return _registered(env_id, name, module)


def _registered(env_id: str, name: str, module: ModuleType | None) -> Entry:
    try:
        spec = gym.spec(name)
    except gym.error.Error as error:
        known = [*gym.registry, *(_callables(module) if module else [])]
        what = f"neither registered nor in {module.__name__}" if module else "not registered"
        raise UnknownEnv(
            f"env.id {env_id!r} is not a Gymnasium environment: {what}{suggest(name, known)}"
        ) from error
    if spec.entry_point is None:
        mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
        create = partial(gym.make_vec, name, vectorization_mode=mode)
        return Entry(env_id, create, is_vector=True, is_registered=True)
    return Entry(env_id, partial(gym.make, name), is_vector=False, is_registered=True)


def _imported(name: str, wanted_by: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{wanted_by}: {error}; install it, or start where it lies or with its folder in "
            "PYTHONPATH"
        ) from error
    except Exception as error:  # of code that we do not know
        raise ConfigError(f"{wanted_by}: importing {name} failed: {explain(error)}") from error


def _callables(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]


def _makes_vectors(own: Callable[..., Any]) -> bool:
    if inspect.isclass(own):
        return issubclass(own, VectorEnv)
    try:
        return "num_envs" in inspect.signature(own).parameters
    except (TypeError, ValueError):  # of a callable that does not tell
        return False


def arguments(made_by: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of what it takes; None for those without a default."""
    try:
        taken = inspect.signature(made_by).parameters.values()
    except (TypeError, ValueError):  # of a callable that does not tell
        return {}
    named = (p for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: None if p.default is p.empty else p.default for p in named}


def find_wrapper(name: str) -> Callable[[Any], Any]:
    """The function or class behind `module:name`."""
    module_name, _, function = name.rpartition(":")
    if not module_name:
        raise ConfigError(f"env.wrap {name!r} must be module:function")
    module = _imported(module_name, f"env.wrap {name!r}")
    found: Callable[[Any], Any] | None = getattr(module, function, None)
    if not callable(found):
        close = suggest(function, _callables(module))
        raise ConfigError(f"env.wrap {name!r}: {module_name} has no function {function}{close}")
    return found


def make_one(
    entry: Entry, options: Mapping[str, Any], wrap: Sequence[str], checked: bool
) -> gym.Env[Any, Any]:
    """An environment in its wrappers; `checked` has Gymnasium look at its first answers."""
    more = {} if checked or not entry.is_registered else {"disable_env_checker": True}
    env = _made(entry, {**more, **options}, wrap)
    if not isinstance(env, gym.Env):
        raise ConfigError(f"env.id {entry.env_id} makes a {_kind(env)}, not a gymnasium.Env")
    return env


def make_vector(
    entry: Entry, options: Mapping[str, Any], wrap: Sequence[str], num_envs: int
) -> Any:
    """A vector environment of as many, which must reset its environments on the next step."""
    env = _made(entry, {**options, "num_envs": num_envs}, wrap)
    if not isinstance(env, VectorEnv):
        raise ConfigError(f"env.id {entry.env_id} makes a {_kind(env)}, not a VectorEnv")
    if env.num_envs != num_envs:
        raise ConfigError(
            f"env.id {entry.env_id} was asked for {num_envs} environments and made {env.num_envs}"
        )
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        found = f"is {mode}" if mode else "is missing"
        raise ConfigError(
            f"env.id {entry.env_id} is a vector environment whose metadata['autoreset_mode'] "
            f"{found}; only AutoresetMode.NEXT_STEP can be used"
        )
    return env


def _made(entry: Entry, options: Mapping[str, Any], wrap: Sequence[str]) -> Any:
    wrappers = {name: find_wrapper(name) for name in wrap}
    try:
        env = entry.create(**options)
    except Exception as error:  # of code that we do not know
        given = f" with env.options {dict(options)}" if options else ""
        raise ConfigError(
            f"env.id {entry.env_id} could not be made{given}: {explain(error)}"
        ) from error
    for name, wrapper in wrappers.items():
        env = _wrapped(name, wrapper, env)
    return env


def _wrapped(name: str, wrapper: Callable[[Any], Any], env: Any) -> Any:
    try:
        wrapped = wrapper(env)
    except Exception as error:
        raise ConfigError(f"env.wrap {name} failed: {explain(error)}") from error
    if not isinstance(wrapped, (gym.Env, VectorEnv)):
        raise ConfigError(f"env.wrap {name} returned a {_kind(wrapped)}, not an environment")
    return wrapped


def _kind(value: Any) -> str:
    return type(value).__name__

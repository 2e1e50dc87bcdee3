"""Whose code an environment is: a simulator's that was installed with us, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmdrl.config import EnvConfig
from spmdrl.envs.jax_libraries import LIBRARIES, split_id

__all__ = ["named_code", "needs_own_code", "wrapper_names"]


def named_code(env: EnvConfig) -> list[str]:
    """What the config itself names as `module:thing`; making the environments imports it."""
    by_id = [env.id] if _names_a_module(env.id, env.backend) else []
    return [*by_id, *wrapper_names(env.wrap)]


def needs_own_code(env: EnvConfig) -> bool:
    """Whether the environments can only be made by code that does not come with the simulators."""
    if named_code(env):
        return True
    return env.backend == "gymnasium" and not _comes_with_gymnasium(env.id)


def _names_a_module(env_id: str, backend: str) -> bool:
    module, _ = split_id(env_id)  # as where it is imported
    if backend == "envpool" or not module:
        return False
    return backend != "jax" or module not in LIBRARIES


def wrapper_names(wrap: str | Sequence[str]) -> tuple[str, ...]:
    """One or several, separated by commas, or a tuple of them."""
    names = wrap.split(",") if isinstance(wrap, str) else wrap
    return tuple(name.strip() for name in names if name.strip())


def _comes_with_gymnasium(env_id: str) -> bool:
    """Not where a config file has put something of its own in the place of a known id."""
    import gymnasium as gym

    spec = gym.registry.get(env_id)
    if spec is None:
        return False
    return _module_of(spec.entry_point or spec.vector_entry_point).split(".")[0] == "gymnasium"


def _module_of(entry_point: str | Callable[..., object] | None) -> str:
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    return getattr(entry_point, "__module__", "")

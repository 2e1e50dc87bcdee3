"""What an environment says about itself: its spaces, its time limit and the options it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from spmdrl.config import EnvConfig
from spmdrl.envs.base import EnvBatch
from spmdrl.envs.families import family_of
from spmdrl.envs.jax_libraries import LIBRARIES, split_id
from spmdrl.envs.leaves import leaf_spaces
from spmdrl.envs.making import Entry, arguments, find_entry, make_one
from spmdrl.envs.origin import wrapper_names
from spmdrl.envs.view import ViewedBatch

__all__ = ["Facts", "facts_of"]

LONGEST = 60  # letters of an option's value
# Of every pool; the trainer decides about them.
POOL = {
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset",
    "base_path", "seed", "env_seed", "gym_reset_return_info",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """Everything as text, but for the limit."""

    family: str
    observation: tuple[str, ...]  # of each leaf
    action: tuple[str, ...]
    time_limit: int | None
    options: dict[str, str]  # with their values


def facts_of(env: EnvConfig, batch: EnvBatch) -> Facts:
    """`batch` is what `make_env` has made of it."""
    observation, action = (_leaves(space) for space in batch.spaces())
    family, limit, taken = _of_backend(env, batch)
    values = taken | {name: value for name, value in env.options.items() if name in taken}
    options = {name: _short(value) for name, value in values.items()}
    return Facts(family, observation, action, limit, options)


def _of_backend(env: EnvConfig, batch: EnvBatch) -> tuple[str, int | None, dict[str, Any]]:
    """Family, time limit, and options with their defaults."""
    if env.backend == "envpool":
        return _of_envpool(env)
    if env.backend == "gymnasium":
        return _of_gymnasium(env)
    inner: Any = batch.batch if isinstance(batch, ViewedBatch) else batch
    return _of_jax(env, inner.env)


def _of_envpool(env: EnvConfig) -> tuple[str, int | None, dict[str, Any]]:
    from spmdrl.envs.envpool_backend import declared

    family = family_of(env.id)
    spec = declared(env.id, dict(env.options))
    config = dict(zip(spec._config_keys, spec._config_values, strict=True))
    taken = {name: value for name, value in config.items() if name not in POOL}
    return family.name if family else "unknown", config.get("max_episode_steps"), taken


def _of_gymnasium(env: EnvConfig) -> tuple[str, int | None, dict[str, Any]]:
    entry = find_entry(env.id)
    limit = None if entry.is_vector else _limit_in_wrappers(env, entry)
    if not entry.is_registered:
        return "your own", limit, _without_count(arguments(entry.create))
    spec = gym.spec(split_id(env.id)[1])
    point = spec.entry_point or spec.vector_entry_point
    maker = gym.envs.registration.load_env_creator(point) if isinstance(point, str) else point
    taken = {} if maker is None else _without_count(arguments(maker))
    return f"registered, {_module_of(maker)}", limit, taken | dict(spec.kwargs)


def _limit_in_wrappers(env: EnvConfig, entry: Entry) -> int | None:
    """The least of them; one environment is made for it."""
    made: Any = make_one(entry, env.options, wrapper_names(env.wrap), checked=False)
    limits, inner = [], made
    while isinstance(inner, gym.Wrapper):
        if isinstance(inner, gym.wrappers.TimeLimit):
            limits.append(inner._max_episode_steps)
        inner = inner.env
    made.close()
    return min(limits, default=None)


def _of_jax(env: EnvConfig, made: Any) -> tuple[str, int | None, dict[str, Any]]:
    prefix, _ = split_id(env.id)
    limit = getattr(made, "time_limit", None) or getattr(made, "episode_limit", None)
    if prefix in LIBRARIES:
        return prefix, limit, dict(made.options)
    return "your own", limit, arguments(type(made))


def _without_count(taken: dict[str, Any]) -> dict[str, Any]:
    """How many a vector environment has is the trainer's business."""
    return {name: value for name, value in taken.items() if name != "num_envs"}


def _module_of(maker: Any) -> str:
    return str(getattr(maker, "__module__", "unknown")).partition(".")[0]


# ---------------------------------------------------------------------------------------------
# In words


def _leaves(space: Any) -> tuple[str, ...]:
    leaves: Mapping[str, Any] = leaf_spaces(space)
    return tuple(" ".join(f"{name} {leaf}".split()) for name, leaf in leaves.items())


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError):
        text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

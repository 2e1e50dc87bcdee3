"""Jumanji: games, packing and routing, many with masks of the allowed actions."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import jumanji
import numpy as np

from spmdrl.envs.jax_libraries.spaces import box
from spmdrl.envs.jax_protocol import Answer
from spmdrl.envs.making import arguments

__all__ = ["JumanjiEnv", "make", "names"]


def names() -> list[str]:
    return list(jumanji.registered_environments())


def make(name: str, options: dict[str, Any]) -> JumanjiEnv:
    return JumanjiEnv(jumanji.make(name, **options))


class JumanjiEnv:
    """See `JaxEnv`. A last step that still has a discount was cut by a time limit."""

    def __init__(self, env: Any):
        self._env, self.options = env, arguments(type(env))
        self.episode_limit = getattr(env, "time_limit", None)
        self.observation_space = _space(env.observation_spec)
        self.action_space = _space(env.action_spec)

    def reset(self, key: Any) -> tuple[Any, Any]:
        state, first = self._env.reset(key)
        return _as_dicts(first.observation), state

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        state, answer = self._env.step(state, action)
        cut = answer.last() & (answer.discount != 0)
        ended = answer.last() & ~cut
        return _as_dicts(answer.observation), state, answer.reward, ended, cut


def _space(spec: Any) -> gym.Space[Any]:
    """By the attributes of its specs, the special ones first."""
    inner = getattr(spec, "_specs", None)
    if inner:
        return gym.spaces.Dict({name: _space(part) for name, part in inner.items()})
    if np.dtype(spec.dtype) == bool:
        return gym.spaces.MultiBinary(tuple(spec.shape))
    if hasattr(spec, "num_values"):
        return _choices(np.asarray(spec.num_values))
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if low is None:
        low, high = _widest(np.dtype(spec.dtype))
    return box(low, high, spec.shape, spec.dtype)


def _choices(counts: np.ndarray) -> gym.Space[Any]:
    if counts.ndim == 0:
        return gym.spaces.Discrete(int(counts))
    return gym.spaces.MultiDiscrete(counts.astype(np.int32), dtype=np.int32)


def _widest(kind: np.dtype) -> tuple[float, float]:
    if kind.kind == "f":
        return -np.inf, np.inf
    return float(np.iinfo(kind).min), float(np.iinfo(kind).max)


def _as_dicts(obs: Any) -> Any:
    """Its observations are named tuples or dataclasses of arrays."""
    if hasattr(obs, "_asdict"):
        return {name: _as_dicts(part) for name, part in obs._asdict().items()}
    if dataclasses.is_dataclass(obs):
        return {f.name: _as_dicts(getattr(obs, f.name)) for f in dataclasses.fields(obs)}
    return obs

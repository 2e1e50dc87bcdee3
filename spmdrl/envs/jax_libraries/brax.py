"""Brax: ant, halfcheetah, humanoid and others, without its wrappers."""

from __future__ import annotations

from typing import Any

import brax.envs

from spmdrl.envs.jax_libraries.spaces import box, unbounded
from spmdrl.envs.jax_protocol import Answer
from spmdrl.envs.making import arguments

__all__ = ["BraxEnv", "make", "names"]

EPISODE = 1000  # steps, as in all of Brax's own training


def names() -> list[str]:
    return list(brax.envs._envs)


def make(name: str, options: dict[str, Any]) -> BraxEnv:
    """Options are arguments of the environment, such as backend, and episode_length."""
    limit = options.pop("episode_length", EPISODE)
    env = brax.envs.get_environment(name, **options)
    taken = arguments(type(env)) | {"episode_length": limit}
    return BraxEnv(env, unbounded((env.observation_size,)), limit, taken)


class BraxEnv:
    """See `JaxEnv`. An end without its wrappers is always a real one."""

    def __init__(self, env: Any, observation_space: Any, time_limit: int, options: Any):
        self._env, self.time_limit, self.options = env, time_limit, options
        self.observation_space = observation_space
        self.action_space = box(-1.0, 1.0, (env.action_size,), "float32")

    def reset(self, key: Any) -> tuple[Any, Any]:
        state = self._env.reset(key)
        return state.obs, state

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        state = self._env.step(state, action)
        return state.obs, state, state.reward, state.done > 0, False

"""NAVIX: MiniGrid's tasks."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import navix
import numpy as np

from spmdrl.envs.jax_libraries.spaces import box
from spmdrl.envs.jax_protocol import Answer

__all__ = ["NavixEnv", "make", "names"]


def names() -> list[str]:
    return list(navix.registry())


def make(name: str, options: dict[str, Any]) -> NavixEnv:
    return NavixEnv(navix.make(name, **options))


class NavixEnv:
    """See `JaxEnv`. Its `_step` is its `step` without the automatic reset.

    A state holds the pictures of all objects, the same ones in every environment: they stay here.
    """

    def __init__(self, env: Any):
        self._env, self.options = env, {"max_steps": env.max_steps}
        self.episode_limit = env.max_steps
        self._cache = jax.jit(env.reset)(jax.random.PRNGKey(0)).state.cache
        seen, acts = env.observation_space, env.action_space
        self.observation_space = box(seen.minimum, seen.maximum, seen.shape, np.uint8)
        self.action_space = gym.spaces.Discrete(int(acts.maximum) + 1)

    def reset(self, key: Any) -> tuple[Any, Any]:
        first = self._env.reset(key, self._cache)
        return first.observation.astype(np.uint8), _with_cache(first, None)

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        after = self._env._step(_with_cache(state, self._cache), action)
        ends = after.step_type == 2, after.step_type == 1
        return after.observation.astype(np.uint8), _with_cache(after, None), after.reward, *ends


def _with_cache(timestep: Any, cache: Any) -> Any:
    return timestep.replace(state=timestep.state.replace(cache=cache))

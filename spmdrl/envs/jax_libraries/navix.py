"""NAVIX: MiniGrid's tasks."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
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
    """See `JaxEnv`. Its `_step` is its `step` without the automatic reset."""

    def __init__(self, env: Any):
        self._env = env
        seen, acts = env.observation_space, env.action_space
        self.observation_space = box(seen.minimum, seen.maximum, seen.shape, np.uint8)
        self.action_space = gym.spaces.Discrete(int(acts.maximum) + 1)

    def reset(self, key: Any) -> tuple[Any, Any]:
        first = self._env.reset(key)
        return first.observation.astype(np.uint8), first

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        after = self._env._step(state, action)
        obs = after.observation.astype(np.uint8)
        return obs, after, after.reward, after.step_type == 2, after.step_type == 1

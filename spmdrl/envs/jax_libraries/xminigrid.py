"""XLand-MiniGrid: MiniGrid's tasks and XLand's worlds of rules."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import xminigrid
from xminigrid.core.constants import NUM_COLORS, NUM_TILES

from spmdrl.envs.jax_libraries.spaces import box
from spmdrl.envs.jax_protocol import Answer

__all__ = ["XMiniGridEnv", "make", "names"]


def names() -> list[str]:
    return list(xminigrid.registered_environments())


def make(name: str, options: dict[str, Any]) -> XMiniGridEnv:
    """Options are fields of the environment's parameters, such as view_size or max_steps."""
    env, params = xminigrid.make(name)
    return XMiniGridEnv(env, params.replace(**options))


class XMiniGridEnv:
    """See `JaxEnv`. What is seen is a field of `(tile, colour)`."""

    def __init__(self, env: Any, params: Any):
        self._env, self._params, self.options = env, params, vars(params)
        self.episode_limit = params.max_steps
        highest = np.array([NUM_TILES - 1, NUM_COLORS - 1])
        self.observation_space = box(0, highest, env.observation_shape(params), np.uint8)
        self.action_space = gym.spaces.Discrete(int(env.num_actions(params)))

    def reset(self, key: Any) -> tuple[Any, Any]:
        first = self._env.reset(self._params, key)
        return first.observation, first

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        after = self._env.step(self._params, state, action)
        ended = after.last() & (after.discount == 0)
        return after.observation, after, after.reward, ended, after.last() & ~ended

    def render(self, state: Any) -> Any:
        return self._env.render(self._params, state)

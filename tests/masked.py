"""An environment with an action mask, in the observation or in info.

One of five actions is right and shown; two others are forbidden, and one that is taken all the same
ends the game with an error. Ids: `tests.masked:Masked-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

ACTIONS, LENGTH = 5, 6


class Masked(gym.Env[Any, Any]):
    action_space = gym.spaces.Discrete(ACTIONS)
    observation_space = gym.spaces.Dict(
        inner=gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(ACTIONS)),
        target=gym.spaces.Discrete(ACTIONS),
    )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self._mask[int(action)]:
            raise ValueError(f"action {action} is forbidden")
        reward = 1.0 if int(action) == self._target else 0.0
        self._time += 1
        return self._look(), reward, self._time == LENGTH, False, {}

    def _look(self) -> Any:
        order = self.np_random.permutation(ACTIONS)
        self._target = int(order[0])
        self._mask = np.ones(ACTIONS, np.int8)
        self._mask[order[1:3]] = 0
        shown = np.zeros_like(self._mask) if self._time == LENGTH else self._mask
        return {"inner": {"action_mask": shown}, "target": self._target}


gym.register("Masked-v0", entry_point="tests.masked:Masked")

"""An environment whose observation is a dict: a small image and two vectors.

The brighter half of the image shows which action is right; `clock` and `noise` are numbers beside
it. Episodes of eight steps. Ids: `tests.pictures:Pictures-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

LENGTH = 8


class Pictures(gym.Env[Any, Any]):
    action_space = gym.spaces.Discrete(2)

    def __init__(self, side: int = 12):
        self._side = side
        self.observation_space = gym.spaces.Dict(
            clock=gym.spaces.Box(0.0, 1.0, (1,), np.float64),
            image=gym.spaces.Box(0, 255, (side, side, 3), np.uint8),
            noise=gym.spaces.Box(-1000.0, 1000.0, (2,), np.float32),
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        reward = 1.0 if int(action) == self._bright else 0.0
        self._time += 1
        return self._look(), reward, self._time == LENGTH, False, {}

    def _look(self) -> dict[str, np.ndarray]:
        self._bright = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 60, (self._side, self._side, 3)).astype(np.uint8)
        half = self._side // 2
        image[:, half:] += np.uint8(190 * self._bright)
        image[:, :half] += np.uint8(190 * (1 - self._bright))
        return {
            "clock": np.array([self._time / LENGTH]),
            "image": image,
            "noise": self.np_random.normal(300.0, 50.0, 2).astype(np.float32),
        }


gym.register("Pictures-v0", entry_point="tests.pictures:Pictures")

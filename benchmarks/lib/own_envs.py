"""Gymnasium environments that do nothing but cost time, to measure what lies around them."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["Idle", "Sleepy"]


class Idle(gym.Env[np.ndarray, np.int64]):
    """Answers at once; an episode has 200 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.time = seconds, 0
        self.seen = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.seen, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.seconds:
            time.sleep(self.seconds)
        self.time += 1
        return self.seen, 1.0, False, self.time >= 200, {}


class Sleepy(Idle):
    """Waits for 10 ms in every step, as for another program or the network."""

    def __init__(self, seconds: float = 0.01):
        super().__init__(seconds)

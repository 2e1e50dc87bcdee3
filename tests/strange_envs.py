"""Environments for `spmdrl envs`, some of which do what they should not."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import jax.numpy as jnp
import numpy as np

__all__ = ["Counts", "Dies", "Hangs", "JaxDies", "JaxRaises", "Overflows", "Raises", "Waits"]


class Counts(gym.Env):
    """Rewards 1, 2, 3, 4 in episodes of four steps; talks."""

    observation_space: Any = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size: int = 3, name: str = "one two"):
        self.time = 0

    def reset(self, *, seed=None, options=None):
        print("a new episode")
        self.time = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.time += 1
        self.misbehave()
        return np.zeros(3, np.float32), float(self.time), self.time == 4, False, {}

    def misbehave(self) -> None:
        """Well, here."""


class Raises(Counts):
    def misbehave(self) -> None:
        raise ValueError("100 %d broken")


class Dies(Counts):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Counts):
    def misbehave(self) -> None:
        time.sleep(600)


class Waits(Counts):
    """For a network, say."""

    def misbehave(self) -> None:
        time.sleep(0.003)


class Overflows(Counts):
    """Shows what is not finite."""

    def step(self, action):
        _, *rest = super().step(action)
        return np.full(3, np.inf, np.float32), *rest


class JaxDies:
    observation_space: Any = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, speed: float = 0.5):
        self.speed = speed

    def reset(self, key: Any) -> Any:
        os._exit(3)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        return jnp.zeros(3), state, 1.0, False, False


class JaxRaises(JaxDies):
    def reset(self, key: Any) -> Any:
        raise ValueError("100 %d broken")

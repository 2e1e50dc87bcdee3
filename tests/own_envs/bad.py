"""Environments that raise, leave, hang, or say one thing and do another, in one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

from tests.own_envs.good import Plain

__all__ = ["Broken", "NoSpace", "Raises"]


class Broken(Plain):
    """Does `fault` in step `at` of the episode if its seed is the chosen one."""

    def __init__(self, fault: str, seed: int, at: int = 3, helper: str = ""):
        super().__init__()
        self._fault, self._seed, self._at, self._helper = fault, seed, at, helper

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._chosen = seed == self._seed
        if self._chosen and self._helper:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(self._helper, "w") as file:
                file.write(str(child.pid))
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if self._chosen and self.time == self._at:
            return getattr(self, f"_{self._fault}")()
        return answer

    def _percent(self) -> Any:
        count, share = 3, 100
        raise ValueError("%d items, %d%% of them" % (count, share))  # noqa: UP031

    def _exit(self) -> Any:
        os._exit(3)

    def _leave(self) -> Any:
        sys.exit(0)

    def _hang(self) -> Any:
        while True:
            time.sleep(1.0)

    def _wrong_shape(self) -> Any:
        return np.float32(7.0), 1.0, False, False, {}

    def _wrong_dtype(self) -> Any:
        return np.array(["a", "b"]), 1.0, False, False, {}


class Raises(Plain):
    def __init__(self, **given: Any):
        raise RuntimeError("there is no simulator")


class NoSpace(Plain):
    observation_space = gym.spaces.Graph(  # type: ignore[assignment]
        gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    )

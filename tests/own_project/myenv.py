"""An environment as a user writes one: a dict as observation, and a wrapper around it."""

import os
from pathlib import Path

import gymnasium as gym
import numpy as np

if mark := os.environ.get("OWN_PROJECT_MARK"):  # tells a test who has imported this file
    with Path(mark).open("a") as file:
        file.write(f"{os.getpid()}\n")


class Sides(gym.Env):
    """Choose the side that is shown."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space = gym.spaces.Dict(
        {
            "side": gym.spaces.Discrete(2),
            "noise": gym.spaces.Box(0.0, 1.0, (3,), np.float32),
        }
    )
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 8, render_mode: str | None = None):
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return self.see(), {}

    def step(self, action):
        reward = float(action == self.side)
        self.left -= 1
        return self.see(), reward, self.left == 0, False, {}

    def see(self):
        self.side = int(self.np_random.integers(2))
        return {"side": self.side, "noise": self.np_random.random(3, np.float32)}

    def render(self):
        return np.full((16, 16, 3), 255 * self.side, np.uint8)


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2.0 * reward


def make_sides(**options):
    return Doubled(Sides(**options))


gym.register("Sides-v0", entry_point=make_sides)

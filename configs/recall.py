"""A symbol is shown, then noise, then the symbol must be named: an environment of our own.

python -m spmdrl.train configs/recall.py

One core: five minutes. Return 1.0 at the end (seed 1); 0.25 is chance.

The class below is all that an own environment takes; the config names it by `module:Class`.
"""

from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

SIDE, SYMBOLS, LEAST, MOST = 8, 4, 10, 30


class Recall(gym.Env[np.ndarray, int]):
    """Which corner was lit at the start? The question, a white picture, comes much later."""

    observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE, 1), np.uint8)
    action_space = gym.spaces.Discrete(SYMBOLS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.symbol = int(self.np_random.integers(SYMBOLS))
        self.left = int(self.np_random.integers(LEAST, MOST + 1))
        return self.picture_of_symbol(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.left == 0:
            return self.noise(), float(action == self.symbol), True, False, {}
        self.left -= 1
        seen = self.noise() if self.left else np.full((SIDE, SIDE, 1), 255, np.uint8)
        return seen, 0.0, False, False, {}

    def picture_of_symbol(self) -> np.ndarray:
        picture = np.zeros((SIDE, SIDE, 1), np.uint8)
        row, column = divmod(self.symbol, 2)
        half = SIDE // 2
        picture[row * half : (row + 1) * half, column * half : (column + 1) * half] = 255
        return picture

    def noise(self) -> np.ndarray:
        return self.np_random.integers(0, 128, (SIDE, SIDE, 1), np.uint8)


config = Config(
    total_steps=1_000_000,
    env=EnvConfig(backend="gymnasium", id="config_file_recall:Recall", num_envs=32),
    net=NetConfig(torso="impala_resnet", core="lstm", core_size=64, shared=True),
    algo=Ppo(num_steps=64, epochs=2, minibatches=4, gamma=0.99, entropy_coef=0.01),
    optim=OptimConfig(lr=5e-4, lr_schedule="constant"),
)

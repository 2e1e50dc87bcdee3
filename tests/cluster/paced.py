"""CartPole that slows down after some steps, so that a job is still running when something happens.

`PACE_AFTER=300,600` slows the first start of a Slurm job down after 300 steps of each environment
and its second start after 600; its third start, and any run without the variable, is never slow.
What is learned does not change. Used by its id `paced:Paced-v0`.
"""

import os
import time

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

SLOW_STEP_S = 0.02


class Paced(CartPoleEnv):
    def __init__(self, **options):
        super().__init__(**options)
        limits = [float(x) for x in os.environ.get("PACE_AFTER", "").split(",") if x]
        start = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self._full_speed = limits[start] if start < len(limits) else float("inf")
        self._steps = 0

    def step(self, action):
        self._steps += 1
        if self._steps > self._full_speed:
            time.sleep(SLOW_STEP_S)
        return super().step(action)


gym.register("Paced-v0", entry_point=Paced, max_episode_steps=500)

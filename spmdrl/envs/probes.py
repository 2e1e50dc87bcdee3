"""Environments with known answers, each of which isolates one mistake of a learner.

Two actions, one number to see, episodes of one to three steps. Import the module and the ids are
registered: `--env.backend gymnasium --env.id spmdrl.envs.probes:ProbeConstant-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["PROBES", "Probe"]

Answer = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class Probe(gym.Env[np.ndarray, Any]):
    """One number in [-1, 1] and two actions; subclasses say what a step brings."""

    length = 1  # steps of an episode
    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.cue = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self.seen(), {}

    def step(self, action: int) -> Answer:
        reward = self.reward(action)
        self.time += 1
        over = self.time == self.length
        return self.seen(), reward, over and not self.limited, over and self.limited, {}

    limited = False  # whether the end is a time limit

    def seen(self) -> np.ndarray:
        return np.array([self.shows()], np.float32)

    def shows(self) -> float:
        return 0.0

    def reward(self, action: int) -> float:
        return 1.0


class Constant(Probe):
    """Always 1: the value is 1. Wrong: the value loss, its sign, the optimiser."""


class Dependent(Probe):
    """The reward is what is seen: so is the value. Wrong: rows and observations mixed up."""

    def shows(self) -> float:
        return self.cue

    def reward(self, action: int) -> float:
        return self.cue


class Discounting(Probe):
    """Nothing, then 1: the first value is gamma. Wrong: discounts, bootstraps, order of time."""

    length = 2

    def shows(self) -> float:
        return float(self.time)

    def reward(self, action: int) -> float:
        return float(self.time == 1)


class Action(Probe):
    """1 for action 1, else -1. Wrong: the policy's loss, its sign, log-probabilities."""

    def reward(self, action: int) -> float:
        return 1.0 if action == 1 else -1.0


class Matching(Probe):
    """1 for the action that is shown, else -1. Wrong: advantages of other rows."""

    def shows(self) -> float:
        return self.cue

    def reward(self, action: int) -> float:
        return 1.0 if (action == 1) == (self.cue > 0) else -1.0


class Memory(Matching):
    """The cue is seen first, and wanted in the second step: only memory does better than chance."""

    length = 2

    def shows(self) -> float:
        return self.cue if self.time == 0 else 0.0

    def reward(self, action: int) -> float:
        return super().reward(action) if self.time == 1 else 0.0


class Ending(Probe):
    """1 in each of three steps, then a real end: values 1 + gamma + gamma^2, 1 + gamma, 1."""

    length = 3

    def shows(self) -> float:
        return self.time / 3


class Limit(Probe):
    """1 forever, cut by a time limit that nothing shows: the value is 1 / (1 - gamma)."""

    length, limited = 3, True


PROBES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (Constant, Dependent, Discounting, Action, Matching, Memory, Ending, Limit)
}
for _name in PROBES:
    gym.register(f"Probe{_name}-v0", entry_point=f"{__name__}:{_name}")

"""Environments that behave, of every kind that an id can name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

Answer = tuple[Any, float, bool, bool, dict[str, Any]]


class Walk(gym.Env[Any, Any]):
    """A random walk with a dict of observations; episodes of 3 to 7 steps end either way."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def __init__(self, size: int = 2, render_mode: str | None = None, **kept: Any):
        self.kept, self.render_mode, self.size = kept, render_mode, size
        self.observation_space = gym.spaces.Dict(
            place=gym.spaces.Box(-np.inf, np.inf, (size,), np.float64),
            gear=gym.spaces.Discrete(3, start=1),
            eye=gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(3, 8))
        self.place = self.np_random.normal(size=self.size)
        return self._seen(), {}

    def step(self, action: Any) -> Answer:
        self.time += 1
        self.place = self.place + self.np_random.normal() * (int(action[0]) + 1) + int(action[1])
        over, even = self.time == self.length, self.length % 2 == 0
        return self._seen(), float(self.place.sum()), over and even, over and not even, {}

    def _seen(self) -> Any:
        eye = self.np_random.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        return {"place": self.place.copy(), "gear": 1 + self.time % 3, "eye": eye}

    def render(self) -> Any:
        return np.full((2, 3, 3), self.time, np.uint8)


class Nested(Walk):
    """The same, a level deeper."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self._flat = self.observation_space
        self.observation_space = gym.spaces.Dict(
            all=gym.spaces.Tuple([self._flat, gym.spaces.Text(8)])
        )

    def _seen(self) -> Any:
        return {"all": (super()._seen(), f"t{self.time}")}


class Plain(gym.Env[Any, Any]):
    """One number, which is the global step of the environment, and what it was made with."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, **given: Any):
        self.given = given

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action: Any) -> Answer:
        self.time += 1
        return self._seen(), 1.0, self.time == 5, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.time, len(repr(sorted(self.given.items())))], np.float32)


class Masked(Plain):
    """Says in info which actions are allowed."""

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(**given)
        return obs, {"action_mask": np.array([1, 0], np.int8)}

    def step(self, action: Any) -> Answer:
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {} if terminated else {"action_mask": np.array([0, 1], np.int8)}
        return obs, reward, terminated, truncated, info


def made_by_function(**options: Any) -> gym.Env[Any, Any]:
    return Walk(**options)


class Tenfold(gym.RewardWrapper):
    def reward(self, reward: Any) -> float:
        return 10.0 * float(reward)


def plus_one(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: float(reward) + 1.0)


def no_wrapper(env: gym.Env[Any, Any]) -> None:
    return None


class Counters(VectorEnv[Any, Any, Any]):
    """A vector environment: each counts to its seed's last digit plus two, then starts again."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.last = np.array([s % 10 for s in seed]) + 2
        self.time = np.zeros(self.num_envs)
        self.over = np.zeros(self.num_envs, bool)
        return self._seen(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.time = np.where(self.over, 0, self.time + 1)
        reward = np.where(self.over, 0.0, actions)
        self.over = self.time == self.last
        return self._seen(), reward, self.over, np.zeros(self.num_envs, bool), {}

    def _seen(self) -> np.ndarray:
        return self.time[:, None].astype(np.float32)


class SameStep(Counters):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012


def vector_by_function(num_envs: int) -> Counters:
    return Counters(num_envs)


gym.register("OwnWalk-v0", entry_point=Walk, max_episode_steps=6)
gym.register("OwnCounters-v0", vector_entry_point="tests.own_envs.good:Counters")

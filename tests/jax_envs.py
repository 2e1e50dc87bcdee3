"""Environments written in JAX with known answers, as users write their own: by the protocol."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Both", "Broken", "CartPole", "Drawing", "Ending", "Limit", "Masked"]


class Ending:
    """Shows its time and a number drawn at the reset; 1 in the first step; ends after three."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, key: Any) -> tuple[Any, Any]:
        state = {"time": 0, "drawn": jax.random.uniform(key)}
        return self.seen(state), state

    def step(self, key: Any, state: Any, action: Any) -> Any:
        after = {"time": state["time"] + 1, "drawn": state["drawn"]}
        return self.seen(after), after, 1.0 * (state["time"] == 0), after["time"] == 3, False

    def seen(self, state: Any) -> Any:
        return jnp.stack([1.0 * state["time"], state["drawn"]])


class Limit(Ending):
    """The same, cut after three steps by its time limit."""

    time_limit = 3

    def step(self, key: Any, state: Any, action: Any) -> Any:
        obs, state, reward, _, truncated = super().step(key, state, action)
        return obs, state, reward, False, truncated


class Both(Ending):
    """A real end in the very step of the time limit."""

    time_limit = 3


class Drawing:
    """Every observation is a number drawn from the key; ends where that is large."""

    observation_space = gym.spaces.Box(0.0, 2.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, key: Any) -> tuple[Any, Any]:
        obs = 1.0 + jax.random.uniform(key, (1,))
        return obs, (obs, jax.random.key(7))  # a typed key, as some libraries keep one

    def step(self, key: Any, state: Any, action: Any) -> Any:
        obs = jax.random.uniform(key, (1,))
        return obs, (obs, state[1]), obs[0], obs[0] > 0.7, False

    def render(self, state: Any) -> np.ndarray:
        return np.full((4, 6, 3), int(100 * state[0][0]), np.uint8)


class CartPole:
    """As in Gymnasium, in float32."""

    bounds = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
    observation_space = gym.spaces.Box(-bounds, bounds, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, time_limit: int = 500):
        self.time_limit = time_limit

    def reset(self, key: Any) -> tuple[Any, Any]:
        state = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return state, state

    def step(self, key: Any, state: Any, action: Any) -> Any:
        _, v, angle, turning = state
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        push = (20.0 * action - 10.0 + 0.05 * turning**2 * sin) / 1.1
        turns = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        moves = push - 0.05 * turns * cos / 1.1
        change = jnp.stack([v, moves, turning, turns])
        after = state + 0.02 * change
        fallen = (jnp.abs(after[0]) > 2.4) | (jnp.abs(after[2]) > 12 * 2 * np.pi / 360)
        return after, after, 1.0, fallen, False


class Masked(Ending):
    """Its observation is a dict with a mask of the allowed actions."""

    observation_space = gym.spaces.Dict(
        {"seen": Ending.observation_space, "action_mask": gym.spaces.MultiBinary(2)}
    )

    def seen(self, state: Any) -> Any:
        return {"seen": super().seen(state), "action_mask": jnp.array([True, False])}


class Broken(Ending):
    """Wrong in the way that is asked for."""

    def __init__(self, how: str):
        self.how = how
        if how == "space":
            self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, key: Any) -> Any:
        obs, state = super().reset(key)
        return obs if self.how == "reset" else (obs, state)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        obs, after, reward, terminated, truncated = super().step(key, state, action)
        if self.how == "four results":
            return obs, after, reward, terminated
        if self.how == "structure":
            after = after | {"more": 1}
        if self.how == "shape":
            after = after | {"drawn": jnp.zeros(2)}
        if self.how == "dtype":
            after = after | {"time": 0.5}
        if self.how == "reward":
            reward = jnp.ones(2)
        return obs, after, reward, terminated, truncated

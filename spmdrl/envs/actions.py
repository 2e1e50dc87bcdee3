"""From a policy's action to what an environment accepts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.types import ActionSpace

__all__ = ["action_space", "check_actions", "to_env_action"]


def action_space(space: Any, env_id: str) -> ActionSpace:
    if isinstance(space, gym.spaces.Discrete):
        return ActionSpace(
            "discrete", (), np.dtype(np.int32), nvec=(int(space.n),), start=int(space.start)
        )
    if isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        nvec = tuple(int(n) for n in space.nvec)
        start = np.asarray(getattr(space, "start", 0), np.int32)
        return ActionSpace("multi_discrete", (len(nvec),), np.dtype(np.int32), nvec, start)
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return ActionSpace(
            "box", space.shape, np.dtype(space.dtype), low=space.low, high=space.high
        )
    raise ConfigError(
        f"env.id {env_id} has actions {space}; spmdrl can use Discrete, MultiDiscrete and float Box"
    )


def to_env_action(space: ActionSpace, action: Any, xp: Any) -> Any:
    """A policy's action as the environment wants it; `xp` is numpy or jax.numpy."""
    if space.kind == "box":
        action = action.reshape(action.shape[0], *space.shape)
        return xp.clip(action, space.low, space.high).astype(space.dtype)
    return (action + space.start).astype(space.dtype)


def check_actions(space: ActionSpace, num_envs: int, action: np.ndarray) -> None:
    """Raise for what would kill the process, or be taken silently, inside the environment."""
    expected = (num_envs, *space.shape)
    if action.shape != expected:
        raise ValueError(f"actions have shape {action.shape}, the environments expect {expected}")
    if action.dtype != space.dtype:
        raise ValueError(f"actions are {action.dtype}, the environments expect {space.dtype}")
    if space.kind == "box":
        if not np.isfinite(action).all():
            raise ValueError("an action is not finite")
        low, high = space.low, space.high
    else:
        low, high = np.asarray(space.start), np.asarray(space.nvec) - 1 + space.start
    if (action < low).any() or (action > high).any():
        raise ValueError(
            f"an action is outside of [{low}, {high}]: {action.min()} .. {action.max()}"
        )

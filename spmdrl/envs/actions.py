"""From a policy's action to what an environment accepts.

Integers of any form are choices: Discrete, MultiDiscrete, MultiBinary, and integer boxes of known
bounds. Floats are a box; a bound that nobody can have meant does not clip.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.types import ActionSpace

__all__ = ["action_space", "check_actions", "to_env_action"]

MOST_CHOICES = 4096  # of one component
MOST_COMBINATIONS = 2**14  # of all together, where a mask is about combinations
HUGE, TINY = 1e30, 1e-30  # bounds beyond these are "the largest number", not a bound


def action_space(
    space: Any, env_id: str, mask: tuple[int, ...] = (), dtype: Any = None
) -> ActionSpace:
    """`mask` is the shape of the environment's action mask; `dtype` what it takes, if it is
    another one than the space has."""
    found = _unmasked(space, env_id, dtype)
    return _masked(found, mask, env_id) if mask else found


def _unmasked(space: Any, env_id: str, dtype: Any) -> ActionSpace:
    choices = np.dtype(dtype or np.int32)
    if isinstance(space, gym.spaces.Discrete):
        return ActionSpace("discrete", (), choices, nvec=(int(space.n),), start=int(space.start))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _several(np.asarray(space.nvec), getattr(space, "start", 0), choices)
    if isinstance(space, gym.spaces.MultiBinary):
        return _several(np.full(space.shape, 2), 0, choices)
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        _check_bounds(space, env_id)
        nvec = space.high.astype(np.int64) - space.low.astype(np.int64) + 1
        return _several(nvec, space.low, np.dtype(dtype or space.dtype))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = _bounds(space)
        return ActionSpace("box", space.shape, np.dtype(dtype or space.dtype), low=low, high=high)
    raise ConfigError(
        f"env.id {env_id} has actions {space}; spmdrl can use Discrete, MultiDiscrete, MultiBinary "
        "and Box; a wrapper can make one of them out of it"
    )


def _several(nvec: np.ndarray, start: Any, dtype: np.dtype) -> ActionSpace:
    """Components side by side, whatever the shape that the environment wants them in."""
    flat = tuple(int(n) for n in nvec.ravel())
    first = np.broadcast_to(np.asarray(start, np.int32), nvec.shape).ravel()
    shape = None if nvec.ndim == 1 else nvec.shape
    return ActionSpace("multi_discrete", (len(flat),), dtype, flat, first, env_shape=shape)


def _check_bounds(space: Any, env_id: str) -> None:
    span = space.high.astype(np.float64) - space.low.astype(np.float64) + 1
    if (span > MOST_CHOICES).any():
        raise ConfigError(
            f"env.id {env_id} has actions {space}: integers in a range of {span.max():.0f}, and "
            f"{MOST_CHOICES} is the most; declare the true bounds, or use a float Box"
        )


def _bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Some declare C++'s smallest positive number as the lowest: it is no bound either."""
    endless = np.asarray(space.high > HUGE)
    meant_lowest = (space.low > 0) & (space.low < TINY) & endless
    low = np.where((space.low < -HUGE) | meant_lowest, -np.inf, space.low)
    return low.astype(space.dtype), np.where(endless, np.inf, space.high).astype(space.dtype)


# ---------------------------------------------------------------------------------------------
# Masks


def _masked(space: ActionSpace, mask: tuple[int, ...], env_id: str) -> ActionSpace:
    """As it is where the mask has an entry for each choice of each component; one choice among
    all combinations where it has an entry for each of those."""
    if space.kind == "box":
        raise ConfigError(f"env.id {env_id} has an action mask, but its actions are not choices")
    if space.kind == "multi_discrete" and len(space.nvec) > 1 and mask == space.nvec:
        return _combined(space, env_id)
    if math.prod(mask) == sum(space.nvec) and _rows_are_components(space, mask):
        return space
    raise ConfigError(
        f"env.id {env_id} has an action mask of shape {mask} for actions of {space.nvec} choices; "
        f"it must have {sum(space.nvec)} entries, or the shape {space.nvec} of all combinations"
    )


def _rows_are_components(space: ActionSpace, mask: tuple[int, ...]) -> bool:
    """Then the flat mask is in the order of the distribution's parameters."""
    return len(mask) == 1 or set(space.nvec) == {mask[-1]}


def _combined(space: ActionSpace, env_id: str) -> ActionSpace:
    total = math.prod(space.nvec)
    if total > MOST_COMBINATIONS:
        raise ConfigError(
            f"env.id {env_id} has an action mask over {total} combinations of {space.nvec}; "
            f"{MOST_COMBINATIONS} is the most"
        )
    shape = space.env_shape or space.shape
    return ActionSpace(
        "discrete", (), space.dtype, (total,), space.start, joint=space.nvec, env_shape=shape
    )


# ---------------------------------------------------------------------------------------------
# Every step


def to_env_action(space: ActionSpace, action: Any, xp: Any) -> Any:
    """A policy's action as the environment wants it; `xp` is numpy or jax.numpy."""
    if space.kind == "box":
        action = action.reshape(action.shape[0], *space.shape)
        return xp.clip(action, space.low, space.high).astype(space.dtype)
    if space.joint:
        action = xp.stack(xp.unravel_index(action, space.joint), axis=-1)
    action = (action + space.start).astype(space.dtype)
    if space.env_shape is None:
        return action
    return action.reshape(action.shape[0], *space.env_shape)


def check_actions(space: ActionSpace, num_envs: int, action: np.ndarray) -> None:
    """Raise for what would kill the process, or be taken silently, inside the environment."""
    shape = space.shape if space.env_shape is None else space.env_shape
    expected = (num_envs, *shape)
    if action.shape != expected:
        raise ValueError(f"actions have shape {action.shape}, the environments expect {expected}")
    if action.dtype != space.dtype:
        raise ValueError(f"actions are {action.dtype}, the environments expect {space.dtype}")
    if space.kind == "box":
        if not np.isfinite(action).all():
            raise ValueError("an action is not finite")
        low, high = space.low, space.high
    else:
        low = np.asarray(space.start)
        high = np.asarray(space.joint or space.nvec) - 1 + space.start
        action = action.reshape(num_envs, -1) if space.env_shape is not None else action
    if (action < low).any() or (action > high).any():
        raise ValueError(
            f"an action is outside of [{low}, {high}]: {action.min()} .. {action.max()}"
        )

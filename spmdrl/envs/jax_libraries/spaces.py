"""Spaces of Gymnasium from what the libraries declare."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["box", "from_gymnax", "unbounded"]


def box(low: Any, high: Any, shape: Any, dtype: Any) -> gym.spaces.Box:
    """A Box of exactly this dtype; bounds of another one would be warned about."""
    kind = np.dtype(dtype)
    bounds = [np.broadcast_to(np.asarray(x), tuple(shape)) for x in (low, high)]
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        bounds = [np.clip(x.astype(np.float64), limits.min, limits.max) for x in bounds]
    return gym.spaces.Box(*(x.astype(kind) for x in bounds), tuple(shape), kind.type)


def unbounded(shape: Any) -> gym.spaces.Box:
    return box(-np.inf, np.inf, shape, np.float32)


def from_gymnax(space: Any) -> gym.Space[Any]:
    """Of gymnax and of those who use its spaces, by their attributes."""
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    if hasattr(space, "spaces"):
        parts = space.spaces
        if isinstance(parts, dict):
            return gym.spaces.Dict({name: from_gymnax(part) for name, part in parts.items()})
        return gym.spaces.Tuple([from_gymnax(part) for part in parts])
    if np.dtype(space.dtype) == bool:
        return gym.spaces.MultiBinary(tuple(space.shape))
    return box(space.low, space.high, space.shape, space.dtype)

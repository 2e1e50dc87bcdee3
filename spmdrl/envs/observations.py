"""From what an environment shows to what a network sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.types import Obs, ObsPart

__all__ = ["obs_spec", "read_obs"]

VECTOR = "vector"  # name of the numbers beside images


def obs_spec(space: Any, env_id: str) -> ObsPart | dict[str, ObsPart]:
    """What the network sees: float64 becomes float32; the numbers of a dict are joined to one
    vector, and its images keep their names."""
    if not _is_dict(space):
        return _part_spec(space, env_id)
    parts = {key: _part_spec(space[key], env_id) for key in sorted(space.keys())}
    images = {key: part for key, part in parts.items() if part.is_image}
    sizes = [math.prod(part.shape) for key, part in parts.items() if key not in images]
    vector = ObsPart((sum(sizes),), np.dtype(np.float32))
    if not images:
        return vector
    return images | ({_vector_name(images): vector} if sizes else {})


def _is_dict(space: Any) -> bool:
    return isinstance(space, (gym.spaces.Dict, Mapping))


def _vector_name(images: Mapping[str, Any]) -> str:
    return VECTOR if VECTOR not in images else f"{VECTOR}_"


def _part_spec(space: Any, env_id: str) -> ObsPart:
    if _is_dict(space):
        raise ConfigError(f"env.id {env_id} has nested observations; only flat dicts are read")
    if isinstance(space, gym.spaces.Discrete):
        return ObsPart((int(space.n),), np.dtype(np.float32))
    if isinstance(space, gym.spaces.Box):
        dtype = np.uint8 if _is_image(space) else np.float32
        return ObsPart(space.shape or (1,), np.dtype(dtype))
    raise ConfigError(f"env.id {env_id} has observations {space}, which spmdrl cannot read")


def _is_image(space: Any) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def read_obs(space: Any, obs: Any, xp: Any) -> Obs:
    """A batch of observations as `obs_spec` describes it; `xp` is numpy or jax.numpy."""
    if not _is_dict(space):
        return _read_part(space, obs, xp)
    parts = {key: _read_part(space[key], obs[key], xp) for key in sorted(space.keys())}
    images = {key: parts.pop(key) for key in list(parts) if _is_image(space[key])}
    flat = [p.reshape(p.shape[0], -1).astype(np.float32) for p in parts.values()]
    if not images:
        return xp.concatenate(flat, -1)
    return images | ({_vector_name(images): xp.concatenate(flat, -1)} if flat else {})


def _read_part(space: Any, obs: Any, xp: Any) -> Any:
    if isinstance(space, gym.spaces.Discrete):
        return (obs.reshape(-1, 1) == xp.arange(int(space.n)) + int(space.start)).astype(np.float32)
    if _is_image(space):
        return obs
    return obs.reshape(obs.shape[0], *(space.shape or (1,))).astype(np.float32)

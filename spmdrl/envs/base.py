"""What every backend offers: a batch of environments that reset themselves on the next step.

The step after `terminated | truncated` ignores its action and returns the first observation of the
next episode with reward 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.types import ActionSpace, EnvSpec, Obs, ObsPart, TimeStep

__all__ = [
    "EnvBatch", "XlaStep", "action_space", "check_actions", "env_seeds", "obs_spec", "read_obs",
    "to_env_action",
]  # fmt: skip

SEED_LIMIT = 2**31


class XlaStep(NamedTuple):
    """Stepping as part of a compiled program: `step(handle, action) -> (handle, TimeStep)`."""

    handle: Any
    step: Callable[[Any, Any], tuple[Any, TimeStep]]


@runtime_checkable
class EnvBatch(Protocol):
    """B environments; `send` starts a step and `recv` waits for it."""

    spec: EnvSpec
    num_envs: int
    needs_x64: bool  # its compiled form takes float64

    def reset(self) -> Obs: ...
    def send(self, action: np.ndarray) -> None: ...
    def recv(self) -> TimeStep: ...
    def xla(self) -> XlaStep | None:
        """The compiled form, or None where the backend has none."""
        ...

    def render(self) -> np.ndarray:
        """An RGB frame of the first environment."""
        ...

    def close(self) -> None: ...


def env_seeds(run_seed: int, env_ids: Iterable[int], generation: int = 0) -> list[int]:
    """One seed per global environment id, distinct over all ids of a run.

    An odd factor is invertible modulo a power of two, so no two ids meet; the hash keeps the
    environments of neighbouring run seeds apart.
    """
    digest = hashlib.sha256(f"{run_seed}/{generation}".encode()).digest()
    base = int.from_bytes(digest[:8], "little")
    return [int((base + int(g) * 0x9E3779B1) % SEED_LIMIT) for g in env_ids]


# ---------------------------------------------------------------------------------------------
# Actions


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


# ---------------------------------------------------------------------------------------------
# Observations


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

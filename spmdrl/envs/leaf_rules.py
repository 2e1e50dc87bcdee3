"""What is made of one leaf of an observation, by its space and its name.

The first rule that fits decides; `docs/observations.md` has them as a table. What only the network
can know (which encoder, who sees it) is decided in `nets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.types import ObsPart, channels_first, sides

__all__ = ["MASK_NAMES", "Leaf", "is_mask", "leaf_of"]

MASK_NAMES = ("action_mask", "legal_action_mask")
TEXT_NAMES = ("mission", "instruction", "text", "message")
COUNTERS = ("step", "count", "time", "tick", "elapsed")  # in names of integers that are amounts

ONE_HOT_DISCRETE = 64  # more choices than that are an id with an embedding, or an amount
ONE_HOT_INTEGERS = 32  # of an integer array; a wider range is an amount
MOST_IDS = 4096
EXACT = 2**20  # a range of integers up to this is scaled; beyond, nobody meant it as a bound
UNBOUNDED = 1e6  # floats are declared up to 3e38 where nobody knows better
BYTES_SIDE, FLOATS_SIDE, PLANE_SIDE = 8, 16, 5  # least sides of an image, by what declares it

Read = Callable[[Any, Any], Any]  # (array with the batch first, numpy or jax.numpy)
Role = Literal["numbers", "part", "mask", "left out"]


@dataclass(frozen=True)
class Leaf:
    """One leaf as the networks get it; numbers are joined with those of other leaves."""

    role: Role
    part: ObsPart
    read: Read
    how: str = "numbers"  # for the log


def leaf_of(name: str, space: Any, env_id: str) -> Leaf:
    """Raise ConfigError for a space that no rule reads."""
    last = name.rpartition("/")[2]
    if is_mask(name, space):
        return _mask(space)
    if isinstance(space, gym.spaces.Text) or _is_text(last, space):
        return Leaf("left out", ObsPart((0,), np.dtype(np.float32)), lambda x, xp: x, "left out")
    if isinstance(space, gym.spaces.Discrete):
        return _discrete(name, space)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _multi_discrete(space)
    if isinstance(space, gym.spaces.MultiBinary):
        return _binary(tuple(np.atleast_1d(space.shape)))
    if isinstance(space, gym.spaces.Box):
        return _box(space)
    where = f" at {name}" if name else ""
    raise ConfigError(
        f"env.id {env_id} has observations {space}{where}, which spmdrl cannot read; leave them "
        "out with a wrapper, or turn them into a Box"
    )


def is_mask(name: str, space: Any) -> bool:
    """Whether the leaf says which actions are allowed."""
    if name.rpartition("/")[2] not in MASK_NAMES:
        return False
    if isinstance(space, gym.spaces.Box):
        return bool((space.low == 0).all() and (space.high == 1).all())
    return isinstance(space, gym.spaces.MultiBinary)


def _is_text(last: str, space: Any) -> bool:
    """A name of a text whose space is no number: bytes, or a class of the environment's own."""
    known = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    is_array = isinstance(space, gym.spaces.Box) and not (
        space.dtype == np.uint8 and len(space.shape) == 1
    )
    return last in TEXT_NAMES and not is_array and not isinstance(space, known)


# ---------------------------------------------------------------------------------------------
# Choices


def _mask(space: Any) -> Leaf:
    part = ObsPart((math.prod(space.shape),), np.dtype(bool), "mask")
    return Leaf("mask", part, lambda x, xp: x.reshape(x.shape[0], -1).astype(bool), "action mask")


def _discrete(name: str, space: Any) -> Leaf:
    n, start = int(space.n), int(space.start)
    counts = any(word in name.rpartition("/")[2].lower() for word in COUNTERS)
    if n <= ONE_HOT_DISCRETE or (not name and n <= MOST_IDS):
        return _one_hot(n, start)
    if counts or n > MOST_IDS:
        return numbers((1,), start, n - 1)
    return _ids((1,), (n,), start)


def _one_hot(n: int, start: int) -> Leaf:
    def read(x: Any, xp: Any) -> Any:
        return (x.reshape(-1, 1) == xp.arange(n) + start).astype(np.float32)

    return Leaf("numbers", ObsPart((n,), np.dtype(np.float32)), read, f"one-hot {n}")


def _multi_discrete(space: Any) -> Leaf:
    nvec = np.asarray(space.nvec)
    values = tuple(int(n) for n in nvec) if nvec.ndim == 1 else (int(nvec.max()),)
    return _ids(nvec.shape, values, np.asarray(getattr(space, "start", 0)))


def _ids(shape: tuple[int, ...], values: tuple[int, ...], start: Any) -> Leaf:
    """Integers from 0 on; what is outside of the declared range counts as its end."""
    last = np.asarray(values) - 1
    dtype = np.dtype(np.uint8 if max(values) <= 256 else np.int32)

    def read(x: Any, xp: Any) -> Any:
        x = x.reshape(x.shape[0], *shape)
        if np.any(start):
            x = x.astype(np.int32) - np.asarray(start, np.int32)
        return xp.clip(x, 0, last).astype(dtype)

    return Leaf("part", ObsPart(shape, dtype, "ids", values), read, "ids")


def _binary(shape: tuple[int, ...]) -> Leaf:
    """Planes stay planes; everything else is numbers 0 and 1."""
    if len(shape) == 3 and min(sides(shape)) >= 3:
        part = ObsPart(shape, np.dtype(np.uint8), "ids", (2,))
        return Leaf("part", part, lambda x, xp: x.astype(np.uint8), "0/1 planes")
    return numbers(shape, how="0/1")


# ---------------------------------------------------------------------------------------------
# Boxes


def _box(space: Any) -> Leaf:
    shape, kind = space.shape or (1,), np.dtype(space.dtype).kind
    if kind == "b":
        return _binary(shape)
    if kind in "iu":
        return _integers(space, shape)
    low, high = float(np.min(space.low)), float(np.max(space.high))
    if _is_picture(shape, FLOATS_SIDE) and -UNBOUNDED < low < high < UNBOUNDED:
        return _image(shape, np.dtype(np.float32), low, high)
    return numbers(shape)


def _integers(space: Any, shape: tuple[int, ...]) -> Leaf:
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
    count = int((high - low).max()) + 1
    if count == 2 and not low.any():
        return _binary(shape)
    if count <= ONE_HOT_INTEGERS:
        varied = (high - low).ravel() + 1
        values = tuple(int(n) for n in varied) if len(shape) == 1 else (count,)
        values = values if len(set(values)) > 1 else (count,)
        return _ids(shape, values, low.reshape(shape).astype(np.int32))
    if space.dtype == np.uint8 and (len(shape) == 3 or _is_picture(shape, BYTES_SIDE)):
        return _image(shape, np.dtype(np.uint8), 0.0, 255.0)
    if count > EXACT:
        return numbers(shape)
    return numbers(shape, float(low.min()), float(high.max() - low.min()))


def numbers(shape: tuple[int, ...], start: float = 0.0, scale: float = 1.0, how: str = "") -> Leaf:
    """As float32, amounts of a known range from 0 to 1."""
    plain = start == 0.0 and scale == 1.0

    def read(x: Any, xp: Any) -> Any:
        x = x.reshape(x.shape[0], *shape).astype(np.float32)
        return x if plain else (x - np.float32(start)) * np.float32(1.0 / scale)

    how = how or ("numbers" if plain else f"number / {scale:g}")
    return Leaf("numbers", ObsPart(shape, np.dtype(np.float32), "vector"), read, how)


def _is_picture(shape: tuple[int, ...], least: int) -> bool:
    """Two large sides; three or four axes leave less doubt, so their sides may be smaller."""
    if len(shape) == 2:
        return min(shape) >= least
    if len(shape) == 4:
        shape = shape[1:]
    return len(shape) == 3 and min(sides(shape)) >= PLANE_SIDE


def _image(shape: tuple[int, ...], dtype: np.dtype, low: float, high: float) -> Leaf:
    """One plane gets an axis of channels, stacked frames become channels of one picture; floats
    are scaled to 0..1 here, bytes inside the network."""
    scaled = dtype == np.float32 and (low, high) != (0.0, 1.0)

    def read(x: Any, xp: Any) -> Any:
        x = _as_channels(x, shape)
        if dtype == np.float32:
            x = x.astype(np.float32)
        return (x - np.float32(low)) * np.float32(1.0 / (high - low)) if scaled else x

    blank = _as_channels(np.empty((1, *shape), bool), shape)
    return Leaf("part", ObsPart(blank.shape[1:], dtype, "image"), read, "image")


def _as_channels(x: Any, shape: tuple[int, ...]) -> Any:
    """`[B, *shape]` as `[B, height, width, channels]`, or with the channels first."""
    if len(shape) == 2:
        return x[..., None]
    if len(shape) == 3:
        return x
    frames, *frame = shape
    if channels_first(tuple(frame)):
        return x.reshape(x.shape[0], frames * frame[0], *frame[1:])
    x = x.transpose(0, 2, 3, 1, 4)
    return x.reshape(x.shape[0], *frame[:2], frames * frame[2])

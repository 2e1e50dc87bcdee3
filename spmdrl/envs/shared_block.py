"""The arrays of a batch of environments in one block of memory, shared by trainer and workers.

The block is an anonymous file that both map: it has no name, so nothing is left of it when the last
process has gone, however it went.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.envs.leaves import leaf_spaces

__all__ = [
    "OBS", "Arrays", "Layout", "batch_layout", "leaf_array", "mapped", "obs_leaves", "open_block",
    "plain",
]  # fmt: skip

OBS = "obs:"  # before the path of an observation's leaf
ALIGNMENT = 64  # a cache line

Layout = dict[str, tuple[list[int], str]]  # shape and dtype by name
Arrays = dict[str, np.ndarray]


def batch_layout(space: Any, action: np.ndarray, workers: int) -> Layout:
    """What a batch exchanges in a step; `action` is one such batch of actions.

    `current` is the environment that a worker is busy with, counted from its own first, or -1;
    `busy` its seconds by the clock and of computing, and its steps.
    """
    count = len(action)
    leaves = {path: leaf_array(leaf) for path, leaf in leaf_spaces(space).items()}
    layout = {
        f"{OBS}{path}": ([count, *shape], dtype)
        for path, (shape, dtype) in ((p, array) for p, array in leaves.items() if array)
    }
    return layout | {
        "action": (list(action.shape), action.dtype.name),
        "reward": ([count], "float64"),
        "terminated": ([count], "bool"),
        "truncated": ([count], "bool"),
        "episode_step": ([count], "int64"),
        "current": ([workers], "int64"),
        "busy": ([workers, 3], "float64"),
    }


def leaf_array(space: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of one observation; None of a space that has no array."""
    if isinstance(space, gym.spaces.Text):
        return (space.max_length,), "uint8"
    if isinstance(space, gym.spaces.Discrete):
        return (), "int64"
    if isinstance(space, (gym.spaces.Box, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)):
        return space.shape, np.dtype(space.dtype).name
    return None


def obs_leaves(arrays: Arrays) -> Arrays:
    """The observations among them, by path."""
    return {k.removeprefix(OBS): array for k, array in arrays.items() if k.startswith(OBS)}


def open_block() -> int:
    """A file descriptor of a block without a size."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("spmdrl-environments", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int, layout: Layout) -> Arrays:
    """The arrays in the block, which is made large enough."""
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        length = math.prod(shape) * np.dtype(dtype).itemsize
        size += -(-length // ALIGNMENT) * ALIGNMENT
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    block = mmap.mmap(descriptor, max(size, 1))
    return {
        name: np.frombuffer(block, dtype, math.prod(shape), offsets[name]).reshape(shape)
        for name, (shape, dtype) in layout.items()
    }


def plain(layout: Layout) -> Arrays:
    """The same arrays, not shared."""
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}

"""Where the environments stand in each array, and computing them in fixed groups.

A shard is a fixed group of environments. Computed in a loop with one body, its results have the
same bits on whichever device it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmdrl.config import Config
from spmdrl.parallel.mesh import AXIS
from spmdrl.types import Rollout

__all__ = [
    "WHOLE_VECTORS",
    "ids_of_ranks",
    "in_shards",
    "rollout_specs",
    "shards_in",
    "split_envs",
    "split_ids",
]

BY_ROW = {"last_obs", "last_first", "carry", "last_carry", "env_ids"}


def split_ids(num_envs: int, parts: int) -> list[range]:
    """Contiguous blocks of global ids, as even as possible, the longer ones first."""
    blocks = np.array_split(np.arange(num_envs), parts)
    return [range(int(block[0]), int(block[-1]) + 1) for block in blocks]


WHOLE_VECTORS = 8  # rows; a network's last bits are the same for every multiple of so many


def ids_of_ranks(config: Config, ranks: int) -> list[range]:
    """The environments of each rank, as even as possible."""
    size = _smallest_block(config, ranks)
    blocks = split_ids(config.env.num_envs // size, ranks)
    return [range(block.start * size, block.stop * size) for block in blocks]


def _smallest_block(config: Config, ranks: int) -> int:
    """Environments that stay together: a shard, or where ranks are uneven anyway, whole vectors."""
    envs = config.env.num_envs
    if config.sync.deterministic:
        return envs // config.sync.shards
    enough = envs % WHOLE_VECTORS == 0 and envs // WHOLE_VECTORS >= ranks
    return WHOLE_VECTORS if envs % ranks and enough else 1


def shards_in(config: Config, envs: int) -> int:
    """How many shards so many environments are; all of them are one without deterministic."""
    if not config.sync.deterministic:
        return 1
    return envs * config.sync.shards // config.env.num_envs


def rollout_specs() -> Rollout:
    """The environment axis of every field of a rollout."""
    names = Rollout.__dataclass_fields__
    return Rollout(**{n: P(AXIS) if n in BY_ROW else P(None, AXIS) for n in names})


def split_envs(specs: Any, tree: Any, shards: int) -> Any:
    """The tree with its environment axes cut, the shards along a new first axis."""

    def cut(spec: P, part: Any) -> Any:
        axis = list(spec).index(AXIS) if AXIS in spec else None
        return jax.tree.map(lambda x: _cut(x, axis, shards), part)

    return jax.tree.map(cut, specs, tree, is_leaf=lambda x: isinstance(x, P))


def _cut(x: Array, axis: int | None, shards: int) -> Array:
    if axis is None:
        return jnp.broadcast_to(x, (shards, *x.shape))
    shape = (*x.shape[:axis], shards, x.shape[axis] // shards, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def in_shards(function: Callable[..., Any], shards: int, *args: Any) -> Any:
    """A function of rows, computed shard by shard; one shard is computed directly."""
    if shards == 1:
        return function(*args)
    cut = jax.tree.map(lambda x: _cut(x, 0, shards), args)
    out = jax.lax.map(lambda part: function(*part), cut)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

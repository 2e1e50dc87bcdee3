"""Where the environments stand in each array, and computing them in fixed groups.

A shard is a fixed group of environments. Computed in a loop with one body, its results have the
same bits on whichever device it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from spmdrl.parallel.mesh import AXIS
from spmdrl.types import Rollout

__all__ = ["env_axis", "in_shards", "rollout_specs", "split_envs"]

BY_ROW = {"last_obs", "last_first", "carry", "last_carry", "env_ids"}


def env_axis(field: str) -> int:
    """The axis of the environments in this field of a rollout."""
    return 0 if field in BY_ROW else 1


def rollout_specs() -> Rollout:
    """The same of every field, for jax."""
    names = Rollout.__dataclass_fields__
    return Rollout(**{name: P(*[None] * env_axis(name), AXIS) for name in names})


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

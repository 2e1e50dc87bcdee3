"""Adding up over devices and ranks; the only importer of mpi4jax.

Two slots: `in_step` is traced inside the compiled update, `between` runs between two compiled
calls. What travels is one flat vector of sums. Public names: `GradSync`, `make_grad_sync`,
`assert_in_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from spmdrl.config import SyncConfig
from spmdrl.mesh import AXIS
from spmdrl.world import World

Tree = Any
Reduce = Callable[[Tree], Tree]


@dataclass(frozen=True)
class GradSync:
    """How partial sums, each with a leading axis of shards, become the global sum."""

    in_step: Reduce
    between: Reduce | None
    places: int  # devices of the whole run
    first_place: int  # of this rank

    def place(self) -> jax.Array:
        """Which of the run's devices traces this; inside the compiled step only."""
        index = jax.lax.axis_index(AXIS)
        return self.first_place + index


def make_grad_sync(
    config: SyncConfig, world: World, devices: int
) -> GradSync:
    """For `devices` devices on each rank; `gather` and `jax` see a single rank here."""
    combine = _ordered if config.deterministic else _plain
    spans_ranks = world.size > 1 and config.strategy == "allreduce"
    places = devices * (world.size if config.strategy != "gather" else 1)
    first = 0 if config.strategy != "allreduce" else world.rank * devices
    if not spans_ranks:
        return GradSync(combine(_over_devices, _gather_devices), None, places, first)
    if devices == 1:
        return GradSync(combine(_over_ranks, _gather_ranks), None, places, first)
    raise NotImplementedError


def _plain(add: Reduce, gather: Reduce) -> Reduce:
    """Sum the local shards, then over the places, in whatever order is fastest."""
    return lambda tree: add(jax.tree.map(lambda x: x.sum(0), tree))


def _ordered(add: Reduce, gather: Reduce) -> Reduce:
    """Bring all shards together and add them one by one, in order of their ids."""

    def reduce(tree: Tree) -> Tree:
        flat, restore = _flatten_shards(tree)
        shards = gather(flat)
        total = shards[0]
        for i in range(1, shards.shape[0]):
            total = total + shards[i]
        return restore(total)

    return reduce


def _flatten_shards(tree: Tree) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """A tree with a leading shard axis as one matrix, a row a shard."""
    _, restore = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
    return jax.vmap(lambda t: ravel_pytree(t)[0])(tree), restore


def _over_devices(tree: Tree) -> Tree:
    return jax.lax.psum(tree, AXIS)


def _gather_devices(shards: jax.Array) -> jax.Array:
    return jax.lax.all_gather(shards, AXIS, axis=0, tiled=True)


def _over_ranks(tree: Tree) -> Tree:
    flat, restore = ravel_pytree(tree)
    return restore(mpi_allreduce(flat))


def _gather_ranks(shards: jax.Array) -> jax.Array:
    gathered = mpi_allgather(shards)
    return gathered.reshape(-1, shards.shape[-1])


def mpi_allreduce(flat: jax.Array) -> jax.Array:
    import mpi4jax
    from mpi4py import MPI

    return mpi4jax.allreduce(flat, op=MPI.SUM, comm=_mpi4jax_comm())


def mpi_allgather(x: jax.Array) -> jax.Array:
    import mpi4jax

    return mpi4jax.allgather(x, comm=_mpi4jax_comm())


_COMM: Any = None


def _mpi4jax_comm() -> Any:
    """A communicator of its own, never shared with mpi4py's calls."""
    global _COMM
    if _COMM is None:
        from mpi4py import MPI

        _COMM = MPI.COMM_WORLD.Clone()
    return _COMM

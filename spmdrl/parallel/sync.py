"""Adding up over devices and ranks.

Two slots: `in_step` is traced inside the compiled update, `between` runs between two compiled
calls. What travels is one flat vector of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.flatten_util import ravel_pytree

from spmdrl.config import SyncConfig
from spmdrl.parallel import mpi
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.mesh import AXIS, host_device
from spmdrl.parallel.world import World

__all__ = ["GradSync", "Reduce", "make_grad_sync"]

Tree = Any
# What to add up, and an earlier answer (None at first) that this call must not overtake.
Reduce = Callable[[Tree, Tree], Tree]


@dataclass(frozen=True)
class GradSync:
    """How partial sums, each with a leading axis of shards, become the global sum.

    The sum is `in_step(partial, earlier)`, or `between(in_step(partial, None))` where the second
    slot is used; `earlier` is the sum before, which must be complete first on every rank.
    """

    in_step: Reduce
    between: Callable[[Tree], Tree] | None
    world: World  # the ranks that it sums over
    num_devices: int  # of all these ranks
    first_device: int  # of this rank
    mpi_in_step: bool = False

    def device_index(self) -> jax.Array:
        """Which of the run's devices this is; inside the compiled step only."""
        return self.first_device + jax.lax.axis_index(AXIS)


def make_grad_sync(config: SyncConfig, world: World, devices: int) -> GradSync:
    """For `devices` devices of each rank.

    With `gather` rank 0 learns alone, and with `jax` the mesh itself spans the ranks: in both
    cases the sum over the mesh is all there is.
    """
    if config.strategy == "jax":
        return GradSync(_sum_processes(config), None, world, devices * world.size, 0)
    if config.strategy == "gather" or world.size == 1:
        return GradSync(_sum_devices(config), None, world, devices, 0)
    total, first = devices * world.size, world.rank * devices
    if devices == 1 and world.has_threads and mpi.reaches_device():
        return GradSync(_sum_ranks(config, world), None, world, total, first, mpi_in_step=True)
    keep = _gather_devices if config.deterministic else _partial_sum_devices
    return GradSync(keep, _sum_between(config, world), world, total, first)


def _sum_devices(config: SyncConfig) -> Reduce:
    if config.deterministic:
        return lambda tree, earlier: _ordered_sum(_gather_devices(tree, earlier))
    return lambda tree, earlier: jax.lax.psum(_local_sum(tree), AXIS)


def _sum_processes(config: SyncConfig) -> Reduce:
    """As one vector: between processes every array would cost a round of messages of its own."""
    add = _sum_devices(config)

    def add_flat(tree: Tree, earlier: Tree) -> Tree:
        rows, restore = _flatten_shards(tree)
        return restore(add(rows, earlier))

    return add_flat


def _sum_ranks(config: SyncConfig, world: World) -> Reduce:
    """One flat vector over the network, inside the compiled update."""
    comm = world.program_comm
    if config.deterministic:
        return lambda tree, earlier: _ordered_sum(
            _gather_ranks(tree, lambda rows: mpi.allgather_after(rows, earlier, comm))
        )
    return lambda tree, earlier: _allreduce_flat(
        _local_sum(tree), lambda flat: mpi.allreduce_after(flat, earlier, comm)
    )


def _sum_between(config: SyncConfig, world: World) -> Callable[[Tree], Tree]:
    if not world.has_threads:
        return _sum_on_host(config, world)
    return mpi.through_host(private_jit(_sum_ranks_between(config, world)))


def _sum_ranks_between(config: SyncConfig, world: World) -> Callable[[Tree], Tree]:
    """The same in a program of its own, ordered by mpi4jax's effect.

    Ordered by data alone, such programs hung on 2 ranks x 2 devices.
    """
    comm = world.program_comm

    def ordered(tree: Tree) -> Tree:
        return _ordered_sum(_gather_ranks(tree, lambda rows: mpi.allgather(rows, comm)))

    def unordered(tree: Tree) -> Tree:
        return _allreduce_flat(_local_sum(tree), lambda flat: mpi.allreduce(flat, comm))

    return ordered if config.deterministic else unordered


def _sum_on_host(config: SyncConfig, world: World) -> Callable[[Tree], Tree]:
    """The same from Python, for an MPI that only one thread may call: programs have their own."""

    def add(tree: Tree) -> Tree:
        rows, restore = _flatten_shards(tree)
        mine = jax.device_get(rows)
        if config.deterministic:
            total = _ordered_sum(world.all_rows(mine))
        else:
            total = world.sum(mine.sum(0))
        return restore(jax.device_put(total, host_device()))

    return add


def _local_sum(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sum(0), tree)


def _partial_sum_devices(tree: Tree, earlier: Tree) -> Tree:
    return jax.tree.map(lambda x: x[None], jax.lax.psum(_local_sum(tree), AXIS))


def _ordered_sum(tree: Tree) -> Tree:
    """Shards added one by one in order of their ids: the same bits on every topology."""

    def add(x: jax.Array) -> jax.Array:
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + x[i]
        return total

    return jax.tree.map(add, tree)


def _gather_devices(tree: Tree, earlier: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True), tree)


def _flatten_shards(tree: Tree) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """A tree with a leading shard axis as one matrix, one row per shard."""
    _, restore = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
    return jax.vmap(lambda t: ravel_pytree(t)[0])(tree), restore


def _allreduce_flat(tree: Tree, allreduce: Callable[[jax.Array], jax.Array]) -> Tree:
    flat, restore = ravel_pytree(tree)
    return restore(allreduce(flat))


def _gather_ranks(tree: Tree, allgather: Callable[[jax.Array], jax.Array]) -> Tree:
    """The shards of all ranks along the first axis, as one message."""
    rows, restore = _flatten_shards(tree)
    return jax.vmap(restore)(allgather(rows))

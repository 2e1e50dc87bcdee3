"""Adding up over devices and ranks; the only importer of mpi4jax.

Two slots: `in_step` is traced inside the compiled update, `between` runs between two compiled
calls. What travels is one flat vector of sums. Public names: `GradSync`, `make_grad_sync`,
`assert_in_sync`, `NotFinite`, `OutOfSync`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from spmdrl.config import SyncConfig
from spmdrl.mesh import AXIS, on_device
from spmdrl.types import TrainState
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


# ---------------------------------------------------------------------------------------------
# Guards


class OutOfSync(RuntimeError):
    """The ranks' parameters differ, which averaging can never repair."""


class NotFiniteError(RuntimeError):
    """A gradient or a moment is not finite."""


def checksum(state: TrainState, mesh: Mesh) -> list[int]:
    """Integer sums over every bit of the state, one for each device of this rank."""
    return [int(_bit_sum(on_device(state, device))) for device in mesh.local_devices]


@jax.jit
def _bit_sum(tree: Tree) -> jax.Array:
    total = jnp.zeros((), jnp.uint32)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        # The position counts too: two values that changed places must not cancel out.
        place = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(i)
        total += jnp.sum((bits.reshape(-1) ^ place) * jnp.uint32(2246822519))
    return total


def assert_in_sync(state: TrainState, world: World, mesh: Mesh) -> None:
    """Raise OutOfSync, naming who differs, unless all devices of all ranks hold the same bits."""
    sums = world.gather_json(checksum(state, mesh))
    common = statistics.mode([s for of_rank in sums for s in of_rank])
    odd = [f"rank {r} device {d}" for r, row in enumerate(sums) for d, s in enumerate(row) if s != common]
    if odd:
        raise OutOfSync(
            f"parameters or optimiser state differ on {', '.join(odd)}; memory or a library is "
            "faulty there. Start the same command again to go on from the last checkpoint"
        )


class NotFinite:
    """Ends the run, or counts what was left out, when numbers are not finite."""

    def __init__(self, config: SyncConfig, world: World, devices: int):
        self._config, self._devices, self._in_a_row = config, devices, 0

    def check(self, bad_places: np.ndarray, step: int) -> None:
        if not bad_places.any():
            self._in_a_row = 0
            return
        self._in_a_row += 1
        ranks = sorted({int(place) // self._devices for place in np.flatnonzero(bad_places)})
        who = ", ".join(f"rank {rank}" for rank in ranks)
        if self._config.on_nonfinite == "stop":
            raise NotFiniteError(
                f"numbers that are not finite came from {who} in update {step}; the parameters "
                "were not changed by them. Look at the environment's observations and rewards, "
                "lower the learning rate, or leave such steps out with --sync.on-nonfinite skip"
            )
        if self._in_a_row >= self._config.max_skips:
            raise NotFiniteError(
                f"numbers that are not finite came from {who} in {self._in_a_row} updates in a row"
            )

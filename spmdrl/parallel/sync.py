"""Adding up over devices and ranks.

Two slots: `in_step` is traced inside the compiled update, `between` runs between two compiled
calls. What travels is one flat vector of sums. Public names: `GradSync`, `make_grad_sync`,
`broadcast_tree`, `CommMeter`, `assert_in_sync`, `NotFinite`, `OutOfSync`.
"""

from __future__ import annotations

import collections
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from spmdrl.config import Config, SyncConfig
from spmdrl.parallel import mpi
from spmdrl.parallel.mesh import AXIS, host_device, on_device
from spmdrl.parallel.world import World
from spmdrl.types import TrainState

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
    places: int  # devices of the whole run
    first_place: int  # of this rank
    mpi_in_step: bool = False

    def place(self) -> jax.Array:
        """Which of the run's devices this is; inside the compiled step only."""
        return self.first_place + jax.lax.axis_index(AXIS)


def make_grad_sync(config: SyncConfig, world: World, devices: int) -> GradSync:
    """For `devices` devices of each rank.

    With `gather` rank 0 learns alone, and with `jax` the mesh itself spans the ranks: in both
    cases the sum over the mesh is all there is.
    """
    if config.strategy == "jax":
        return GradSync(_sum_processes(config), None, devices * world.size, 0)
    if config.strategy == "gather" or world.size == 1:
        return GradSync(_sum_devices(config), None, devices, 0)
    places, first = devices * world.size, world.rank * devices
    if devices == 1 and mpi.reaches_device():
        return GradSync(_sum_ranks(config), None, places, first, mpi_in_step=True)
    keep = _gather_devices if config.deterministic else _partial_sum_devices
    return GradSync(keep, mpi.within_reach(jax.jit(_sum_ranks_between(config))), places, first)


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


def _sum_ranks(config: SyncConfig) -> Reduce:
    """One flat vector over the network, inside the compiled update."""
    if config.deterministic:
        return lambda tree, earlier: _ordered_sum(
            _gather_ranks(tree, lambda rows: mpi.allgather_after(rows, earlier))
        )
    return lambda tree, earlier: _allreduce_flat(
        _local_sum(tree), lambda flat: mpi.allreduce_after(flat, earlier)
    )


def _sum_ranks_between(config: SyncConfig) -> Callable[[Tree], Tree]:
    """The same in a program of its own, ordered by mpi4jax's effect.

    Ordered by data alone, such programs hung on 2 ranks x 2 devices.
    """
    if config.deterministic:
        return lambda tree: _ordered_sum(_gather_ranks(tree, mpi.allgather))
    return lambda tree: _allreduce_flat(_local_sum(tree), mpi.allreduce)


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
    """A tree with a leading shard axis as one matrix, a row a shard."""
    _, restore = ravel_pytree(jax.tree.map(lambda x: x[0], tree))
    return jax.vmap(lambda t: ravel_pytree(t)[0])(tree), restore


def _allreduce_flat(tree: Tree, allreduce: Callable[[jax.Array], jax.Array]) -> Tree:
    flat, restore = ravel_pytree(tree)
    return restore(allreduce(flat))


def _gather_ranks(tree: Tree, allgather: Callable[[jax.Array], jax.Array]) -> Tree:
    """The shards of all ranks along the first axis, as one message."""
    rows, restore = _flatten_shards(tree)
    return jax.vmap(restore)(allgather(rows))


def broadcast_tree(world: World, tree: Tree) -> Tree:
    """Rank 0's arrays, on every rank, as one message."""
    if world.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
    raw = [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves]
    flat = world.broadcast(np.concatenate(raw))
    parts = np.split(flat, np.cumsum([len(r) for r in raw])[:-1])
    shaped = [p.view(x.dtype).reshape(x.shape) for p, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


class CommMeter:
    """What the ranks' talking costs.

    Inside the compiled update it cannot be timed, so one allreduce of the same size is timed
    outside now and then, after a barrier, which also shows how long this rank waits for others.
    """

    INTERVAL = 20  # updates between two probes
    SAMPLES = 3  # of each probe
    LISTED = 16  # more ranks than that are not listed one by one

    def __init__(self, config: Config, world: World, params: Tree):
        self._world = world
        self._rounds = config.algo.epochs * config.algo.minibatches
        self._floats = sum(x.size for x in jax.tree.leaves(params))
        self._ms: collections.deque[float] = collections.deque(maxlen=100)
        self._probe = None
        self._updates = 0  # since the last row
        if world.size > 1 and config.sync.strategy == "allreduce":
            self._vector = jax.device_put(np.zeros(self._floats, np.float32), host_device())
            self._probe = jax.jit(partial(mpi.allreduce_after, earlier=None))

    def tick(self, step: int) -> None:
        """Called once an update, on every rank."""
        self._updates += 1
        if self._probe is None or step % self.INTERVAL:
            return
        if not self._ms:
            self._probe(self._vector).block_until_ready()  # compiles
        for _ in range(self.SAMPLES):
            self._world.barrier()
            start = time.perf_counter()
            self._probe(self._vector).block_until_ready()
            self._ms.append(1e3 * (time.perf_counter() - start))

    def row(self, seconds: dict[str, float]) -> dict[str, float]:
        """Metrics since the start; every rank calls this with its own seconds of each phase."""
        if self._world.size == 1:
            return {}
        phases = ("collect", "wait", "update")
        table = self._world.table(np.array([seconds.get(phase, 0.0) for phase in phases]))
        row = {"rank/slowest": float(table[:, 0].argmax())}
        if self._world.size <= self.LISTED:
            for rank, of_rank in enumerate(table):
                row |= {f"rank/{rank}/{p}": float(s) for p, s in zip(phases, of_rank, strict=True)}
        if self._ms:
            ordered = sorted(self._ms)  # np.percentile would take longer than the allreduce
            p50, p95 = (ordered[int(share * len(ordered))] for share in (0.5, 0.95))
            row |= {
                "comm/bytes_per_update": 4.0 * self._floats * self._rounds,
                "comm/allreduce_ms_p50": p50,
                "comm/allreduce_ms_p95": p95,
                # An estimate, and a part of the update: never more than that.
                "time/comm": min(1e-3 * p50 * self._rounds * self._updates, seconds["update"]),
            }
        self._updates = 0
        return row


# ---------------------------------------------------------------------------------------------
# Guards


class OutOfSync(RuntimeError):
    """The ranks' parameters differ, which averaging can never repair."""


class NotFiniteError(RuntimeError):
    """A gradient or a moment is not finite."""


def checksum(state: TrainState, mesh: Mesh) -> list[int]:
    """A CRC over every bit of the state, one for each device of this rank."""
    return [_crc(on_device(state, device)) for device in mesh.local_devices]


def _crc(tree: Tree) -> int:
    """On the host: compiling a sum of bits would hold up a run in its middle."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return found


def assert_in_sync(config: SyncConfig, state: TrainState, world: World, mesh: Mesh) -> None:
    """Raise OutOfSync, naming who differs, unless all devices of all ranks hold the same bits."""
    if world.size * len(mesh.local_devices) == 1:
        return
    if config.strategy == "gather":  # only rank 0 keeps the optimiser's state
        state = state.replace(opt_state=(), reward_moments=())
    sums = world.gather_json(checksum(state, mesh))
    found = {f"rank {r} device {d}": s for r, row in enumerate(sums) for d, s in enumerate(row)}
    odd = odd_ones(found)
    if odd:
        raise OutOfSync(
            f"parameters or optimiser state differ on {', '.join(odd)}; memory or a library is "
            "faulty there. Start the same command again to go on from the last checkpoint"
        )


def odd_ones(found: dict[str, int]) -> list[str]:
    """Who holds something else than most do; everybody where there is no majority."""
    common, votes = collections.Counter(found.values()).most_common(1)[0]
    if 2 * votes <= len(found):
        return list(found)
    return [name for name, value in found.items() if value != common]


class NotFinite:
    """Ends the run, or counts what was left out, when numbers are not finite."""

    def __init__(self, config: SyncConfig, devices: int):
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

"""Communication cost, measured beside the compiled update."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spmdrl.config import SyncConfig
from spmdrl.parallel import mpi
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.mesh import host_device
from spmdrl.parallel.world import World

__all__ = ["PHASES", "CommMeter"]

PHASES = ("collect", "wait", "update")  # of which every rank tells the others its seconds


class CommMeter:
    """Communication cost.

    Inside the compiled update it cannot be timed, so one allreduce of the same size is timed
    outside now and then, after a barrier, which also shows how long this rank waits for others.
    """

    INTERVAL = 20  # updates between two probes
    SAMPLES = 3  # of each probe
    LISTED = 16  # more ranks than that are not listed one by one

    def __init__(self, config: SyncConfig, world: World, params: Any, rounds: int):
        """`rounds` are the sums over ranks that one update takes, each as long as `params`."""
        self._world, self._rounds = world, rounds
        self._floats = sum(x.size for x in jax.tree.leaves(params))
        self._ms: collections.deque[float] = collections.deque(maxlen=100)
        self._probe: Callable[[Any], Any] | None = None
        self._updates = 0  # since the last row
        if world.size > 1 and config.strategy == "allreduce" and world.has_threads:
            self._vector = jax.device_put(np.zeros(self._floats, np.float32), host_device())
            self._probe = private_jit(_probe_over(world))

    def tick(self, step: int) -> None:
        """Called once per update, on every rank."""
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

    def row(self, per_rank: np.ndarray, update_s: float) -> dict[str, float]:
        """Metrics since the last row: seconds of every rank in each of PHASES, `[ranks, phases]`,
        and this rank's seconds of updating."""
        if self._world.size == 1:
            return {}
        row = {"rank/slowest": float(per_rank[:, 0].argmax())}
        if self._world.size <= self.LISTED:
            for rank, seconds in enumerate(per_rank):
                row |= {f"rank/{rank}/{p}": float(s) for p, s in zip(PHASES, seconds, strict=True)}
        if self._ms:
            ordered = sorted(self._ms)  # np.percentile would take longer than the allreduce
            p50, p95 = (ordered[int(share * len(ordered))] for share in (0.5, 0.95))
            row |= {
                "comm/bytes_per_update": 4.0 * self._floats * self._rounds,
                "comm/allreduce_ms_p50": p50,
                "comm/allreduce_ms_p95": p95,
                # An estimate, and a part of the update: never more than that.
                "time/comm": min(1e-3 * p50 * self._rounds * self._updates, update_s),
            }
        self._updates = 0
        return row


def _probe_over(world: World) -> Callable[[jax.Array], jax.Array]:
    def probe(vector: jax.Array) -> jax.Array:
        return mpi.allreduce_after(vector, None, world.program_comm)

    return probe

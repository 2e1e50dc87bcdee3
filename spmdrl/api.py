"""For your own batch algorithm: the few calls that turn a single-process script parallel.

Every function works alone too, where it does nothing, so one script serves the laptop and the
cluster. See docs/parallel.md.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.flatten_util
import numpy as np

from spmdrl.parallel import mpi
from spmdrl.parallel.gather import broadcast_tree
from spmdrl.parallel.topology import detect
from spmdrl.parallel.world import World, connect

__all__ = ["allmean", "broadcast", "gather_batch", "is_root", "log", "rank", "size"]


@functools.cache
def _world() -> World:
    world = connect(detect())
    if world.size > 1:
        sys.excepthook = _end_everyone
    return world


def _end_everyone(kind: Any, error: Any, trace: Any) -> None:
    """A rank that died of an exception would leave the others waiting forever."""
    sys.__excepthook__(kind, error, trace)
    log(f"failed with {kind.__name__}: {error}")
    sys.stderr.flush()
    _world().abort(1)


def rank() -> int:
    """Number of this process, from 0."""
    return _world().rank


def size() -> int:
    """How many processes there are."""
    return _world().size


def is_root() -> bool:
    """Whether this is rank 0, which writes files and prints."""
    return _world().is_root


def allmean(tree: Any) -> Any:
    """The mean over all ranks of every array in the tree, as one message.

    May be called inside `jax.jit` on a single device, which must be one that MPI can read (a GPU
    needs mpi4jax's bridge for that); arrays must be float32 or float64.
    """
    if size() == 1:
        return tree
    flat, restore = jax.flatten_util.ravel_pytree(tree)
    if isinstance(flat, jax.core.Tracer):
        return restore(_sum_in_program(flat) / size())
    if _world().has_threads:
        total = mpi.through_host(_sum_in_program)(flat)
    else:
        total = _world().sum(jax.device_get(flat))
    return restore(jax.device_put(total / size(), flat.sharding))


def _sum_in_program(flat: Any) -> Any:
    if not _world().has_threads:
        raise RuntimeError(
            "this MPI does not provide MPI_THREAD_MULTIPLE, so it cannot be called inside jax.jit; "
            "call api.allmean outside of it"
        )
    return mpi.allreduce(flat, _world().program_comm)


def gather_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The rows of all ranks end to end, in order of rank, on rank 0; None on the others.

    Ranks may have different numbers of rows, but need the same names.
    """
    names = _world().gather_json(sorted(batch))
    for other, found in enumerate(names):
        if found != names[0]:
            raise ValueError(f"rank {other} has the arrays {found}, rank 0 has {names[0]}")
    rows = {name: _world().gather_rows(np.asarray(batch[name])) for name in names[0]}
    return {k: v for k, v in rows.items() if v is not None} if is_root() else None


def broadcast(tree: Any) -> Any:
    """Rank 0's arrays on every rank; all ranks pass a tree of the same shapes."""
    return broadcast_tree(_world(), tree)


def log(text: str) -> None:
    """Print with the rank in front, so that the lines of many ranks can be told apart."""
    prefix = f"[rank {rank()}/{size()}] " if size() > 1 else ""
    print(f"{prefix}{text}", file=sys.stderr, flush=True)

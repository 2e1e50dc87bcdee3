"""Host-side talk between ranks: JSON texts and numpy arrays, never pickles.

`World` does nothing at one rank, so callers need no special case, and MPI is not even imported.
Public names: `World`, `connect`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdrl.launch import LaunchError, Topology


class World:
    """The ranks of this run. This class is the run of one rank."""

    rank = 0
    size = 1

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in order of rank."""
        return [value]

    def gather_rows(self, array: np.ndarray) -> np.ndarray | None:
        """Arrays that differ in their first dimension, end to end on rank 0; None elsewhere."""
        return array

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's array, on every rank; shapes and dtypes agree already."""
        return array

    def table(self, row: np.ndarray) -> np.ndarray:
        """A row of floats from every rank, on every rank: `[size, n]`."""
        return np.asarray(row, np.float64)[None]

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank; the same answer everywhere."""
        return flag

    def barrier(self) -> None:
        """Wait for everybody."""

    def abort(self, code: int) -> None:
        """End every rank at once."""
        os._exit(code)


class MpiWorld(World):
    """Several ranks, through mpi4py's buffer interface."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        # A communicator of our own: mpi4jax must not share one with mpi4py.
        self._comm = MPI.COMM_WORLD.Clone()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def broadcast_json(self, value: Any) -> Any:
        text = json.dumps(value).encode() if self.is_root else b""
        length = np.array([len(text)], np.int64)
        self._comm.Bcast(length, root=0)
        data = np.frombuffer(text, np.uint8).copy() if self.is_root else np.empty(length, np.uint8)
        self._comm.Bcast(data, root=0)
        return json.loads(data.tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self._allgather_lengths(len(mine))
        joined = np.empty(sum(lengths), np.uint8)
        self._comm.Allgatherv(mine, [joined, lengths])
        ends = np.cumsum(lengths)
        return [json.loads(joined[e - n : e].tobytes()) for e, n in zip(ends, lengths, strict=True)]

    def gather_rows(self, array: np.ndarray) -> np.ndarray | None:
        array = np.ascontiguousarray(array)
        lengths = self._allgather_lengths(len(array))
        rows = self._mpi.BYTE.Create_contiguous(max(1, array[:1].nbytes or _row_bytes(array)))
        rows.Commit()  # counts in rows, so that more than 2 GiB fit into MPI's 32-bit counts
        try:
            joined = (
                np.empty((sum(lengths), *array.shape[1:]), array.dtype) if self.is_root else None
            )
            receive = [joined, lengths, None, rows] if self.is_root else None
            self._comm.Gatherv([array, len(array), rows], receive, root=0)
        finally:
            rows.Free()
        return joined

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        array = np.array(array, order="C")
        self._comm.Bcast([array, self._mpi.BYTE], root=0)
        return array

    def table(self, row: np.ndarray) -> np.ndarray:
        mine = np.asarray(row, np.float64)
        rows = np.empty((self.size, len(mine)), np.float64)
        self._comm.Allgather(mine, rows)
        return rows

    def any(self, flag: bool) -> bool:
        found = np.array([flag], np.uint8)
        self._comm.Allreduce(self._mpi.IN_PLACE, found, op=self._mpi.MAX)
        return bool(found[0])

    def barrier(self) -> None:
        self._comm.Barrier()

    def abort(self, code: int) -> None:
        self._mpi.COMM_WORLD.Abort(code)

    def _allgather_lengths(self, length: int) -> Sequence[int]:
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([length], np.int64), lengths)
        return [int(n) for n in lengths]


def _row_bytes(array: np.ndarray) -> int:
    return int(np.prod(array.shape[1:])) * array.dtype.itemsize


def connect(topology: Topology) -> World:
    """The world that the topology describes, checked against what MPI itself says."""
    if topology.size == 1:
        return World()
    world = MpiWorld()
    if (world.rank, world.size) != (topology.rank, topology.size):
        raise LaunchError(_mismatch(world, topology))
    return world


def _mismatch(world: World, topology: Topology) -> str:
    said = f"{topology.launcher} started rank {topology.rank} of {topology.size}"
    found = f"MPI says rank {world.rank} of {world.size}"
    if topology.launcher != "srun":
        return f"{said}, but {found}; the mpirun on PATH belongs to another MPI than mpi4py"
    from mpi4py import MPI

    plugin = "pmix" if "Open MPI" in MPI.Get_library_version() else "pmi2"
    return f"{said}, but {found}; start the job with srun --mpi={plugin}"

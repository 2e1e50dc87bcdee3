"""Host-side communication between ranks: JSON texts and numpy arrays, never pickles.

`World` does nothing at one rank, so callers need no special case, and MPI is not even imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmdrl.config import EXIT_FAULT, ConfigError
from spmdrl.parallel.ports import confine_rank
from spmdrl.parallel.topology import LaunchError, Topology

__all__ = ["MpiWorld", "World", "abort_all", "connect", "name_ranks"]

SAY_EVERY_S = 10.0  # while ranks are missing at the start
START_LIMIT_S = 600.0  # for MPI itself, before there is a config to say otherwise


class World:
    """The ranks of this run. This class is the run of one rank."""

    rank = 0
    size = 1
    ready_s = 0.0  # how long it took to meet
    thread_level = "multiple"  # single, funneled, serialized or multiple
    program_comm: Any = None  # for calls inside compiled programs; never used by this class

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def has_threads(self) -> bool:
        """Whether compiled programs, which have threads of their own, may call MPI."""
        return self.thread_level == "multiple"

    def split(self, ranks: Sequence[int]) -> World:
        """The world of these ranks alone, numbered anew in the given order.

        Called by its members, all of them, and by no other rank.
        """
        if list(ranks) != [0]:
            raise ValueError(f"a world of 1 rank cannot be split into ranks {list(ranks)}")
        return self

    def from_root(self, function: Callable[[], Any]) -> Any:
        """What the function answers on rank 0, on every rank, by way of JSON.

        A ConfigError on rank 0 is raised on every rank. The other ranks do not call the function.
        """
        text = ""
        if self.is_root:
            try:
                text = json.dumps({"answer": function()})
            except ConfigError as error:
                text = json.dumps({"refusal": str(error)})
        found = json.loads(self.broadcast_json(text))
        if "refusal" in found:
            raise ConfigError(found["refusal"])
        return found["answer"]

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in order of rank."""
        return [value]

    def assemble(self, value: Any, limit_s: float) -> list[Any]:
        """The first meeting: `gather_json` that says whom it waits for, and not forever."""
        return [value]

    def gather_rows(
        self, array: np.ndarray, lengths: Sequence[int] | None = None
    ) -> np.ndarray | None:
        """Arrays that differ in their first dimension, end to end on rank 0; None elsewhere.

        `lengths` are those of all ranks, where they are known already.
        """
        return array

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's array, on every rank; shapes and dtypes agree already."""
        return array

    def table(self, row: np.ndarray) -> np.ndarray:
        """A row of floats from every rank, on every rank: `[size, n]`."""
        return np.asarray(row, np.float64)[None]

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum over all ranks of arrays of one shape and dtype, on every rank."""
        return array

    def all_rows(self, rows: np.ndarray) -> np.ndarray:
        """Arrays of one shape and dtype end to end, in order of rank, on every rank."""
        return rows

    def barrier(self) -> None:
        """Wait for everybody."""

    def meet(self) -> None:
        """The same where it may take long: without keeping a core busy."""

    def abort(self, code: int) -> None:
        """End every rank at once."""
        os._exit(code)


class MpiWorld(World):
    """Several ranks, through mpi4py's buffer interface."""

    def __init__(self, comm: Any = None) -> None:
        """`comm` is an intracommunicator that nobody else uses; by default one of all ranks."""
        started = time.perf_counter()
        self._mpi = MPI = _start_mpi()
        self._comm = MPI.COMM_WORLD.Clone() if comm is None else comm
        # mpi4jax must not share one with mpi4py. Made at once, because all must make it together.
        self.program_comm = self._comm.Clone()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.thread_level = _thread_level(MPI)
        self.ready_s = time.perf_counter() - started

    def split(self, ranks: Sequence[int]) -> World:
        wrong = [rank for rank in ranks if not 0 <= rank < self.size]
        if wrong or self.rank not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"rank {self.rank} of {self.size} cannot split into {list(ranks)}")
        everyone = self._comm.Get_group()
        members = everyone.Incl(list(ranks))
        try:
            return MpiWorld(self._comm.Create_group(members))
        finally:
            members.Free()
            everyone.Free()

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

    def assemble(self, value: Any, limit_s: float) -> list[Any]:
        # Rank 0 must not block in a collective call, which cannot tell who is missing.
        if not self.is_root:
            self._comm.Send(np.frombuffer(json.dumps(value).encode(), np.uint8), dest=0)
            return list(self.broadcast_json(None))
        found, started, said = {0: value}, time.monotonic(), SAY_EVERY_S
        while len(found) < self.size:
            if not self._receive_one(found):
                time.sleep(0.01)
            waited = time.monotonic() - started
            missing = [rank for rank in range(self.size) if rank not in found]
            if waited > limit_s:
                raise LaunchError(
                    f"{name_ranks(missing)} (of {self.size}) did not start within {limit_s:.0f} s; "
                    "look at the logs of their nodes, or raise --sync.start-timeout-s"
                )
            if missing and waited > said:
                print(f"spmdrl: waiting for {name_ranks(missing)} ({waited:.0f} s)", flush=True)
                said += SAY_EVERY_S
        return list(self.broadcast_json([found[rank] for rank in range(self.size)]))

    def _receive_one(self, found: dict[int, Any]) -> bool:
        status = self._mpi.Status()
        if not self._comm.Iprobe(status=status):
            return False
        text = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._comm.Recv(text, source=status.Get_source())
        found[status.Get_source()] = json.loads(text.tobytes())
        return True

    def gather_rows(
        self, array: np.ndarray, lengths: Sequence[int] | None = None
    ) -> np.ndarray | None:
        array = np.ascontiguousarray(array)
        if lengths is None:
            lengths = self._allgather_lengths(len(array))
        joined = np.empty((sum(lengths), *array.shape[1:]), array.dtype) if self.is_root else None
        width = _row_bytes(array)
        if width == 0:
            return joined  # MPI would write past its end
        rows = self._mpi.BYTE.Create_contiguous(width)
        rows.Commit()  # counts in rows, so that more than 2 GiB fit into MPI's 32-bit counts
        try:
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

    def sum(self, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        total = np.empty_like(array)
        self._comm.Allreduce(array, total, op=self._mpi.SUM)
        return total

    def all_rows(self, rows: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        found = np.empty((self.size, *rows.shape), rows.dtype)
        self._comm.Allgather(rows, found)
        return found.reshape(-1, *rows.shape[1:])

    def barrier(self) -> None:
        self._comm.Barrier()

    def meet(self) -> None:
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(0.002)

    def abort(self, code: int) -> None:
        self._mpi.COMM_WORLD.Abort(code)

    def _allgather_lengths(self, length: int) -> Sequence[int]:
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([length], np.int64), lengths)
        return [int(n) for n in lengths]


def _start_mpi() -> Any:
    """The MPI module, started so that other threads can print while ranks are missing."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        together = threading.Event()
        threading.Thread(target=_say_waiting, args=(together,), daemon=True).start()
        _init(MPI)
        together.set()
    return MPI


def _init(MPI: Any) -> None:
    """MPI_Init_thread, which waits for all ranks, without keeping other threads from running.

    mpi4py's own holds Python's lock meanwhile: nobody could say that ranks are missing.
    """
    library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    code = library.MPI_Init_thread(None, None, _wanted_level(MPI), ctypes.byref(provided))
    if code != MPI.SUCCESS:
        raise LaunchError(f"MPI_Init_thread: {MPI.Get_error_string(code)}")


def _wanted_level(MPI: Any) -> int:
    """Compiled programs and Python call MPI from threads of their own, sometimes at once."""
    return int(MPI.THREAD_MULTIPLE)


def _thread_level(MPI: Any) -> str:
    """What MPI provides, which may be less than `_init` asked for."""
    names = ("single", "funneled", "serialized", "multiple")
    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}
    return levels[MPI.Query_thread()]


def _say_waiting(together: threading.Event) -> None:
    started = time.monotonic()
    while not together.wait(SAY_EVERY_S):
        waited = time.monotonic() - started
        print(f"spmdrl: waiting for MPI: some ranks have not started ({waited:.0f} s)", flush=True)
        if waited > START_LIMIT_S:
            print("spmdrl: giving up; look at the launcher's and the nodes' logs", flush=True)
            os._exit(EXIT_FAULT)


def name_ranks(ranks: Sequence[int]) -> str:
    """rank 1, or ranks 0, 1."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _row_bytes(array: np.ndarray) -> int:
    return int(np.prod(array.shape[1:])) * array.dtype.itemsize


def connect(topology: Topology) -> World:
    """The world that the topology describes, checked against what MPI itself says."""
    if topology.size == 1:
        return World()
    confine_rank(topology)
    world = MpiWorld()
    if (world.rank, world.size) != (topology.rank, topology.size):
        raise LaunchError(_mismatch(world, topology))
    if world.is_root and not world.has_threads:
        print(
            f"spmdrl: this MPI provides MPI_THREAD_{world.thread_level.upper()} only, so compiled "
            "programs cannot call it: gradients are summed from Python, which is slower. Use an "
            "MPI built with MPI_THREAD_MULTIPLE, or --sync.strategy jax",
            file=sys.stderr,
            flush=True,
        )
    return world


def abort_all(world: World, code: int, after_s: float = 0.0) -> int:
    """End every rank of the job with this exit code; alone, only return it.

    A rank that leaves the report of a common fault to another waits `after_s` to be ended by it.
    """
    if isinstance(world, MpiWorld):  # also where it is the only one of its group
        time.sleep(after_s)
        world.abort(code)
    return code


def _mismatch(world: World, topology: Topology) -> str:
    said = f"{topology.launcher} started rank {topology.rank} of {topology.size}"
    found = f"MPI says rank {world.rank} of {world.size}"
    if topology.launcher != "srun":
        return f"{said}, but {found}; the mpirun on PATH belongs to another MPI than mpi4py"
    from mpi4py import MPI

    plugin = "pmix" if "Open MPI" in MPI.Get_library_version() else "pmi2"
    return f"{said}, but {found}; start the job with srun --mpi={plugin}"

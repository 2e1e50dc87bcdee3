"""A thread that moves messages while the others compute.

Open MPI moves nothing by itself between the start of a message and the wait for it, and a blocking
wait would spin on the core that a simulator needs. So one thread looks after all messages, and
naps in between; everybody else waits for it without using a core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from spmdrl.parallel.wire import BLOCK

__all__ = ["Courier"]

SHORT_NAP_S, LONG_NAP_S = 0.0005, 0.005
AWAKE_S = 0.02  # after something has happened, naps are short for so long

OnDone = Callable[[int], None]


class Courier:
    """Nonblocking messages of one process over a communicator that nobody else uses.

    Whoever sends or posts a receive leaves the buffer alone until `on_done` is called, in the
    courier's thread, with the number of bytes.
    """

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        # Counts in blocks, so that more than 2 GiB fit into MPI's 32-bit counts.
        self._block = MPI.BYTE.Create_contiguous(BLOCK)
        self._block.Commit()
        self._new: list[tuple[Any, OnDone, bool]] = []
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._wake, self._closing = threading.Event(), False
        self._since = time.monotonic()
        self._error: BaseException | None = None
        self._open: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def send(self, buffer: np.ndarray, rank: int, on_done: OnDone) -> None:
        """Start to send a buffer of whole blocks."""
        request = self._comm.Isend([buffer, len(buffer) // BLOCK, self._block], dest=rank)
        self._add(request, on_done, is_send=True)

    def receive(self, buffer: np.ndarray, rank: int, on_done: OnDone) -> None:
        """Post a receive; those of one rank are filled in the order in which they were posted."""
        request = self._comm.Irecv([buffer, len(buffer) // BLOCK, self._block], source=rank)
        self._add(request, on_done, is_send=False)

    def _add(self, request: Any, on_done: OnDone, is_send: bool) -> None:
        with self._lock:
            self._new.append((request, on_done, is_send))
        self._stay_awake()

    def _stay_awake(self) -> None:
        self._since = time.monotonic()
        self._wake.set()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until it is so; asked again after every message. Raises what the courier has met."""
        self._stay_awake()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or ready())
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Cancel the receives that are still posted; all sends must have been waited for."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        for request in self._open:  # finalising MPI with open requests would hang
            request.Cancel()
            request.Wait()
        self._block.Free()

    # -- the thread

    def _run(self) -> None:
        jobs: list[tuple[Any, OnDone, bool]] = []
        try:
            while not self._closing:
                with self._lock:
                    jobs, self._new = jobs + self._new, []
                left = self._look(jobs)
                if len(left) == len(jobs):
                    self._nap(sending=any(is_send for _, _, is_send in jobs))
                jobs = left
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()
            self._open = [request for request, _, _ in jobs + self._new]

    def _look(self, jobs: list[tuple[Any, OnDone, bool]]) -> list[tuple[Any, OnDone, bool]]:
        """Tell those whose message is through; the others are still under way."""
        if not jobs:
            return jobs
        statuses = [self._mpi.Status() for _ in jobs]
        done = self._mpi.Request.Testsome([request for request, _, _ in jobs], statuses) or []
        for index, status in zip(done, statuses, strict=False):
            jobs[index][1](BLOCK * status.Get_count(self._block))
        if done:
            self._since = time.monotonic()
            with self._changed:
                self._changed.notify_all()
        finished = set(done)
        return [job for i, job in enumerate(jobs) if i not in finished]

    def _nap(self, sending: bool) -> None:
        awake = sending or time.monotonic() - self._since < AWAKE_S
        self._wake.wait(SHORT_NAP_S if awake else LONG_NAP_S)
        self._wake.clear()

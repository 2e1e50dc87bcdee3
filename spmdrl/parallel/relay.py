"""What the launcher and the ranks write to stderr: passed on, and understood.

A rank that is killed as it starts, or together with all the others, leaves nobody who could say
which it was. The launcher knows the rank but not what it was doing; its place knows that.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from pathlib import Path
from typing import IO

from spmdrl.parallel.place import Place, read_place

__all__ = ["Relay"]

# Open MPI's words, of PRRTE 3; the second kind names no process.
KILLED = re.compile(rb"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)")
EXITED = re.compile(rb"Process name: \[[^\]\s]+@\d+,(\d+)\]\s+Exit code:\s+(\d+)")
REPORT = re.compile(rb"^\0?spmdrl: (?!waiting for |received SIGTERM)", re.MULTILINE)
KEPT = 1 << 16  # bytes, the newest of what was written; the launcher's words come last
END_S = 2.0  # for what is still on its way when the launcher has ended


class Relay:
    """Passes a stream on to this process's stderr, byte by byte, and remembers its end."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._tail, self._reported = stream, b"", False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # nobody reads it; the job goes on
                os.write(2, data)
            self._tail = (self._tail + data)[-KEPT:]
            self._reported = self._reported or bool(REPORT.search(self._tail))

    def finish(self) -> None:
        """After the launcher's end; a process that outlives it may keep the stream open."""
        self._thread.join(END_S)

    def unreported(self, ranks: int, folder: Path | None) -> str:
        """A line about the rank that ended the job, where no rank has reported it; else empty."""
        killed, exited = KILLED.search(self._tail), EXITED.search(self._tail)
        found = killed or exited
        if self._reported or found is None:
            return ""
        rank, host = int(found[1]), socket.gethostname()
        place = read_place(folder, rank) if folder is not None else None
        pid = int(killed[2]) if killed else place.pid if place else 0
        place = place or Place(pid, 0, "start")  # it was not there yet
        how = f"by signal {killed[4].decode()}" if killed else f"with code {found[2].decode()}"
        return (
            f"spmdrl: rank {rank} of {ranks} on {host} (pid {pid}) died ({how}) in update "
            f"{place.update}, phase {place.phase}; the job ends. Start the same command again to "
            "resume from the last checkpoint"
        )

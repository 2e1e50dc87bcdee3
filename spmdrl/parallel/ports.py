"""A run on one machine listens on the loopback only.

Open MPI's launcher always listens on every interface, for daemons on other hosts, and cannot be
told otherwise (open-mpi/ompi issue 14441). On one machine there are none, so its sockets are bound
anew, to the loopback. Nothing here imports jax or MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from spmdrl.parallel.topology import Topology

__all__ = ["confine_launcher", "confine_rank", "open_to_all"]

BTL = "OMPI_MCA_btl"  # Open MPI's means of transport
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
WAIT_S = 10.0  # for the launcher to open its ports, on a busy machine
MORE_S = 1.0  # after the first one
POLL_S = 0.02
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # system calls, the same numbers on all 64-bit machines


def confine_rank(topology: Topology, environ: MutableMapping[str, str] = os.environ) -> None:
    """Before MPI starts: ranks of one machine share memory and need no TCP between them."""
    if topology.local_size == topology.size > 1:
        environ.setdefault(BTL, "^tcp")


def confine_launcher(pid: int) -> threading.Thread:
    """Do it as soon as that child of this process listens; where the kernel refuses, it stays."""
    thread = threading.Thread(target=_confine_when_open, args=(pid,), daemon=True)
    thread.start()
    return thread


def _confine_when_open(pid: int) -> None:
    until = time.monotonic() + WAIT_S
    with contextlib.suppress(OSError):  # it has ended, or we may not look into it
        while time.monotonic() < until:
            if any(True for _ in open_to_all(pid)):
                _confine(pid)
                until = time.monotonic() + MORE_S
            time.sleep(POLL_S)


def _confine(pid: int) -> None:
    # It waits for connections in a thread, which would complain of a socket that stops listening.
    os.kill(pid, signal.SIGSTOP)
    try:
        for listening in open_to_all(pid):
            port, family = listening.getsockname()[1], listening.family
            listening.shutdown(socket.SHUT_RDWR)
            listening.bind((LOOPBACK[family], port))
            listening.listen()
    finally:
        os.kill(pid, signal.SIGCONT)


def open_to_all(pid: int) -> Iterator[socket.socket]:
    """The sockets on which another process of this user listens, on every interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = _checked(libc.syscall(_PIDFD_OPEN, pid, 0))
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed by now
                if os.readlink(entry).startswith("socket:"):
                    copy = _checked(libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0))
                    with socket.socket(fileno=copy) as found:
                        if _listens_everywhere(found):
                            yield found
    finally:
        os.close(process)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


def _listens_everywhere(found: socket.socket) -> bool:
    if found.family not in LOOPBACK or found.type != socket.SOCK_STREAM:
        return False
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and found.getsockname()[0] in ("0.0.0.0", "::")

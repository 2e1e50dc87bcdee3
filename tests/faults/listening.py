"""On which addresses the processes of a job listen."""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spmdrl.parallel.spawn import mpirun_command
from tests.children import train_command
from tests.faults.places import SIZES
from tests.faults.result import Bench, Result, start, wait_until
from tests.faults.trials import end_orphans, processes, rows

__all__ = ["WAYS", "listeners", "open_ports", "trial"]

LISTEN = "0A"  # the state, in the kernel's tables
WAYS = {
    "1 rank": ["--nprocs", "1"],
    "allreduce": ["--nprocs", "2"],
    "gather": ["--nprocs", "2", "--sync.strategy", "gather"],
    "jax": ["--nprocs", "2", "--sync.strategy", "jax"],
    "allreduce, mpirun": [],
    "jax, mpirun": ["--sync.strategy", "jax"],
}


def listeners(pids: Iterable[int]) -> list[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket on which one of these processes listens."""
    found, table = [], dict(_table())
    for pid in pids:
        for inode in _inodes(pid):
            if inode in table:
                found.append((pid, *table[inode]))
    return sorted(set(found))


def open_ports(pids: Iterable[int]) -> list[tuple[int, str, int]]:
    """Those that other machines can reach."""
    return [one for one in listeners(pids) if not _is_loopback(one[1])]


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)  # an IPv4 address on an IPv6 socket
    return (mapped or address).is_loopback


def _table() -> Iterator[tuple[str, tuple[str, int]]]:
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                address, _, port = words[1].partition(":")
                yield words[9], (_address(address, family), int(port, 16))


def _address(text: str, family: int) -> str:
    parts = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(parts))


def _inodes(pid: int) -> Iterator[str]:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def trial(
    way: str, number: int, rng: random.Random, bench: Bench, inside: Sequence[str] = ()
) -> Result:
    """`inside` is a command that starts the job."""
    folder, began = bench.folder / "trial", time.time()
    shutil.rmtree(folder, ignore_errors=True)
    command = train_command(*SIZES, *WAYS[way], "--run-dir", folder / "run")
    if "mpirun" in way:
        command = [mpirun_command(2)[0], "-np", "2", "--oversubscribe", "--allow-run-as-root",
                   *command]  # fmt: skip
    job = start([*inside, *command], bench.environment(folder))
    trains = wait_until(lambda: rows(folder) > 5, job)
    pids = [*processes(str(folder))]
    launcher = {job.pid} if "mpirun" in way else set()  # the user's, whose ports are his business
    judged = [pid for pid in pids if pid not in launcher]
    found, reachable = listeners(judged), open_ports(judged)
    job.send_signal(signal.SIGKILL)
    for pid in pids:
        if pid != job.pid and Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    end_orphans(str(folder))
    why = "" if trains else f"it did not train: {output[-500:]}"
    why = why or (f"listens on {reachable}" if reachable else "")
    said = f"{len(found)} ports, all on the loopback"
    return Result(f"ports: {way}", number, way, not why, said, why, time.time() - began)

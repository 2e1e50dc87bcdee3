"""An Ethernet switch in user space that holds every frame for a fixed time.

    python delay_switch.py SECONDS INTERFACE...

For kernels without netem. It reads and writes raw frames together with their virtio header, so
that large segments with unfinished checksums pass as they are, and it never reorders.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import select
import socket
import sys
import time

SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 1, 15, 23
PACKET_MR_PROMISC = 1
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
PR_SET_TIMERSLACK = 29
HEADER = 10  # bytes of the virtio header before the frame
LOST = {errno.EAGAIN, errno.ENOBUFS, errno.ENETDOWN, errno.EMSGSIZE, errno.ENXIO}


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_RCVBUFFORCE, SO_SNDBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
    port.bind((name, ETH_P_ALL))
    # Frames for the hosts' addresses, which are not this interface's own.
    index = socket.if_nametoindex(name)
    request = index.to_bytes(4, sys.byteorder) + PACKET_MR_PROMISC.to_bytes(2, sys.byteorder)
    port.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, request + bytes(10))
    port.setblocking(False)
    return port


class Switch:
    def __init__(self, ports: list[socket.socket], delay: float):
        self._ports, self._delay = ports, delay
        self._behind: dict[bytes, socket.socket] = {}  # hardware address -> its port
        self._waiting: collections.deque = collections.deque()

    def serve(self) -> None:
        while True:
            self._send_due()
            # select and not poll: those round the time up to a whole millisecond
            for port in select.select(self._ports, [], [], self._patience())[0]:
                self._receive(port)

    def _patience(self) -> float:
        if not self._waiting:
            return 1.0
        return max(0.0, self._waiting[0][0] - time.monotonic())

    def _receive(self, port: socket.socket, at_most: int = 64) -> None:
        due = time.monotonic() + self._delay
        for _ in range(at_most):
            try:
                frame = port.recv(70_000)
            except OSError as error:
                if error.errno in LOST:
                    return
                raise
            self._behind[frame[HEADER + 6 : HEADER + 12]] = port
            self._waiting.append((due, port, frame))

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, source, frame = self._waiting.popleft()
            known = self._behind.get(frame[HEADER : HEADER + 6])
            for port in [known] if known else [p for p in self._ports if p is not source]:
                try:
                    port.send(frame)
                except OSError as error:
                    if error.errno not in LOST:
                        raise


def main() -> None:
    delay, *names = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake up on time, to the microsecond
    Switch([open_port(name) for name in names], float(delay)).serve()


if __name__ == "__main__":
    main()

"""What trainer and worker process say to each other, over one socket: single bytes and JSON.

A step is one byte in each direction, because what it is about lies in shared memory. All else is a
message: a byte, two lengths, JSON, and bytes such as a picture.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

__all__ = ["DONE", "MESSAGE", "STEP", "read_message", "send_message"]

STEP, DONE, MESSAGE = b"s", b".", b"m"
_LENGTHS = struct.Struct("!QQ")


def send_message(link: socket.socket, said: dict[str, Any], blob: bytes = b"") -> None:
    text = json.dumps(said).encode()
    link.sendall(MESSAGE + _LENGTHS.pack(len(text), len(blob)) + text + blob)


def read_message(link: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The rest of a message whose first byte was read; EOFError if the other side has gone."""
    text, blob = _LENGTHS.unpack(_exactly(link, _LENGTHS.size))
    said: dict[str, Any] = json.loads(_exactly(link, text))
    return said, _exactly(link, blob)


def _exactly(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

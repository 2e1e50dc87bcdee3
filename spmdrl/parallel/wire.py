"""The two messages between learners and actors: fixed bytes, each array at a fixed place.

A model goes from a learner to its actors, a rollout back. Both begin with a header that says whose
it is; what does not fit ends the run instead of being learned from. Nothing is pickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

__all__ = [
    "BLOCK", "BYE", "END", "STOP", "Form", "ModelHeader", "RolloutHeader", "WireError", "run_hash",
]  # fmt: skip

BLOCK = 64  # bytes: messages and arrays begin and end at multiples
STOP = 1  # somebody asks, or has decided, to stop before the end of the run
END = 2  # the last model: no other follows
BYE = 4  # the last message of an actor, without a rollout


class WireError(RuntimeError):
    """A message that is none of this run's, or not the one that must come next."""


@dataclass(frozen=True)
class Place:
    """One array in a message."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Form:
    """Where each array of a message is; the same on both sides, so only the bytes travel."""

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]], header: int):
        """`arrays` are shapes and dtypes by name; `header` is its length in bytes."""
        self.places: dict[str, Place] = {}
        end = header
        for name, (shape, dtype) in arrays.items():
            place = Place(tuple(shape), np.dtype(dtype), end)
            self.places[name] = place
            end = _up(end + place.nbytes)
        self.nbytes = _up(end)

    @property
    def fingerprint(self) -> int:
        """A number that differs where the forms do."""
        parts = [f"{name} {p.shape} {p.dtype.str}" for name, p in self.places.items()]
        return zlib.crc32("\n".join(parts).encode())

    def room(self) -> np.ndarray:
        """A buffer for one message, which begins where MPI and jax like it to."""
        raw = np.zeros(self.nbytes + BLOCK, np.uint8)
        first = -raw.ctypes.data % BLOCK
        return raw[first : first + self.nbytes]

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays in a buffer, without a copy."""
        return {
            name: buffer[p.start : p.start + p.nbytes].view(p.dtype).reshape(p.shape)
            for name, p in self.places.items()
        }

    def write(self, buffer: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the arrays into the buffer; each must be what the form says."""
        views = self.views(buffer)
        if views.keys() != arrays.keys():
            odd = sorted(views.keys() ^ arrays.keys())
            raise WireError(f"a message with other arrays than was agreed on: {', '.join(odd[:5])}")
        for name, view in views.items():
            x = arrays[name]
            if (x.shape, x.dtype) != (view.shape, view.dtype):
                raise WireError(
                    f"{name} is {x.shape} {x.dtype}, but {view.shape} {view.dtype} was agreed on"
                )
            view[...] = x


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def run_hash(run_id: str, *more: object) -> int:
    """Tells the messages of one run, and of one layout, from all others."""
    return zlib.crc32(repr((run_id, *more)).encode())


def _pack(layout: str, size: int, magic: bytes, *values: object) -> bytes:
    text = struct.pack(f"<4s{layout}", magic, *values)
    return (text + struct.pack("<I", zlib.crc32(text))).ljust(size, b"\0")


def _unpack(layout: str, magic: bytes, data: bytes) -> tuple[object, ...]:
    length = struct.calcsize(f"<4s{layout}")
    (crc,) = struct.unpack_from("<I", data, length)
    found, *values = struct.unpack_from(f"<4s{layout}", data)
    if found != magic or crc != zlib.crc32(data[:length]):
        raise WireError("the header of a message is damaged")
    return tuple(values)


@dataclass(frozen=True)
class ModelHeader:
    """Before a model: `version` is the number of updates that made it."""

    run: int
    version: int
    flags: int = 0

    SIZE: ClassVar[int] = BLOCK
    _LAYOUT: ClassVar[str] = "IqI"
    _MAGIC: ClassVar[bytes] = b"SPMD"

    def pack(self) -> np.ndarray:
        text = _pack(self._LAYOUT, self.SIZE, self._MAGIC, self.run, self.version, self.flags)
        return np.frombuffer(text, np.uint8)

    @classmethod
    def read(cls, buffer: np.ndarray) -> ModelHeader:
        values = _unpack(cls._LAYOUT, cls._MAGIC, buffer[: cls.SIZE].tobytes())
        return cls(*values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RolloutHeader:
    """Before rollout `number`, which the model `version` has collected."""

    run: int
    number: int
    version: int
    first: int  # id
    count: int
    flags: int = 0
    env_s: float = 0.0
    inference_s: float = 0.0
    collect_s: float = 0.0
    idle_s: float = 0.0  # for the model
    send_s: float = 0.0  # of the message before

    SIZE: ClassVar[int] = 2 * BLOCK
    _LAYOUT: ClassVar[str] = "IqqqqI5d"
    _MAGIC: ClassVar[bytes] = b"SPRO"

    def pack(self) -> np.ndarray:
        text = _pack(
            self._LAYOUT, self.SIZE, self._MAGIC, self.run, self.number, self.version, self.first,
            self.count, self.flags, self.env_s, self.inference_s, self.collect_s, self.idle_s,
            self.send_s,
        )  # fmt: skip
        return np.frombuffer(text, np.uint8)

    @classmethod
    def read(cls, buffer: np.ndarray) -> RolloutHeader:
        values = _unpack(cls._LAYOUT, cls._MAGIC, buffer[: cls.SIZE].tobytes())
        return cls(*values)  # type: ignore[arg-type]

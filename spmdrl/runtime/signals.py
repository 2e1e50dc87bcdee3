"""Requests to stop, which the training loop answers after a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import ClassVar

__all__ = ["StopRequest"]


class StopRequest:
    """A flag that USR1, TERM and the first Ctrl-C set; the second Ctrl-C ends at once."""

    def __init__(self, answer: str = "saving a checkpoint, then stopping (again: stop at once)"):
        self.signal: str | None = None
        # A line break would tear the panel, whose last line is free; there the panel says it too.
        self._answer = f"Ctrl-C: {answer}{'' if sys.stdout.isatty() else chr(10)}".encode()

    heard: ClassVar[StopRequest | None] = None  # that of this process

    def listen(self) -> StopRequest:
        StopRequest.heard = self
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == "SIGINT":
            os.write(2, b"second Ctrl-C: ending at once\n")
            os._exit(130)
        self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            os.write(2, self._answer)

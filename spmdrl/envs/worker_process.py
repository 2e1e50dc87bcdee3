"""The child side: one process that holds some environments and steps them when it is told to.

Started by `spmdrl.envs.workers` as `python -m spmdrl.envs.worker_process LINK BLOCK TRACE`, three
file descriptors: the socket to the trainer, the shared block, and where to dump the stack when the
trainer asks for it. Loads no jax.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import socket
import sys
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.envs.errors import EnvError
from spmdrl.envs.hosts import Host, Task, make_host
from spmdrl.envs.making import UnknownEnv
from spmdrl.envs.messages import DONE, STEP, read_message, send_message
from spmdrl.envs.shared_block import mapped
from spmdrl.envs.surroundings import prepare

__all__ = ["main"]

DUMP_SIGNAL = signal.SIGUSR2


def main(argv: list[str]) -> int:
    link, block, trace = (int(word) for word in argv)
    faulthandler.register(DUMP_SIGNAL, trace, all_threads=True)
    leave_signals_to_the_trainer()
    with socket.socket(fileno=link) as connection, contextlib.suppress(EOFError, OSError):
        Worker(connection, block).serve()  # until the trainer has gone
    return 0


def leave_signals_to_the_trainer() -> None:
    """Ctrl-C and a batch system's TERM ask the trainer for a checkpoint, which needs its workers.

    By handlers that do nothing: ignored signals would stay ignored in programs that an environment
    starts, which could not be ended any more.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


class Worker:
    """Answers each request of the trainer with a byte or a message."""

    def __init__(self, link: socket.socket, block: int):
        self._link, self._block = link, block
        self._host: Host | None = None

    def serve(self) -> None:
        try:
            while request := self._link.recv(1):
                self._answer(request)
        finally:
            if self._host is not None:
                with contextlib.suppress(Exception):  # nobody listens any more
                    self._host.close()

    def _answer(self, request: bytes) -> None:
        try:
            if request == STEP:
                assert self._host is not None
                self._host.step()
                self._link.send(DONE)
            else:
                said, _ = read_message(self._link)
                self._carry_out(said)
        except ConfigError as error:
            send_message(self._link, {"refused": str(error)})
        except EnvError as error:
            send_message(self._link, {"fault": str(error), "details": error.details})

    def _carry_out(self, said: dict[str, Any]) -> None:
        what = said.pop("do")
        if what == "open":
            prepare(said["surroundings"])
            self._host = opened(Task(**said["task"]))
            send_message(self._link, {"spaces": self._host.describe()})
            return
        assert self._host is not None
        if what == "render":
            frame = self._host.render()
            shape = {"shape": frame.shape, "dtype": frame.dtype.name}
            send_message(self._link, shape, frame.tobytes())
            return
        if what == "attach":
            self._host.attach(mapped(self._block, said["layout"]))
        else:
            self._host.reset()
        self._link.send(DONE)


def opened(task: Task) -> Host:
    try:
        return make_host(task)
    except UnknownEnv as error:  # the trainer has checked the id: it knows more than we do
        raise ConfigError(
            f"{error}. Worker processes know what the config file registers, and the module before "
            "the colon in env.id: name that module, or use --env.workers inline"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The parent side: worker processes that step the environments of a batch.

Each has consecutive environments. Observations, rewards and actions lie in one shared block; a byte
over a socket wakes a worker and another tells that it is done. The end of a socket tells of a dead
worker, and a deadline of one that hangs. Workers are fresh processes, never forks of a trainer full
of threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from spmdrl.config import ConfigError
from spmdrl.envs.errors import EnvError, listed
from spmdrl.envs.hosts import Task, whereabouts
from spmdrl.envs.messages import DONE, STEP, read_message, send_message
from spmdrl.envs.shared_block import Arrays, Layout, mapped, open_block
from spmdrl.envs.space_json import space_from_json
from spmdrl.envs.surroundings import python_path, surroundings

__all__ = ["Worker", "WorkerProcesses", "advice", "start_limit"]

CLOSING_S = 3.0  # for environments to close themselves
DYING_S = 5.0  # for a process whose socket is closed
DUMPING_S = 1.0  # for the stack of one that hangs
START_FACTOR = 10.0
TURN_S = 0.1  # to wait for one worker alone, before all are listened to


def start_limit(timeout_s: float) -> float:
    """Simulators load when they are made or first reset, which takes longer than a step."""
    return START_FACTOR * timeout_s


class Worker:
    """One process and the socket to it."""

    def __init__(self, task: Task, block: int):
        self.task = task
        self.link, theirs = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self.link, select.POLLIN)
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        passed = (theirs.fileno(), block, self._trace.fileno())
        command = [sys.executable, "-m", "spmdrl.envs.worker_process", *map(str, passed)]
        with theirs:
            # A group of its own: Ctrl-C is for the trainer, and what an environment starts can be
            # ended together with it. No preexec_fn, which would fork Python with jax's threads.
            self.process = subprocess.Popen(
                command, pass_fds=passed, stdin=subprocess.DEVNULL, process_group=0,
                env=os.environ | {"PYTHONPATH": python_path()},
            )  # fmt: skip

    def open(self) -> None:
        self.ask(do="open", task=self.task.to_json(), surroundings=surroundings())

    def ask(self, **said: Any) -> None:
        with contextlib.suppress(OSError):  # of a worker that has gone: told by who waits for it
            send_message(self.link, said)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self.link.send(STEP)

    def await_answer(self, seconds: float) -> None:
        """Return when it has said something, has gone, or the time is over."""
        self._poll.poll(1000 * seconds)

    def is_done(self) -> bool:
        """Whether it has told that the step is done; anything else is left for `answer`."""
        try:
            if self.link.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != DONE:
                return False
        except OSError:  # it has said nothing yet, or has gone
            return False
        return self.link.recv(1) == DONE

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """What it says, of which there is something; EOFError from one that has gone."""
        try:
            kind = self.link.recv(1)
            if kind == DONE:
                return {}, b""
            if kind:
                return read_message(self.link)
        except ConnectionResetError as error:
            raise EOFError from error
        raise EOFError

    def stack(self) -> str:
        """Where it is, as it tells when asked by a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + DUMPING_S
        said = b""
        while time.monotonic() < deadline and not said:
            time.sleep(0.05)
            said = os.pread(self._trace.fileno(), 2**16, 0)
        time.sleep(0.05)  # the rest of it
        return os.pread(self._trace.fileno(), 2**16, 0).decode(errors="replace").rstrip()

    def exit_status(self, seconds: float) -> tuple[bool, int] | None:
        """Whether by a signal, and its number or the exit code; None of one that still runs.

        The process stays a zombie for now: as long as it is one, nobody else can get its group id.
        """
        deadline = time.monotonic() + seconds
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while (found := os.waitid(os.P_PID, self.process.pid, flags)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        return found.si_code != os.CLD_EXITED, found.si_status

    def kill(self) -> None:
        """The process, and what its environments have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        status = self.exit_status(DYING_S)
        if status is None:
            return "closed its connection"
        by_signal, number = status
        if not by_signal:
            return f"left with exit code {number}"
        name = signal.Signals(number).name
        why = " (by hand, or by the kernel for lack of memory)" if name == "SIGKILL" else ""
        return f"was ended by {name}{why}"

    def close(self) -> None:
        self.process.wait()
        self._trace.close()


def end(workers: Sequence[Worker], block: int, owner: int) -> None:
    """No process is left: those that do not close in time are killed."""
    if os.getpid() != owner:
        return  # a fork of the trainer that comes to its end
    deadline = time.monotonic() + CLOSING_S
    for worker in workers:
        worker.link.close()
    for worker in workers:
        worker.exit_status(deadline - time.monotonic())
        worker.kill()
        worker.close()
    os.close(block)


class WorkerProcesses:
    """Steps of a batch by several processes. Every error ends all of them."""

    def __init__(self, tasks: Sequence[Task], timeout_s: float):
        self._timeout_s = timeout_s
        self._block = open_block()
        self._arrays: Arrays | None = None
        self._workers: list[Worker] = []
        self.close = weakref.finalize(self, end, self._workers, self._block, os.getpid())
        for task in tasks:
            self._workers.append(Worker(task, self._block))
        first, limit = self._workers[0], start_limit(timeout_s)
        first.open()
        self._spaces = self._wait([first], limit)[0][0]["spaces"]
        self.obs_space = space_from_json(self._spaces["obs"])
        self.action_space = space_from_json(self._spaces["action"])

    @property
    def count(self) -> int:
        return len(self._workers)

    def attach(self, layout: Layout) -> Arrays:
        """The batch's arrays, with the first observations; the other workers begin only now."""
        self._arrays = mapped(self._block, layout)
        limit, (first, *others) = start_limit(self._timeout_s), self._workers
        first.ask(do="attach", layout=layout)
        for worker in others:
            worker.open()
        for worker, (said, _) in zip(others, self._wait(others, limit), strict=True):
            self._check_spaces(worker, said["spaces"])
            worker.ask(do="attach", layout=layout)
        self._wait(self._workers, limit)
        return self._arrays

    def _check_spaces(self, worker: Worker, spaces: dict[str, Any]) -> None:
        for what, said in spaces.items():
            if said != self._spaces[what]:
                task, first = worker.task, self._workers[0].task
                self.close()
                raise ConfigError(
                    f"env.id {task.env_id}: environment {task.ids[0]} has the {what} space "
                    f"{space_from_json(said)}, but environment {first.ids[0]} "
                    f"{space_from_json(self._spaces[what])}"
                )

    def reset(self) -> None:
        for worker in self._workers:
            worker.ask(do="reset")
        self._wait(self._workers, start_limit(self._timeout_s))

    def start_step(self) -> None:
        for worker in self._workers:
            worker.wake()

    def finish_step(self) -> None:
        # The last to be woken is about the last to be done: whoever waits for it finds the answers
        # of the others there, instead of waking for each and taking the core from those behind.
        self._workers[-1].await_answer(min(TURN_S, self._timeout_s))
        late = [worker for worker in self._workers if not worker.is_done()]
        if late:
            self._wait(late, self._timeout_s)

    def render(self) -> np.ndarray:
        self._workers[0].ask(do="render")
        ((said, pixels),) = self._wait(self._workers[:1], self._timeout_s)
        return np.frombuffer(pixels, said["dtype"]).reshape(said["shape"])

    # -- waiting

    def _wait(self, workers: Sequence[Worker], limit: float) -> list[tuple[dict[str, Any], bytes]]:
        """An answer of each."""
        if not self.close.alive:
            raise EnvError("the environments are closed")
        answers: dict[int, tuple[dict[str, Any], bytes]] = {}
        waiting = {worker.link.fileno(): worker for worker in workers}
        poll, deadline = select.poll(), time.monotonic() + limit
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                self._silent(list(waiting.values()), limit)
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                worker = waiting.pop(descriptor)
                answers[id(worker)] = self._heard(worker)
        return [answers[id(worker)] for worker in workers]

    def _heard(self, worker: Worker) -> tuple[dict[str, Any], bytes]:
        try:
            said, blob = worker.answer()
        except EOFError:
            self._dead(worker)
        if "refused" in said:
            self.close()
            raise ConfigError(said["refused"])
        if "fault" in said:
            self.close()
            raise EnvError(said["fault"], said["details"])
        return said, blob

    def _dead(self, worker: Worker) -> NoReturn:
        how, task = worker.how_it_ended(), worker.task
        self.close()
        raise EnvError(
            f"worker {task.worker} (pid {worker.process.pid}), which has {listed(task.ids)}, {how} "
            f"{self._doing(worker)}"
        )

    def _silent(self, workers: Sequence[Worker], limit: float) -> NoReturn:
        who = "; ".join(
            f"worker {w.task.worker} (pid {w.process.pid}), which has {listed(w.task.ids)}, hangs "
            f"{self._doing(w)}"
            for w in workers
        )
        stacks = "\n".join(f"worker {w.task.worker}:\n{w.stack()}" for w in workers[:3])
        for worker in workers:
            worker.kill()  # it would not listen
        self.close()
        raise EnvError(
            f"no answer for {limit:g} s: {who}. Raise --env.timeout-s if that is expected", stacks
        )

    def _doing(self, worker: Worker) -> str:
        if self._arrays is None or not worker.task.ids:
            return "while its first environment was made"
        task, index = worker.task, int(self._arrays["current"][worker.task.worker])
        if index < 0:
            return "between two steps"
        step = int(self._arrays["episode_step"][task.first_row + index])
        return f"in {whereabouts(task, index, step)}"


def advice(arrays: Arrays, workers: int, num_envs: int, batches: int = 1) -> str:
    """What to say after some steps, where more workers would help; else nothing.

    `workers` and `num_envs` are those of one of the `batches` that share `env.workers`.
    """
    clock, computing, steps = (float(x) for x in arrays["busy"].sum(axis=0))
    enough = steps >= 20 * workers and workers < num_envs
    if not enough or computing > 0.25 * clock or clock / steps < 1e-3:
        return ""
    waiting, step_ms = 1 - computing / clock, 1000 * clock / steps
    return (
        f"the environments wait in {waiting:.0%} of the {step_ms:.1f} ms of a worker's step; "
        f"more workers would help, up to --env.workers {num_envs * batches}"
    )

"""`spmdrl.train` with one fault built in: `python faulty.py FAULT RANK UPDATE MARKS argv...`.

FAULT happens on RANK in UPDATE. The moment is written to a file in the folder MARKS, together with
the pid of every rank, so that the runner can measure how long the job took to end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

fault, guilty, update, marks, *argv = sys.argv[1:]
guilty_rank, at_update = int(guilty), int(update)

from spmdrl.parallel.topology import detect  # noqa: E402

me = detect().rank
Path(marks, f"pid-{me}").write_text(str(os.getpid()))


def mark() -> None:
    """Write down when the fault happens, once."""
    file = Path(marks, "fault")
    if not file.exists():
        file.write_text(str(time.time()))


def calls_of(cls: Any, name: str, per_update: int = 1) -> Any:
    """Wrap a method so that `act` replaces its result in the chosen update."""

    def decorate(act: Any) -> None:
        original, count = getattr(cls, name), 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > at_update * per_update:
                mark()
                return act(original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(cls, name, wrapped)

    return decorate


def at_handshake(session: Any) -> None:
    """This rank claims something else than the others when they compare."""
    original, versions = session.handshake, session.versions
    if fault == "version":
        session.versions = lambda: versions() | {"jax": "0.0.1"}

    def handshake(config: Any, world: Any, argv: Any) -> Any:
        mark()
        return original(config, world, [*argv, "--seed", "77"] if fault == "config" else argv)

    session.handshake = handshake


def install() -> None:
    from spmdrl.acting import collector
    from spmdrl.envs.envpool_backend import EnvpoolBatch
    from spmdrl.runtime import logger, loop

    if fault in ("env", "nan-reward", "nan-obs"):
        collector.compiles = lambda *args: False  # step by step, where it can be reached

        @calls_of(EnvpoolBatch, "recv", per_update=16)
        def recv(original: Any, self: Any) -> Any:
            if fault == "env":
                raise RuntimeError("the simulator broke")
            answer = original(self)
            if fault == "nan-reward":
                answer.reward[0] = float("nan")
            else:
                answer.obs[0, 0] = float("nan")
            return answer

    elif fault == "nan-gradient":

        @calls_of(collector.Collector, "collect")
        def collect_poisoned(original: Any, *args: Any) -> Any:
            steps, episodes = original(*args)
            # Observations and rewards are fine; every ratio, and with it the gradient, is not.
            return steps.replace(log_prob=steps.log_prob * float("nan")), episodes

    elif fault == "update":

        @calls_of(loop, "plain")
        def plain(original: Any, metrics_now: Any) -> Any:
            raise RuntimeError("the learner broke")

    elif fault == "logger":

        @calls_of(logger.Logger, "write")
        def write(original: Any, self: Any, row: Any) -> None:
            raise OSError("the disk is gone")

    elif fault == "exit":

        @calls_of(collector.Collector, "collect")
        def collect(original: Any, *args: Any) -> Any:
            sys.exit(0)

    elif fault == "stop":

        @calls_of(collector.Collector, "collect")
        def collect_stopped(original: Any, *args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args)

    elif fault == "bit":
        import jax

        @calls_of(loop, "assert_in_sync")
        def flipped(original: Any, config: Any, state: Any, world: Any, mesh: Any) -> None:
            leaves, structure = jax.tree.flatten(state)
            bits = leaves[1].view("uint32") if hasattr(leaves[1], "view") else leaves[1]
            leaves[1] = (bits ^ 1).view("float32")
            original(config, jax.tree.unflatten(structure, leaves), world, mesh)

    elif fault in ("version", "config"):
        from spmdrl.runtime import session

        at_handshake(session)
    elif fault != "kill":
        raise SystemExit(f"unknown fault {fault}")


def prepare_and_break(*args: Any) -> None:
    """After the ranks have met, as in every run; before the trainer itself is imported."""
    prepare_process(*args)
    if me == guilty_rank:
        install()


from spmdrl import train  # noqa: E402

prepare_process, train.prepare_process = train.prepare_process, prepare_and_break
sys.exit(train.main(argv))

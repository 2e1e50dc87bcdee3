"""A process of its own for environments that nobody knows yet: they can crash it, or hang.

`Child` is the side of who asks, `serve` that of the process. A question is one line of JSON, and so
is its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.envs.errors import EnvError, raised
from spmdrl.envs.surroundings import prepare, python_path, surroundings

__all__ = ["ANSWER_S", "Child", "serve"]

ANSWER_S = 180.0  # an environment that takes longer hangs

Said = dict[str, Any]


class Child:
    """A process that answers one question after the other, by `serve` in this module."""

    def __init__(self, module: str):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        # A group of its own: Ctrl-C is for who asks, who then ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=os.environ | {"PYTHONPATH": python_path()},
        )  # fmt: skip

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, wanted: Said, seconds: float = ANSWER_S) -> Said:
        """The answer; {"refused"}, {"fault", "details"} or {"crashed"} where there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = json.dumps({"surroundings": surroundings(), "wanted": wanted})
        with contextlib.suppress(BrokenPipeError):  # of one that has ended: told below
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            answer: Said = json.loads(line)
            return answer
        if not ready:
            self._process.kill()
        code = self._process.wait()
        return {"crashed": self._ended_by(code) if ready else f"no answer for {seconds:.0f} s"}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # with a question that nobody read
                    stream.close()

    def _ended_by(self, code: int) -> str:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = self._last_words()
        return f"{how}: {said}" if said else how

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""


def serve(answer: Callable[[Said], Said]) -> int:
    """Answer questions until there are no more; what is wrong with an environment is an answer."""
    questions, answers = _own_streams()
    for line in questions:
        said = json.loads(line)
        answers.write(json.dumps(_answered(answer, said["surroundings"], said["wanted"])) + "\n")
        answers.flush()
    return 0


def _answered(answer: Callable[[Said], Said], around: Said, wanted: Said) -> Said:
    try:
        prepare(around)
        return answer(wanted)
    except ConfigError as error:
        return {"refused": str(error)}
    except EnvError as error:
        return {"fault": str(error), "details": error.details}
    except Exception as error:  # of code that we do not know
        fault = raised("the environment", error)
        return {"fault": str(fault), "details": fault.details}


def _own_streams() -> tuple[Any, Any]:
    """Where questions and answers go; what an environment prints must not get among them."""
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return questions, answers

"""`spmdrl COMMAND ...`, and how every command answers errors.

Light on purpose: a rank of a training run imports this module too, before it knows whether its
input is any good. What commands share to declare options is in `spmdrl.options`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, ConfigError
from spmdrl.envs.errors import EnvError
from spmdrl.parallel.topology import LaunchError
from spmdrl.runtime.trial_runs import TrialError

__all__ = ["COMMANDS", "EXIT_INTERRUPTED", "answer_errors", "complain", "main"]

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE

# In the order in which a person meets them.
COMMANDS = {
    "doctor": "check this installation and suggest fixes",
    "train": "train, or resume the run in --run-dir",
    "runs": "list runs: steps, return, running or how they ended",
    "envs": "describe an environment, or list ids",
    "evaluate": "play episodes with a trained policy; returns and video",
    "plot": "learning curves of runs, with a band over seeds, as a picture or a page",
    "report": "one page about a run or a group: curves, time, config, evaluation, video",
    "record": "play a checkpoint and keep the episodes",
    "clone": "train a policy on recorded episodes (behaviour cloning)",
    "sweep": "train every combination of some values, with several seeds",
    "verify": "compare a few updates over all topologies",
    "tune": "find the fastest number of ranks and threads",
    "slurm": "write a batch script or an mpirun command for several machines",
    "reference": "print every config field and every metric, as Markdown",
}


class Main(Protocol):
    """A command: words in, exit code out."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


# ---------------------------------------------------------------------------------------------
# Errors


def answer_errors(os_errors: bool = False) -> Callable[[Main], Main]:
    """Turn what a command raises into one line on stderr and an exit code.

    `os_errors` is for commands that only read and write files: there an OSError is about a file
    that the user named, elsewhere it is a fault whose traceback is needed.
    """

    def decorate(command: Main) -> Main:
        @functools.wraps(command)
        def answering(argv: Sequence[str] | None = None) -> int:
            try:
                code = command(argv)
                sys.stdout.flush()  # here, so that a closed pipe is noticed inside the `try`
                return code
            except (ConfigError, LaunchError) as error:
                return complain(error, EXIT_BAD_INPUT)
            except EnvError as error:
                return complain(error.report(), EXIT_FAULT)
            except TrialError as error:
                code = EXIT_BAD_INPUT if error.code == EXIT_BAD_INPUT else EXIT_FAULT
                return complain(error, code)
            except KeyboardInterrupt:
                return complain("interrupted", EXIT_INTERRUPTED)
            except BrokenPipeError:
                return _leave_quietly()
            except OSError as error:
                if not os_errors:
                    raise
                return complain(_about_file(error), EXIT_BAD_INPUT)

        return answering

    return decorate


def complain(error: object, code: int) -> int:
    print(f"spmdrl: {error}", file=sys.stderr, flush=True)
    return code


def _about_file(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _leave_quietly() -> int:
    """The reader of a pipe, such as `| head`, has seen enough."""
    # Python flushes stdout once more at its end and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_PIPE_CLOSED


# ---------------------------------------------------------------------------------------------
# The console script


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    """Hand the words on to the command named first."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(overview(), file=sys.stderr)
        return EXIT_BAD_INPUT
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"spmdrl {importlib.metadata.version('spmdrl')}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}; {_nearest(name)}")
    return command_of(name)(rest)


def command_of(name: str) -> Main:
    """A module's `main`; that of a package is where `python -m` finds it, too."""
    spec = importlib.util.find_spec(f"spmdrl.{name}")
    is_package = spec is not None and spec.submodule_search_locations is not None
    module = importlib.import_module(f"spmdrl.{name}.__main__" if is_package else f"spmdrl.{name}")
    found: Main = module.main
    return found


def overview() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: spmdrl COMMAND [ARGUMENT ...]",
            "",
            *lines,
            "",
            "spmdrl COMMAND --help explains one of them; `spmdrl train` and",
            "`python -m spmdrl.train` are the same.",
        ]
    )


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
    if name.endswith(".py"):
        return f"did you mean: spmdrl train {name}?"
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(COMMANDS)}"

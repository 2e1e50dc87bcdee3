"""What a process that makes environments must know of the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError, own_code
from spmdrl.envs.errors import explain

__all__ = ["end_with", "prepare", "python_path", "surroundings"]

_PR_SET_PDEATHSIG = 1


def python_path() -> str:
    """For PYTHONPATH, so that it finds this package before it is told anything."""
    return os.pathsep.join(folder for folder in sys.path if folder)


def surroundings() -> dict[str, Any]:
    """As JSON, for `prepare` on the other side."""
    # The kernel ends a process with the *thread* that started it: only one that lives as long as
    # this process will do.
    lasting = threading.current_thread() is threading.main_thread()
    return {
        "parent": os.getpid() if lasting else None,
        "path": sys.path,
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
        "config_files": own_code.executed(),
    }


def prepare(said: dict[str, Any]) -> None:
    """Find the same modules as the parent, and know what its config files define."""
    if said["parent"]:
        end_with(said["parent"])
    sys.path[:] = said["path"]
    if said["PYTHONPATH"] is None:  # programs that an environment starts get what the user set
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = said["PYTHONPATH"]
    for file in said["config_files"]:
        try:
            own_code.execute(Path(file))
        except Exception as error:  # of code that we do not know
            raise ConfigError(
                f"config file {file} failed in a worker process: {explain(error)}"
            ) from error


def end_with(parent: int) -> None:
    """Let the kernel end this process when the parent dies, also in a step that never returns."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)

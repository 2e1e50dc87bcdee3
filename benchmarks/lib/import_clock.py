"""Notes when and how long a process was busy with import statements, for compile.py.

Loaded as `sitecustomize` by every process of a run, so that the run itself stays the plain command.
Writes RANK.json into the folder that SPMDRL_IMPORT_CLOCK names; a process that mpirun did not start
writes alone.json.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import time
from typing import Any

SHORTEST_S = 1e-4  # a module that is loaded already takes less


class ImportClock:
    """Around the outermost import only: those within it are part of its time."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []  # when it ended, how long it took
        self._import, self._inside = builtins.__import__, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self._import(*args, **kwargs)
        self._inside = True
        start = time.perf_counter()
        try:
            return self._import(*args, **kwargs)
        finally:
            self._inside = False
            if (took := time.perf_counter() - start) > SHORTEST_S:
                self.spans.append((time.time(), took))


def seconds_before(spans: list[tuple[float, float]], moment: float) -> float:
    return sum(took for ended, took in spans if ended <= moment)


def install(folder: str) -> None:
    clock = ImportClock()
    builtins.__import__ = clock

    def write() -> None:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "alone")
        with open(os.path.join(folder, f"{rank}.json"), "w") as file:
            json.dump(clock.spans, file)

    atexit.register(write)


if os.environ.get("SPMDRL_IMPORT_CLOCK"):
    install(os.environ["SPMDRL_IMPORT_CLOCK"])

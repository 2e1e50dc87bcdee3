"""Several ranks for the benchmarks that are no training runs: who starts them, how one begins.

Nothing here imports jax before `become_rank` has made the settings that jax reads when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.common import ROOT
from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.parallel.topology import Topology, detect
from spmdrl.parallel.world import MpiWorld, World

__all__ = [
    "MeteredWorld",
    "Topology",
    "World",
    "answer_of_ranks",
    "become_rank",
    "prepare_process",
    "rank_command",
    "seconds_together",
]


class MeteredWorld(MpiWorld):
    """Counts the bytes of the arrays that a rank hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def gather_rows(self, array: Any, lengths: Any = None) -> Any:
        self.passed += array.nbytes
        return super().gather_rows(array, lengths)

    def broadcast(self, array: Any) -> Any:
        self.passed += array.nbytes
        return super().broadcast(array)


def become_rank() -> tuple[Topology, MeteredWorld]:
    topology = detect()
    prepare_process(topology, 1)
    return topology, MeteredWorld()


def seconds_together(world: World, call: Callable[[], Any]) -> float:
    """Until the last rank is done."""
    world.barrier()
    start = time.perf_counter()
    call()
    return float(world.table(np.array([time.perf_counter() - start])).max())


def rank_command(module: str, out: Path, *arguments: str) -> list[str]:
    """One rank. mpi4py ends all of them when one fails; by itself MPI would wait for ever."""
    return [sys.executable, "-m", "mpi4py", "-m", module, "--worker", str(out), *arguments]


def answer_of_ranks(ranks: int, module: str, *arguments: str, **env: str) -> Any:
    """Runs `module --worker FILE` on so many ranks of this machine; rank 0 writes JSON there."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-benchmark-") as folder:
        out = Path(folder) / "answer.json"
        command = [*mpirun_command(ranks), *rank_command(module, out, *arguments)]
        subprocess.run(command, cwd=ROOT, env=os.environ | env, check=True)
        return json.loads(out.read_text())

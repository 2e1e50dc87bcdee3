"""Training and other programs on hosts that only a network connects, all on this machine.

The hosts are the network namespaces of tests/cluster, so this needs root, iproute2 and util-linux.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.common import ROOT
from benchmarks.lib.trainer import TIMEOUT_S, Task, Timing, Trainer, read_metrics, read_timing
from tests.cluster.netns import NamespaceCluster
from tests.cluster.processes import MissingError

__all__ = ["NETWORKS", "Hosts"]

NETWORKS = {"unlimited": ("", 0.0), "1 Gbit/s, 0.5 ms": ("1gbit", 0.5)}


class Hosts:
    """n1, n2, ... with a core for each rank; with more hosts than cores they take turns."""

    def __init__(self, count: int, trainer: Trainer):
        self._trainer = trainer
        try:
            self._cluster = NamespaceCluster(count)
        except MissingError as reason:
            raise SystemExit(f"no namespaces here: {reason}") from reason
        self._cluster.env |= trainer.env
        # MPI cannot know that hosts share a core; a rank that waits must let the other one work.
        self._cluster.env["OMPI_MCA_mpi_yield_when_idle"] = "1"
        self.delay_by = "netem" if self._cluster.has_netem() else "a switch in user space"

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    def set_network(self, name: str) -> None:
        rate, delay_ms = NETWORKS[name]
        self._cluster.shape(rate, delay_ms)

    def run(self, program: Sequence[str], hosts: int, log: Path) -> None:
        """One rank of the program on each of the first `hosts` hosts, until it ends."""
        slots = {f"n{i + 1}": 1 for i in range(hosts)}
        command = self._cluster.mpirun(slots, [*self._pin(), *program])
        process = self._cluster.start(command, log, cwd=ROOT)
        try:
            if process.wait(TIMEOUT_S) != 0:
                raise RuntimeError(f"{' '.join(program)} failed:\n{log.read_text()[-3000:]}")
        finally:
            self._cluster.end_programs()

    def _pin(self) -> list[str]:
        cores = " ".join(str(core) for core in self._trainer.cores)
        script = f'c=({cores}); exec taskset -c "${{c[$((OMPI_COMM_WORLD_RANK % ${{#c[@]}}))]}}" '
        return ["bash", "-c", script + '"$@"', "pin"]

    def train(self, task: Task, hosts: int) -> Timing:
        run = self._trainer.new_run()
        self.run(task.arguments(hosts, run), hosts, run.with_suffix(".log"))
        return read_timing(read_metrics(run), task.skip)

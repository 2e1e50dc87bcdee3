"""Who am I, who started me, and what share of this machine is mine.

Ranks are started by mpirun, srun or `--nprocs`. Nothing here imports jax or MPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmdrl.config import Config

__all__ = [
    "CHILD_MARK",
    "TERMINAL_MARK",
    "LaunchError",
    "Topology",
    "all_gpus",
    "auto_ranks",
    "cores",
    "detect",
    "expand_tasks_per_node",
    "threads_per_rank",
]

CHILD_MARK = "SPMDRL_NPROCS"  # set for the ranks that --nprocs started
TERMINAL_MARK = "SPMDRL_TERMINAL"  # and whether their output goes to a terminal


class LaunchError(RuntimeError):
    """The launcher and the MPI library disagree about who takes part."""


@dataclass(frozen=True)
class Topology:
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"

    @property
    def is_root(self) -> bool:
        return self.rank == 0


# variable names of rank, size, local rank, local size; the first launcher that is there wins, so
# that mpirun inside a Slurm job is not taken for srun
_LAUNCHERS = {
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect(environ: Mapping[str, str] = os.environ) -> Topology:
    """The topology that the launcher's variables describe."""
    # srun --mpi=pmi2 sets PMI_* too; its own variables say more about the node
    by_mpi = "OMPI_COMM_WORLD_SIZE" in environ or "MPI_LOCALNRANKS" in environ
    if "SLURM_STEP_ID" in environ and not by_mpi:
        return _detect_srun(environ)
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if size in environ:
            return Topology(
                int(environ[rank]),
                int(environ[size]),
                int(environ.get(local_rank, 0)),
                int(environ.get(local_size, 1)),
                launcher,
            )
    return Topology()


def _detect_srun(environ: Mapping[str, str]) -> Topology:
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    node = int(environ.get("SLURM_NODEID", 0))
    return Topology(
        rank=int(environ["SLURM_PROCID"]),
        size=int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", 1))),
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        local_size=expand_tasks_per_node(tasks)[node],
        launcher="srun",
    )


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, repeat = part.partition("(x")
        counts += [int(number)] * (int(repeat.rstrip(")")) if repeat else 1)
    return counts


def cores() -> int:
    """Cores this process may use, which a batch system may have limited."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(topology: Topology) -> int:
    """Simulation threads of this rank: bound ranks see only their own cores."""
    total = os.cpu_count() or 1
    bound = cores() < total and topology.local_size > 1
    return max(1, cores() if bound else cores() // topology.local_size)


FEWEST_ENVS = 8  # per rank; with fewer its share of the work is mostly overhead


def auto_ranks(config: Config) -> int:
    """One rank for each core, where the environments can be shared out evenly; one with GPUs."""
    if all_gpus():
        return 1
    envs = config.env.num_envs
    fitting = [n for n in range(1, cores() + 1) if envs % n == 0 and envs // n >= FEWEST_ENVS]
    return max(fitting, default=1)


def all_gpus() -> list[str]:
    """The numbers of this machine's GPUs, as the driver lists them."""
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []

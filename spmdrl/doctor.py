"""What works on this machine, what does not, and the fix: `python -m spmdrl.doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.cli import answer_errors
from spmdrl.config import EXIT_FAULT
from spmdrl.options import parse
from spmdrl.parallel.spawn import find_mpirun, mpirun_command
from spmdrl.parallel.topology import cores, detect

__all__ = ["CHECKS", "main"]

ALLREDUCE = """
import jax.numpy as jnp, mpi4jax
from mpi4py import MPI
total = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM, comm=MPI.COMM_WORLD.Clone())
assert float(total[0]) == MPI.COMM_WORLD.Get_size() == 2, total
"""


class Problem(Exception):
    """Something does not work; the message says what to do about it."""


def python() -> str:
    import platform

    return f"Python {platform.python_version()}, {cores()} of {os.cpu_count()} cores usable"


def devices() -> str:
    import jax

    found = jax.devices()
    return f"jax {jax.__version__}, {len(found)} {found[0].platform} device(s)"


def envpool() -> str:
    import numpy as np

    from spmdrl.config import Config
    from spmdrl.envs import make_env

    env = make_env(Config(), range(4))
    env.reset()
    env.send(np.zeros(4, np.int32))
    if env.recv().obs.shape != (4, 4):
        raise Problem("envpool answers with wrong shapes; install the pinned version")
    return f"envpool {importlib.metadata.version('envpool')}, CartPole-v1 steps"


def launcher() -> str:
    topology = detect()
    if topology.size > 1:
        return f"rank {topology.rank} of {topology.size}, started by {topology.launcher}"
    return f"mpirun for --nprocs: {find_mpirun()}"


def mpi() -> str:
    script = "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])"
    done = _run([sys.executable, "-c", script])
    if done.returncode != 0:
        raise Problem(f"mpi4py does not load: {_last_line(done.stderr)}; load your MPI module")
    return done.stdout.strip().rstrip("\0").split(", package")[0]


def allreduce() -> str:
    start = time.perf_counter()
    done = _run([*mpirun_command(2), sys.executable, "-c", ALLREDUCE])
    if done.returncode != 0:
        raise Problem(
            f"a 2-rank allreduce fails: {_last_line(done.stderr)}; mpi4jax and mpirun must come "
            "from the same MPI, see docs/install.md"
        )
    return f"2-rank mpi4jax allreduce, {time.perf_counter() - start:.1f} s with start-up"


def disk() -> str:
    with tempfile.NamedTemporaryFile(dir=".") as file:
        data, start = os.urandom(1 << 24), time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        speed = len(data) / (time.perf_counter() - start) / 1e6
    return f"{Path.cwd()}: {speed:.0f} MB/s written and flushed"


def slurm() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return "not inside a Slurm job"
    nodes, tasks = os.environ.get("SLURM_JOB_NUM_NODES"), os.environ.get("SLURM_NTASKS")
    return f"job {job}: {nodes} node(s), {tasks} task(s); start ranks with srun --mpi=pmix"


CHECKS: dict[str, Callable[[], str]] = {
    "python": python,
    "devices": devices,
    "envpool": envpool,
    "launcher": launcher,
    "mpi": mpi,
    "allreduce": allreduce,
    "disk": disk,
    "slurm": slurm,
}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))
    }
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    except subprocess.TimeoutExpired:
        raise Problem(f"{command[0]} gave no answer for 120 s") from None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


@dataclass(frozen=True)
class Options:
    """Check this installation and suggest fixes.

    Checks Python, jax, envpool, the launcher, MPI, a 2-rank allreduce, the disk and Slurm.
    """


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parse(Options, "doctor", argv)
    broken = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name:<10} {check()}", flush=True)
        except Exception as error:  # the doctor reports everything
            broken += 1
            print(f"FAIL  {name:<10} {error}", flush=True)
    print("everything needed works" if not broken else f"{broken} problem(s)")
    return EXIT_FAULT if broken else 0


if __name__ == "__main__":
    sys.exit(main())

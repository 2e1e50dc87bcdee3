"""The settings of this process that must be in place before jax is imported.

Nothing here imports jax.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

from spmdrl.config import Config
from spmdrl.parallel.compile_cache import open_cache
from spmdrl.parallel.gpus import gpu_settings
from spmdrl.parallel.roles import learners_here, role_of
from spmdrl.parallel.topology import Topology, all_gpus, cores, threads_per_rank

__all__ = ["SAME_BITS_FLAG", "prepare_process", "prepare_run", "settings"]

# Whether a product and a sum become one rounding (FMA) depends on how XLA happens to fuse the
# program, which differs between topologies. Instruction sets before AVX2 do not have it.
SAME_BITS_FLAG = "--xla_cpu_max_isa=AVX"


def prepare_run(config: Config, topology: Topology) -> None:
    """`prepare_process` for this rank of a run, whatever its role."""
    acts = role_of(config, topology.rank) == "actor"
    if acts and "jax" not in sys.modules:
        # Its machine may have no accelerator, or one that the learner needs for itself.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    devices = 1 if acts else config.devices
    sequences = config.learns_from == "sequences"
    sharing = topology if acts else learners_here(config, topology)
    prepare_process(topology, devices, config.sync.deterministic, sequences, sharing)


def prepare_process(
    topology: Topology,
    devices: int,
    deterministic: bool = False,
    sequences: bool = False,
    sharing: Topology | None = None,
) -> None:
    """Set what XLA reads when jax is first imported; what the user has set stays.

    `sequences`: whether the run learns from whole sequences. `sharing` are those among which the
    accelerators are shared out, if not all of this machine's ranks.
    """
    if "jax" in sys.modules:
        return  # too late to change anything; the caller set it up (tests do)
    flags = os.environ.get("XLA_FLAGS", "")
    if devices > 1 and "host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={devices}"
    shared = topology.local_size > 1 and threads_per_rank(topology) == 1
    # One thread and several add up the gradients of a core in different orders, seen with up to 32
    # environments. Single steps do not notice, and keep their threads.
    same = deterministic and sequences
    if (shared or same) and "multi_thread_eigen" not in flags:
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
    os.environ.update(gpu_settings(sharing or topology, devices, os.environ, all_gpus()))
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


_SHOWN_VARIABLES = ("XLA_FLAGS", "NPROC", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
                    "XLA_PYTHON_CLIENT_MEM_FRACTION")  # fmt: skip


def settings(threads: int) -> str:
    """What holds for this process, for the log; each can be set in the environment instead."""
    shown = [f"{threads} simulation thread(s)", f"cores {_ranges(os.sched_getaffinity(0))}"]
    shown += [
        f"{name}={os.environ[name]}"
        for name in (*_SHOWN_VARIABLES, *_MALLOC_VARIABLES)
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

"""Which GPUs this rank takes, and how much of their memory.

jax reads both from the environment when it starts. Nothing here imports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from spmdrl.parallel.topology import LaunchError, Topology

__all__ = ["gpu_settings", "jax_drives_gpus"]

VISIBLE, FRACTION = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Each of them says that the user has thought about memory himself.
MEMORY = (FRACTION, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
          "XLA_PYTHON_CLIENT_ALLOCATOR")  # fmt: skip
# Of one GPU, for all ranks on it together; each has a CUDA context of its own beside it.
SHARED_MEMORY = 0.8
# srun's, where every task has been given its own GPUs already.
BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")


def jax_drives_gpus(environ: Mapping[str, str]) -> bool:
    """Whether jax will look for GPUs: many machines have some, and a jax for CPUs only."""
    if environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) is not None for name in plugins)


def gpu_settings(
    topology: Topology, devices: int, environ: Mapping[str, str], on_machine: Sequence[str]
) -> dict[str, str]:
    """The variables to set for this rank; `devices` is the config's, 0 for as many as there are.

    GPUs are named by number, by UUID (GPU-...) or as parts of one (MIG-...): any name will do.
    """
    ranks, listed = topology.local_size, environ.get(VISIBLE)
    names = _names(listed) if listed is not None else list(on_machine)
    if ranks == 1 or not names:
        return {}
    if _is_bound(topology, environ):
        return _memory(int(environ.get("SLURM_NTASKS_PER_GPU", 1)), environ)
    if max(devices, 1) * ranks <= len(names):
        share = devices or len(names) // ranks
        mine = names[topology.local_rank * share : (topology.local_rank + 1) * share]
        return {VISIBLE: ",".join(mine)}
    if devices > 1 and not jax_drives_gpus(environ):
        return {}  # its devices are parts of the processor
    if devices > 1:
        raise LaunchError(
            f"{ranks} ranks of {devices} GPUs each need {ranks * devices}, but "
            f"{VISIBLE if listed is not None else 'this machine'} has {len(names)}: "
            f"{','.join(names)}; start fewer ranks or lower --devices"
        )
    places = [rank * len(names) // ranks for rank in range(ranks)]
    mine_at = places[topology.local_rank]
    return {VISIBLE: names[mine_at]} | _memory(places.count(mine_at), environ)


def _names(listed: str) -> list[str]:
    """CUDA takes none after an empty or negative one."""
    names = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def _is_bound(topology: Topology, environ: Mapping[str, str]) -> bool:
    if topology.launcher != "srun":
        return False
    asked = [environ.get(name, "") for name in BOUND]
    return bool(asked[0] or "gpu" in asked[1] or environ.get("SLURM_NTASKS_PER_GPU"))


def _memory(sharers: int, environ: Mapping[str, str]) -> dict[str, str]:
    """By itself every rank would reserve three quarters, and the second on a GPU would fail."""
    if sharers == 1 or any(environ.get(name) for name in MEMORY):
        return {}
    return {FRACTION: f"{SHARED_MEMORY / sharers:.3f}"}

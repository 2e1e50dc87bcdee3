"""Placement on local devices; owns the name of the mesh axis.

Environments are split over the devices by id, everything else is on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdrl.config import ConfigError
from spmdrl.parallel.platforms import likes

__all__ = [
    "AXIS",
    "commit",
    "global_devices",
    "host_device",
    "join",
    "local_devices",
    "make_mesh",
    "on_device",
    "replicate",
]

AXIS = "env"


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def local_devices(count: int) -> list[jax.Device]:
    """The first `count` devices of this process; 0 takes one on CPU and all elsewhere."""
    available = jax.local_devices()
    if count == 0:
        return available if likes(jax.default_backend()).takes_all_devices else available[:1]
    if count > len(available):
        raise ConfigError(
            f"devices is {count}, but jax finds only {len(available)} {jax.default_backend()} "
            f"device(s) here; nearest: {len(available)}"
        )
    return available[:count]


def global_devices(count: int) -> list[jax.Device]:
    """`count` devices of every process, in order of rank."""
    mine = len(local_devices(count))
    of_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, []).append(device)
    return [device for rank in sorted(of_process) for device in of_process[rank][:mine]]


def host_device() -> jax.Device:
    """The processor, which is there beside any accelerator."""
    return jax.local_devices(backend="cpu")[0]


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The same values on every device; works for a mesh over several processes too."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if mesh.is_multi_process:
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree
        )
    return jax.device_put(tree, sharding)


def commit(tree: Any, mesh: Mesh) -> Any:
    """Replicated values of the type that a compiled program returns.

    Placed from the host they differ in type from the next update's, for which everything that
    reads them would be compiled once more.
    """
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)


def on_device(tree: Any, device: jax.Device) -> Any:
    """This device's own copy of a replicated tree, without moving anything."""

    def pick(x: Any) -> Any:
        if len(x.sharding.device_set) == 1:
            return x  # its shard is slow to find, and every update asks for every array
        for shard in x.addressable_shards:
            if shard.device == device:
                return shard.data
        raise ValueError(f"{device} holds no copy")

    return jax.tree.map(pick, tree)


def join(parts: Sequence[jax.Array], mesh: Mesh, axis: int) -> jax.Array:
    """One array over the mesh from a part on each local device, side by side along `axis`."""
    if mesh.size == 1:
        return parts[0]  # jit takes it as it is
    shape = list(parts[0].shape)
    shape[axis] *= mesh.size
    spec = PartitionSpec(*([None] * axis), AXIS)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))

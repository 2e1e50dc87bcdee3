"""Gather mode: every rank rolls out, rank 0 alone learns, and sends the parameters back.

What `mpi_util` users know; here to be compared with averaged gradients, and for algorithms whose
updates cannot be averaged. Ranks may have different numbers of environments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from spmdrl.parallel.guards import finite_inputs
from spmdrl.parallel.mesh import AXIS, on_device, replicate
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.world import World
from spmdrl.types import Report, Rollout, TrainState

__all__ = ["broadcast_tree", "gather_rollout", "gathered", "share_model"]

Update = Callable[[TrainState, Rollout, Array], tuple[TrainState, Report]]


def gathered(update: Update, world: World, mesh: Mesh) -> Update:
    """The given single-rank update on rank 0, with all ranks' rollouts."""
    devices = len(mesh.local_devices)

    def on_root(state: TrainState, rollout: Rollout, key: Array) -> tuple[TrainState, Report]:
        mine = jax.tree.map(np.asarray, rollout)
        sound = world.table(np.array(finite_inputs(mine, np), np.float64))
        whole = gather_rollout(world, mesh, mine)
        answer: dict[str, Any] = {}
        if world.is_root:
            state, report = update(state, whole, key)
            metrics = {k: np.asarray(v).tolist() for k, v in report.metrics.items()}
            gradient = np.asarray(report.nonfinite)[-1].tolist()
            answer = {"metrics": metrics, "gradient": gradient}
        else:
            state = state.replace(behind=state.next_behind())
        answer = world.broadcast_json(answer)
        metrics = {name: np.asarray(value) for name, value in answer["metrics"].items()}
        nonfinite = _blame(sound, np.asarray(answer["gradient"]), devices)
        return share_model(world, mesh, state), Report(metrics, nonfinite)

    return on_root


def _blame(sound: np.ndarray, gradient: np.ndarray, devices: int) -> np.ndarray:
    """`[kinds, devices of the run]`: whose rollout was not finite, and rank 0 for its gradients."""
    ranks, kinds = sound.shape
    nonfinite = np.zeros((kinds + 1, ranks * devices))
    nonfinite[:kinds, ::devices] = 1.0 - sound.T
    nonfinite[kinds, :devices] = gradient
    return nonfinite


def gather_rollout(world: World, mesh: Mesh, rollout: Rollout) -> Rollout:
    """All environments side by side on rank 0's devices; the other ranks' answer is unused."""

    def gather_field(spec: PartitionSpec, part: Any) -> Any:
        axis = list(spec).index(AXIS)

        def gather_leaf(x: Any) -> Any:
            rows = world.gather_rows(np.moveaxis(x, axis, 0))
            if rows is None:
                return x
            return jax.device_put(np.moveaxis(rows, 0, axis), NamedSharding(mesh, spec))

        return jax.tree.map(gather_leaf, part)

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(gather_field, rollout_specs(), rollout, is_leaf=is_spec)


def share_model(world: World, mesh: Mesh, state: TrainState) -> TrainState:
    """Rank 0's parameters and moments on every rank; only rank 0 needs the optimiser's state."""
    shared = (state.step, state.params, state.obs_moments)
    shared = broadcast_tree(world, on_device(shared, mesh.local_devices[0]))
    step, params, obs_moments = replicate(shared, mesh) if world.size > 1 else shared
    return state.replace(step=step, params=params, obs_moments=obs_moments)


def broadcast_tree(world: World, tree: Any) -> Any:
    """Rank 0's arrays, on every rank, as one message."""
    if world.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
    raw = [np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves]
    flat = world.broadcast(np.concatenate(raw))
    parts = np.split(flat, np.cumsum([len(r) for r in raw])[:-1])
    shaped = [p.view(x.dtype).reshape(x.shape) for p, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)

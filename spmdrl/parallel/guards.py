"""Checks that end a run: parameters that differ between ranks, numbers that are not finite."""

from __future__ import annotations

import collections
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from spmdrl.config import SyncConfig
from spmdrl.parallel.mesh import on_device
from spmdrl.parallel.world import World, name_ranks
from spmdrl.types import Rollout, TrainState

__all__ = [
    "KINDS",
    "GuardError",
    "NotFinite",
    "NotFiniteError",
    "OutOfSync",
    "assert_in_sync",
    "checksum",
    "finite_inputs",
    "minority",
]


class GuardError(RuntimeError):
    """What all ranks find out together; `ranks` are the guilty, of which the lowest reports it."""

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message)
        self.ranks = list(ranks)


class OutOfSync(GuardError):
    """The ranks' parameters differ, which averaging can never repair."""


class NotFiniteError(GuardError):
    """An observation, a reward, an output of the network or a gradient is not finite."""


# ---------------------------------------------------------------------------------------------
# The same bits everywhere


def checksum(state: TrainState, mesh: Mesh) -> list[int]:
    """A CRC over every bit of the state, one for each device of this rank."""
    return [_crc(on_device(state, device)) for device in mesh.local_devices]


def _crc(tree: Any) -> int:
    """On the host: compiling a sum of bits would hold up a run in its middle."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return found


def assert_in_sync(config: SyncConfig, state: TrainState, world: World, mesh: Mesh) -> None:
    """Raise OutOfSync, naming who differs, unless all devices of all ranks hold the same bits."""
    if world.size * len(mesh.local_devices) == 1:
        return
    if config.strategy == "gather":  # only rank 0 keeps the optimiser's state
        state = state.replace(opt_state=(), reward_moments=())
    sums = world.gather_json(checksum(state, mesh))
    found = {(rank, device): x for rank, row in enumerate(sums) for device, x in enumerate(row)}
    odd = minority(found)
    if odd:
        who = ", ".join(f"rank {rank} device {device}" for rank, device in odd)
        raise OutOfSync(
            f"parameters or optimiser state differ on {who}; memory or a library is faulty there. "
            "Start the same command again to resume from the last checkpoint",
            sorted({rank for rank, _ in odd}),
        )


Name = TypeVar("Name", bound=Hashable)


def minority(found: dict[Name, int]) -> list[Name]:
    """Who holds something else than most do; everybody where there is no majority."""
    common, votes = collections.Counter(found.values()).most_common(1)[0]
    if 2 * votes <= len(found):
        return list(found)
    return [name for name, value in found.items() if value != common]


# ---------------------------------------------------------------------------------------------
# Finite numbers

# In the order in which one causes the next: a bad observation makes bad outputs and gradients, and
# where sums travel, those of every rank.
KINDS = ("observation", "reward", "network output", "gradient")
_CHECK_ENV = "check what the environment returns"
_REMEDY = {
    "observation": _CHECK_ENV,
    "reward": _CHECK_ENV,
    "network output": "lower the learning rate",
    "gradient": "lower the learning rate",
}


def finite_inputs(rollout: Rollout, xp: Any) -> list[Any]:
    """Whether observations, rewards and network outputs are finite in the rollout's valid rows.

    In the order of KINDS; `xp` is numpy or jax.numpy. Looked at before anything of other ranks is
    mixed in, so that only those are named whose numbers they were.
    """

    def fine(arrays: Sequence[Any]) -> Any:
        rows = [xp.isfinite(x.reshape(*rollout.valid.shape, -1)).all(-1) for x in arrays]
        return (xp.stack(rows).all(0) | ~rollout.valid).all() if rows else xp.asarray(True)

    def floats(obs: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(obs) if np.issubdtype(x.dtype, np.floating)]

    # The value of what comes after the last step counts, unless the episode ended there.
    unused = ~rollout.valid[-1] | rollout.terminated[-1]
    last = [xp.isfinite(x.reshape(len(unused), -1)).all(-1) for x in floats(rollout.last_obs)]
    sound = (xp.stack(last).all(0) | unused).all() if last else xp.asarray(True)
    observed = fine(floats(rollout.obs)) & sound
    return [observed, fine([rollout.reward]), fine([rollout.log_prob, rollout.value])]


class NotFinite:
    """Ends the run, or counts the updates that skipped gradients, when numbers are not finite."""

    def __init__(self, config: SyncConfig, devices: int):
        """`devices` are those of one rank."""
        self._config, self._devices, self._in_a_row = config, devices, 0

    def check(self, bad: np.ndarray, step: int) -> None:
        """`bad[kind, device]` flags what each of the run's devices found, in the order of KINDS."""
        bad = np.asarray(bad)
        assert bad.ndim == 2, "a row for each kind"
        assert len(bad) == len(KINDS), "a row for each kind"
        if not bad.any():
            self._in_a_row = 0
            return
        self._in_a_row += 1
        first = int(bad.any(axis=1).argmax())  # later kinds are its consequences
        what, ranks = KINDS[first], self._ranks(bad[first])
        found = f"non-finite {what} on {name_ranks(ranks)} in update {step}"
        if self._config.on_nonfinite == "stop":
            raise NotFiniteError(
                f"{found}; that step was not applied. To fix it, {_REMEDY[what]}, or skip such "
                "gradients with --sync.on-nonfinite skip",
                ranks,
            )
        if self._in_a_row >= self._config.max_skips:
            raise NotFiniteError(
                f"{found}, the last of {self._in_a_row} in a row (--sync.max-skips); "
                f"{_REMEDY[what]}",
                ranks,
            )

    def _ranks(self, flags: np.ndarray) -> list[int]:
        return sorted({int(device) // self._devices for device in np.flatnonzero(flags)})

"""The actions since the environments were made, by which a resumed run brings them back.

Simulators cannot save their state, so their actions are kept and repeated instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spmdrl.trees import CheckpointError, from_named
from spmdrl.types import ActionSpace

__all__ = ["ActionLog", "replay", "saved_states"]


class ActionLog:
    """One entry per rollout, `[B, T, ...]`, until a checkpoint takes them."""

    def __init__(self, num_envs: int, wanted: bool):
        self._num_envs, self._wanted = num_envs, wanted
        self._entries: list[np.ndarray] = []

    def add(self, space: ActionSpace, parts: Sequence[np.ndarray]) -> None:
        """The actions `[T, b, ...]` of each device's environments."""
        if not self._wanted:
            return
        actions = np.concatenate(parts, axis=1).swapaxes(0, 1)
        if space.kind != "box" and max(space.nvec) <= 256:
            actions = actions.astype(np.uint8)
        self._entries.append(actions)

    def take(self, keep_last: bool) -> np.ndarray:
        """`[B, steps, ...]` since the last call; `keep_last` leaves the newest rollout."""
        count = len(self._entries) - keep_last
        taken, self._entries = self._entries[:count], self._entries[count:]
        if not taken:
            return np.empty((self._num_envs, 0), np.uint8)
        # In C order: safetensors writes the memory as it lies.
        return np.ascontiguousarray(np.concatenate(taken, axis=1))


def replay(actors: Sequence[Any], actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
    """Bring new environments to where the old ones were; `named` says where that was."""
    for actor, rows, state in saved_states(actors, named):
        obs = actor.state.obs
        for t in range(actions.shape[1]):
            obs = actor.step(_widened(actions[rows, t]))
        if not _same(obs, state.obs):
            raise CheckpointError(
                "replaying the saved actions did not reproduce the saved observation; is the "
                "environment deterministic? --checkpoint.envs fresh resumes with new episodes"
            )
        actor.place(state)


def saved_states(
    actors: Sequence[Any], named: dict[str, np.ndarray]
) -> Iterator[tuple[Any, slice, Any]]:
    """Each actor with its rows and its saved state."""
    start = 0
    for actor in actors:
        rows = slice(start, start + actor.num_envs)
        start = rows.stop
        yield actor, rows, from_named(actor.state, {k: v[rows] for k, v in named.items()})


def _same(found: Any, saved: Any) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True)
    )


def _widened(actions: np.ndarray) -> np.ndarray:
    """Stored actions as a policy gives them."""
    return actions.astype(np.int32) if actions.dtype == np.uint8 else actions

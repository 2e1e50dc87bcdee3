"""Where a learner's rollouts come from: its own environments, or ranks that only act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spmdrl.types import Array, EnvSpec, Obs, Rollout, TrainState

__all__ = ["Episodes", "Source", "episodes_of"]


@dataclass(frozen=True)
class Episodes:
    """Games that ended in one rollout, in order of time and then of environment id."""

    step: np.ndarray
    env_id: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


def episodes_of(ids: Sequence[int], ended: Mapping[str, np.ndarray]) -> Episodes:
    """From `[T, B]` arrays: where a game was over, and its return and length so far."""
    t, b = np.nonzero(ended["over"])
    returns, lengths = ended["return"][t, b], ended["length"][t, b].astype(np.int64)
    return Episodes(t, np.asarray(ids)[b], returns, lengths)


class Source:
    """What the training loop needs of the environments of one rank, wherever they are."""

    phase: ClassVar[str]  # what this rank does until the rollout is there
    ids: range
    spec: EnvSpec
    watch: Any  # seconds by name, to be read
    stop_asked = False  # by a rank that cannot say so itself when the ranks meet

    @property
    def description(self) -> str:
        """How rollouts are made, for the log."""
        raise NotImplementedError

    @property
    def saves_envs(self) -> bool:
        """Whether `named_state` holds the environments too, so that nothing has to be replayed."""
        raise NotImplementedError

    @property
    def first_obs(self) -> Obs:
        """An observation of one environment."""
        raise NotImplementedError

    def begin(self, state: TrainState, step: int, over: bool) -> None:
        """The first update is about to come, with this state; `over`: none is left."""

    def collect(self, state: TrainState, key: Array) -> tuple[Rollout, Episodes]:
        """T steps of every environment with the given parameters."""
        raise NotImplementedError

    def collect_ahead(self, state: TrainState, key: Array) -> None:
        """Let the next `collect` find its rollout done; checkpoints keep what was before it."""
        raise NotImplementedError

    def publish(self, state: TrainState, stopping: bool, last: bool) -> None:
        """An update is done; `stopping` or `last`: no other follows."""

    def renew(self, generation: int) -> None:
        """Make all environments anew; episodes under way are cut."""
        raise NotImplementedError

    def named_state(self) -> dict[str, np.ndarray]:
        """Where the environments are, by name, with the environments along the first axis."""
        raise NotImplementedError

    def take_actions(self) -> np.ndarray:
        """`[B, steps, ...]` actions since the last call, or since the environments were made."""
        raise NotImplementedError

    def replay(self, actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
        """Bring new environments to where the old ones were; `named` says where that was."""
        raise NotImplementedError

    def place(self, named: dict[str, np.ndarray]) -> None:
        """Take up what `named_state` gave, the environments included."""
        raise NotImplementedError

    def hint(self) -> str:
        """What would make rollouts faster, or nothing."""
        return ""

    def waits_for(self) -> str:
        """Whom this rank waits for at this moment, or nothing."""
        return ""

    def blame(self) -> str:
        """Whose environments gave the last rollout's numbers that are not finite, or nothing."""
        return ""

    def row(self, seconds: float) -> dict[str, float]:
        """Metrics of the last so many seconds, since the last row."""
        return {}

    def advice(self) -> str:
        """What would have made the run faster, at its end."""
        return ""

    def close(self) -> None:
        """The run is over."""
        raise NotImplementedError

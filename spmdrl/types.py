"""The pytrees that cross the seams between modules.

Arrays are time-major, `[T, B, ...]`: T steps of B environments. Images stay uint8. Observations are
one array, or a flat dict of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int, Shaped

if TYPE_CHECKING:
    Array = Any  # the same trees hold jax arrays, numpy arrays and partition specs
else:
    Array = jax.Array | np.ndarray

__all__ = [
    "LAST_ACTION", "LAST_REWARD", "MASK", "ActionSpace", "Array", "Carry", "Column", "EnvSpec",
    "Moments", "Obs", "ObsPart", "Params", "PartKind", "Report", "Rollout", "TimeStep",
    "TrainState", "Tree", "channels_first", "sides",
]  # fmt: skip

Obs = Any  # an array, or a flat dict of arrays, with the environments along the same axis
Params = Any  # the dict of arrays that a Flax module calls its parameters
Carry = Any  # recurrent state of a policy; () for a feed-forward one


@dataclass(frozen=True)
class ActionSpace:
    """What a policy chooses, and what the environment makes of it."""

    kind: Literal["discrete", "multi_discrete", "box"]
    shape: tuple[int, ...]  # of one action of the policy
    dtype: np.dtype  # in the environment
    nvec: tuple[int, ...] = ()  # choices of each discrete component
    start: np.ndarray | int = 0  # first valid choice of each component
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    joint: tuple[int, ...] = ()  # the single choice stands for all combinations of these
    env_shape: tuple[int, ...] | None = None  # where the environment wants another shape


PartKind = Literal["vector", "image", "ids", "mask", "history"]
MASK = "action_mask"  # name of the part that says which actions are allowed
LAST_ACTION, LAST_REWARD = "last_action", "last_reward"  # of the parts that tell what was before


class Column(NamedTuple):
    """Where a joined vector has which leaf of the environment's observation."""

    name: str
    width: int
    how: str  # what was made of it, for the log


@dataclass(frozen=True)
class ObsPart:
    """One array of an environment's observation."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: PartKind | Literal[""] = ""  # by default an image if it looks like one, else a vector
    # Of ids, how many there are: one number for all, or one for each entry of the last axis.
    values: tuple[int, ...] = ()
    columns: tuple[Column, ...] = field(default=(), compare=False)  # of a joined vector

    def __post_init__(self) -> None:
        if not self.kind:
            is_image = len(self.shape) == 3 and self.dtype == np.uint8
            object.__setattr__(self, "kind", "image" if is_image else "vector")

    @property
    def is_image(self) -> bool:
        return self.kind == "image"

    @property
    def is_grid(self) -> bool:
        """Ids on a plane, one or several in each cell."""
        if self.kind != "ids" or len(self.shape) not in (2, 3):
            return False
        return min(sides(self.shape)) >= 3


def channels_first(shape: tuple[int, ...]) -> bool:
    """Of an array with three axes: the two equal ones are the plane, else the larger ones."""
    if len(shape) == 2 or (shape[0] == shape[1] != shape[2]):
        return False
    return shape[1] == shape[2] != shape[0] or shape[0] < shape[2]


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of an image or a grid."""
    return shape[1:] if channels_first(shape) else shape[:2]  # type: ignore[return-value]


@dataclass(frozen=True)
class EnvSpec:
    """What one environment shows, one array or several by name, and what it accepts."""

    obs: ObsPart | Mapping[str, ObsPart]
    action: ActionSpace
    left_out: tuple[str, ...] = ()  # leaves of the observation that no network sees

    @property
    def parts(self) -> dict[str, ObsPart]:
        """The arrays by name; a single one has no name."""
        return {"": self.obs} if isinstance(self.obs, ObsPart) else dict(self.obs)

    @property
    def has_image(self) -> bool:
        return any(part.is_image or part.is_grid for part in self.parts.values())

    def zeros(self, *rows: int) -> Obs:
        """Observations of as many rows that show nothing."""

        def blank(part: ObsPart) -> np.ndarray:
            return np.zeros((*rows, *part.shape), part.dtype)

        if isinstance(self.obs, ObsPart):
            return blank(self.obs)
        return {name: blank(part) for name, part in self.obs.items()}


class Tree(struct.PyTreeNode):
    """The fields' shapes are not checked when one is made, as those of arguments are in tests.

    jax also makes trees of partition specs, of None, and of rows that it has stacked.
    """

    __no_type_check__ = True


class TimeStep(Tree):
    """What B environments answer to one action each.

    `reward` is raw and `episode_over` is the end of a game, which with `episodic_life` is later
    than `terminated`.
    """

    obs: Obs
    reward: Float[Array, "B"]
    terminated: Bool[Array, "B"]
    truncated: Bool[Array, "B"]
    episode_over: Bool[Array, "B"]


class Rollout(Tree):
    """T steps of B environments, with the policy's log-probabilities and values.

    The row after `terminated | truncated` is the environment's automatic reset: it holds the true
    final observation, its action was ignored and `valid` is False there.
    """

    obs: Obs
    first: Bool[Array, "T B"]  # obs starts an episode: a recurrent policy forgets here
    action: Shaped[Array, "T B ..."]
    log_prob: Float[Array, "T B"]
    value: Float[Array, "T B"]
    reward: Float[Array, "T B"]  # transformed, not yet normalised
    discounted_return: Float[Array, "T B"]  # sum of past discounted rewards of this episode
    terminated: Bool[Array, "T B"]
    truncated: Bool[Array, "T B"]
    valid: Bool[Array, "T B"]
    last_obs: Obs  # the observation after the last step
    last_first: Bool[Array, "B"]
    carry: Carry  # of the policy before the first step
    last_carry: Carry  # and after the last one
    env_ids: Int[Array, "B"]


class Moments(Tree):
    """Count, mean and sum of squared deviations of everything seen so far."""

    count: Float[Array, ""]
    mean: Float[Array, ...]
    m2: Float[Array, ...]


class TrainState(Tree):
    """Everything the learner carries from one update to the next."""

    step: Int[Array, ""]  # updates done
    params: Params
    opt_state: Any
    obs_moments: Any  # Moments, or those of each vector by name
    reward_moments: Moments
    # The models (params, obs_moments) of the last `lag` updates, oldest first; at the start of a
    # run all of them are the first one.
    behind: tuple[Any, ...] = ()

    def acting(self) -> TrainState:
        """As the actors see it: with the model that collects the rollout of update `step`."""
        if not self.behind:
            return self
        params, obs_moments = self.behind[0]
        return self.replace(params=params, obs_moments=obs_moments)

    def next_behind(self) -> tuple[Any, ...]:
        """`behind` after the next update: this model joins, the oldest leaves."""
        return (*self.behind, (self.params, self.obs_moments))[1:]


class Report(NamedTuple):
    """What an update says about itself."""

    metrics: dict[str, Any]
    nonfinite: Any  # [kinds, devices of the run], above 0 where a number was not finite

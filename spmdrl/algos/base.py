"""What an algorithm is: a frozen set of pure functions, from a rollout to the loss of a minibatch.

Everything is a sum over rows, so that it can be added over chunks, shards, devices and ranks, and
one division by the number of valid rows gives the gradient of the whole minibatch. The settings of
an algorithm are a subclass of `AlgoConfig` whose `make` returns an `Algorithm`; see `ppo.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxtyping import Bool, Float, Int, Shaped

from spmdrl.lazy import Array, jax, jnp

if TYPE_CHECKING:
    from spmdrl.nets.distributions import Distribution
    from spmdrl.nets.policy import Policy
    from spmdrl.types import Rollout
else:
    Distribution = Policy = Rollout = Any  # their modules load jax: see `spmdrl.lazy`

__all__ = [
    "Algorithm", "ByMinibatch", "Distribution", "Minibatch", "Models", "Moment", "Outputs",
    "Reports", "Rollout", "mask_rows", "masked", "scheduled", "valid_sum",
]  # fmt: skip

Reports = dict[str, Float[Array, ""]]
# `[T, B, ...]` rows as `[gradients of the update, rows of one, ...]`
ByMinibatch = Callable[[Shaped[Array, "T B ..."]], Shaped[Array, "G N ..."]]


class Models(NamedTuple):
    """The network, as it is now and as it was when it collected the rollout."""

    policy: Policy
    variables: Any
    behaviour: Any


class Moment(NamedTuple):
    """Where in the run a gradient is taken."""

    index: Int[Array, ""]  # of the gradient in its update, from 0
    left: Float[Array, ""]  # share of the run that is left, from 1 to 0: for schedules


class Outputs(NamedTuple):
    """What the network says about a minibatch: `[N, ...]`, or `[T, b, ...]` for sequences."""

    dist_params: Float[Array, "*rows _"]
    value: Float[Array, "*rows"]
    last_value: Any = ()  # `[b]`, of the observation after the last step, if the loss bootstraps


class Minibatch(NamedTuple):
    """Rows of a rollout: `[N, ...]` single steps, or `[T, b, ...]` whole environments."""

    obs: Any
    first: Bool[Array, "*rows"]
    action: Shaped[Array, "*rows ..."]
    log_prob: Float[Array, "*rows"]  # by the policy that acted
    value: Float[Array, "*rows"]  # by the policy that acted
    reward: Float[Array, "*rows"]
    terminated: Bool[Array, "*rows"]
    truncated: Bool[Array, "*rows"]
    weight: Float[Array, "*rows"]  # 1, or 0 for an automatic reset
    targets: Any  # what `prepare` made of these rows


def no_sums(rollout: Rollout, targets: Any, by_minibatch: ByMinibatch) -> dict[str, Any]:
    return {}


def no_constants(sums: Any, moment: Moment) -> tuple[()]:
    return ()


def no_summary(sums: Any) -> Reports:
    return {}


@dataclass(frozen=True)
class Algorithm:
    """The pure functions of a learning rule, in the order in which an update calls them."""

    prepare: Callable[[Models, Rollout], Any]
    """Targets of some environments' rows, `[T, B, ...]` in every leaf. Rewards are normalised."""
    loss: Callable[[Distribution, Any, Outputs, Minibatch], tuple[Float[Array, ""], Reports]]
    """Sum of the loss over a minibatch's valid rows, and the sums of what is reported."""
    reports: tuple[str, ...]
    """Names of what `loss` reports; their means over the valid rows become metrics."""
    sums: Callable[[Rollout, Any, ByMinibatch], Any] = no_sums
    """What must be added over all rows of the run before the first minibatch."""
    constants: Callable[[Any, Moment], Any] = no_constants
    """What one minibatch's loss needs of those sums and of the time: its second argument."""
    stop: Callable[[Reports, Bool[Array, ""]], Bool[Array, ""]] | None = None
    """Whether to leave out the rest of this update's gradients, by the last minibatch's reports
    and whether it ended an epoch."""
    summary: Callable[[Any], Reports] = no_summary
    """Metrics of the whole update, from `sums`."""
    bootstraps: bool = False
    """Whether `loss` makes returns of the network's own values, of minibatches of whole
    environments: then it is given those after a time limit and after the last step too."""
    reduce: Literal["mean", "sum"] = "mean"
    """Whether the step is along the gradient of the mean or of the sum over valid rows."""


# ---------------------------------------------------------------------------------------------
# What several algorithms need


def scheduled(value: float, schedule: str, left: Float[Array, ""]) -> Float[Array, ""]:
    """The value now; `linear` and `cosine` reach 0 at the end of the run."""
    if schedule == "linear":
        return value * left
    if schedule == "cosine":
        return value * 0.5 * (1.0 + jnp.cos(jnp.pi * (1.0 - left)))
    return jnp.asarray(value, jnp.float32)


def mask_rows(
    weight: Float[Array, "*rows"], x: Shaped[Array, "*rows ..."]
) -> Shaped[Array, "*rows ..."]:
    """Zero in rows of no weight.

    Before anything is computed from them: a NaN there would pass through the gradient of a later
    `where`, as 0 times NaN.
    """
    kept = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim)) > 0
    return jnp.where(kept, x, jnp.zeros_like(x))


def valid_sum(weight: Float[Array, "*rows"], x: Float[Array, "*rows"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(weight > 0, x, 0.0))


def masked(weight: Float[Array, "*rows"], tree: Any) -> Any:
    """`mask_rows` of every array in the tree."""
    return jax.tree.map(lambda x: mask_rows(weight, x), tree)

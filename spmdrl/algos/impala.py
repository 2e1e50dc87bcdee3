"""IMPALA (Espeholt et al. 2018): actor-critic with V-trace inside the loss.

Ratios, values and targets are those of the present parameters, from the same forward pass as the
gradient. So a minibatch is whole environments, and a rollout is learned from once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from jaxtyping import Float

from spmdrl.algos.base import (
    Algorithm,
    Distribution,
    Minibatch,
    Models,
    Moment,
    Outputs,
    Reports,
    Rollout,
    masked,
    scheduled,
    valid_sum,
)
from spmdrl.algos.vtrace import METRICS, Clips, vtrace
from spmdrl.config.rules import Count, NonNegative, Positive, Range, Share
from spmdrl.config.schema import AlgoConfig
from spmdrl.lazy import Array, jax, jnp

__all__ = ["Constants", "Impala", "Targets", "constants", "loss", "prepare"]

REPORTS = ("loss/policy", "loss/value", "loss/entropy", "vtrace/rho_mean", "vtrace/clipped")
ONCE = Range("1: impala learns once from a rollout; appo takes several epochs", lambda x: x == 1)


@dataclass(frozen=True)
class Impala(AlgoConfig):
    num_steps: Count = 32
    """Steps per environment in one rollout."""
    epochs: Annotated[int, ONCE] = 1
    """Passes over each rollout; always 1."""
    gae_lambda: Share = 1.0
    """Lambda of V-trace; 1 in the paper."""
    rho_clip: Positive = 1.0
    """Bound of the probability ratio that weighs an error of the values."""
    c_clip: Positive = 1.0
    """Bound of the ratio that weighs the errors after it."""
    pg_rho_clip: Positive = 1.0
    """Bound of the ratio in the policy gradient."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    entropy_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine go to 0 at the end of the run."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    reduce: Literal["mean", "sum"] = "mean"
    """Gradient of the mean over a minibatch's rows, or of their sum, as the first IMPALA had it:
    its learning rate, epsilon and clipping only transfer with sum."""

    selects: ClassVar[Literal["steps", "sequences"]] = "sequences"
    corrects_lag: ClassVar[bool] = True
    panel: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("vtrace/rho_mean", "ratio", ".3f"),
        ("vtrace/clipped", "clipped", ".1%"),
        ("loss/entropy", "entropy", ".2f"),
        ("loss/value", "value loss", ".3f"),
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = (("vtrace/rho_mean", "mean ratio"),)
    metrics: ClassVar[tuple[tuple[str, str], ...]] = METRICS

    def make(self) -> Algorithm:
        return Algorithm(
            prepare=prepare,
            constants=partial(constants, self),
            loss=partial(loss, self),
            reports=REPORTS,
            bootstraps=True,
            reduce=self.reduce,
        )


class Targets(NamedTuple):
    reward: Float[Array, "T B"]  # normalised


class Constants(NamedTuple):
    entropy_coef: Float[Array, ""]


def prepare(models: Models, rollout: Rollout) -> Targets:
    return Targets(rollout.reward)


def constants(impala: Impala, _: Any, moment: Moment) -> Constants:
    return Constants(scheduled(impala.entropy_coef, impala.entropy_schedule, moment.left))


def loss(
    impala: Impala, dist: Distribution, now: Constants, outputs: Outputs, rows: Minibatch
) -> tuple[Float[Array, ""], Reports]:
    """Policy gradient, squared value error and entropy bonus, towards what V-trace says."""
    # Before they are masked: a reset row's value is the one after a time limit.
    v_tm1, v_last = jax.lax.stop_gradient((outputs.value, outputs.last_value))
    outputs, rows = masked(rows.weight, (outputs._replace(last_value=()), rows))
    log_prob = dist.log_prob(outputs.dist_params, rows.action)
    log_rho = jax.lax.stop_gradient(log_prob - rows.log_prob)
    found = vtrace(
        rows.targets.reward,
        impala.gamma * (1.0 - rows.terminated.astype(jnp.float32)),
        rows.weight > 0,
        v_tm1,
        v_last,
        log_rho,
        impala.gae_lambda,
        Clips(impala.rho_clip, impala.c_clip, impala.pg_rho_clip),
    )
    target, advantage = masked(rows.weight, found)
    terms = {
        "loss/policy": -log_prob * advantage,
        "loss/value": 0.5 * (outputs.value - target) ** 2,
        "loss/entropy": dist.entropy(outputs.dist_params),
        "vtrace/rho_mean": jnp.exp(log_rho),
        "vtrace/clipped": (jnp.exp(log_rho) > impala.rho_clip).astype(jnp.float32),
    }
    total = {name: valid_sum(rows.weight, term) for name, term in terms.items()}
    bonus = now.entropy_coef * total["loss/entropy"]
    return total["loss/policy"] + impala.value_coef * total["loss/value"] - bonus, total

"""Asynchronous PPO: V-trace once per update, then PPO's clip around the policy of its start.

So the clip bounds what an update changes, whoever collected the rollout.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Float

from spmdrl.algos import ppo
from spmdrl.algos.base import (
    Algorithm,
    ByMinibatch,
    Distribution,
    Minibatch,
    Models,
    Outputs,
    Reports,
    Rollout,
)
from spmdrl.algos.ppo import Ppo
from spmdrl.algos.vtrace import METRICS, Clips, vtrace
from spmdrl.config.rules import Positive
from spmdrl.lazy import Array, jnp

__all__ = ["Appo", "Targets", "loss", "prepare", "summary", "sums"]


@dataclass(frozen=True)
class Appo(Ppo):
    rho_clip: Positive = 1.0
    """Bound of the probability ratio that weighs an error of the values."""
    c_clip: Positive = 1.0
    """Bound of the ratio that weighs the errors after it."""
    pg_rho_clip: Positive = 1.0
    """Bound of the ratio that weighs an advantage."""
    reduce: Literal["mean", "sum"] = "mean"
    """Gradient of the mean over a minibatch's rows, or of their sum."""

    corrects_lag: ClassVar[bool] = True
    metrics: ClassVar[tuple[tuple[str, str], ...]] = (*Ppo.metrics, *METRICS)

    def make(self) -> Algorithm:
        return dataclasses.replace(
            super().make(),
            prepare=partial(prepare, self),
            sums=partial(sums, self),
            loss=partial(loss, self),
            summary=summary,
            reduce=self.reduce,
        )


class Targets(NamedTuple):
    advantage: Float[Array, "T B"]
    value: Float[Array, "T B"]
    old_log_prob: Float[Array, "T B"]  # these two by the parameters with which the update begins
    old_value: Float[Array, "T B"]
    rho: Float[Array, "T B"]


def prepare(appo: Appo, models: Models, rollout: Rollout) -> Targets:
    """What the present policy and values say of the rollout, in one forward pass."""
    policy, variables = models.policy, models.variables
    carry, dist_params, value = policy.unroll(variables, rollout.carry, rollout.obs, rollout.first)
    _, _, v_last = policy.apply(variables, carry, rollout.last_obs, rollout.last_first)
    log_prob = policy.dist.log_prob(dist_params, rollout.action)
    log_rho = log_prob - rollout.log_prob
    target, advantage = vtrace(
        rollout.reward,
        appo.gamma * (1.0 - rollout.terminated.astype(jnp.float32)),
        rollout.valid,
        value,
        v_last,
        log_rho,
        appo.gae_lambda,
        Clips(appo.rho_clip, appo.c_clip, appo.pg_rho_clip),
    )
    return Targets(advantage, target, log_prob, value, jnp.exp(log_rho))


def sums(appo: Appo, rollout: Rollout, targets: Targets, by_minibatch: ByMinibatch) -> Any:
    """PPO's, and what says how far the two policies are apart."""
    known = rollout.replace(value=targets.old_value)
    found = ppo.sums(appo, known, ppo.Targets(targets.advantage, targets.value), by_minibatch)
    rho = jnp.where(rollout.valid, targets.rho, 0.0)
    ratios = [rollout.valid.astype(jnp.float32), rho, (rho > appo.rho_clip).astype(jnp.float32)]
    return found | {"ratios": jnp.stack([x.sum() for x in ratios])}


def summary(total: Any) -> Reports:
    count, rho, clipped = total["ratios"]
    count = jnp.maximum(count, 1.0)
    return ppo.summary(total) | {"vtrace/rho_mean": rho / count, "vtrace/clipped": clipped / count}


def loss(
    appo: Appo, dist: Distribution, now: ppo.Constants, outputs: Outputs, rows: Minibatch
) -> tuple[Float[Array, ""], Reports]:
    """PPO's, with the update's first parameters in the place of those that acted."""
    old = rows.targets
    rows = rows._replace(
        log_prob=old.old_log_prob,
        value=old.old_value,
        targets=ppo.Targets(old.advantage, old.value),
    )
    return ppo.loss(appo, dist, now, outputs, rows)

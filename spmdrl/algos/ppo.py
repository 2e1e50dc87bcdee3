"""Proximal policy optimisation (Schulman et al. 2017), from its settings to its loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple

from jaxtyping import Bool, Float

from spmdrl.algos.base import (
    Algorithm,
    ByMinibatch,
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
from spmdrl.algos.returns import fold_discounts, gae
from spmdrl.config.rules import NonNegative, Positive, Range, Share
from spmdrl.config.schema import AlgoConfig
from spmdrl.lazy import Array, jnp

__all__ = ["Constants", "Ppo", "Targets", "constants", "loss", "prepare", "sums"]

REPORTS = ("loss/policy", "loss/value", "loss/entropy", "ppo/approx_kl", "ppo/clip_frac")


@dataclass(frozen=True)
class Ppo(AlgoConfig):
    gae_lambda: Share = 0.95
    """Generalised advantage estimation's lambda."""
    clip_eps: Positive = 0.2
    """Bound of the probability ratio."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """linear goes to 0 at the end of the run."""
    clip_value: bool = True
    """Clip the value update by clip_eps too."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    entropy_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine go to 0 at the end of the run."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    normalize_advantage: Literal["none", "minibatch", "batch"] = "minibatch"
    """Over which rows advantages are centred and scaled."""
    target_kl: Annotated[float | None, Range("above 0", lambda x: x is None or x > 0)] = None
    """Stop the passes over a rollout when the approximate KL exceeds this."""

    panel: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("ppo/approx_kl", "kl", ".4f"),
        ("ppo/clip_frac", "clipped", ".1%"),
        ("loss/entropy", "entropy", ".2f"),
        ("ppo/explained_variance", "explained variance", ".2f"),
    )
    plots: ClassVar[tuple[tuple[str, str], ...]] = (("ppo/approx_kl", "approximate KL"),)
    metrics: ClassVar[tuple[tuple[str, str], ...]] = (
        ("ppo/approx_kl", "KL divergence from the policy before, ratio - 1 - log ratio"),
        ("ppo/clip_frac", "share of rows whose ratio is further than `clip_eps` from 1"),
        ("ppo/explained_variance", "share of the returns' variance that the values explain"),
    )

    def make(self) -> Algorithm:
        return Algorithm(
            prepare=partial(prepare, self),
            sums=partial(sums, self),
            constants=partial(constants, self),
            loss=partial(loss, self),
            reports=REPORTS,
            stop=None if self.target_kl is None else partial(stop, self.target_kl),
            summary=summary,
        )


# ---------------------------------------------------------------------------------------------
# Once per update: advantages, and what is summed over all of them


Sums = dict[str, Float[Array, "..."]]  # powers [sets, 3] and fit [5]


class Targets(NamedTuple):
    advantage: Float[Array, "T B"]
    value: Float[Array, "T B"]


def prepare(ppo: Ppo, models: Models, rollout: Rollout) -> Targets:
    """Advantages by the values of the policy that acted."""
    discount_t, trace_t = fold_discounts(
        rollout.terminated, rollout.truncated, ppo.gamma, ppo.gae_lambda
    )
    _, _, v_last = models.policy.apply(
        models.behaviour, rollout.last_carry, rollout.last_obs, rollout.last_first
    )
    advantage = gae(rollout.reward, discount_t, trace_t, rollout.value, v_last)
    return Targets(advantage, advantage + rollout.value)


def sums(ppo: Ppo, rollout: Rollout, targets: Targets, by_minibatch: ByMinibatch) -> Sums:
    """Count, sum and sum of squares of the advantages, for each set that is normalised together;
    and what explained variance needs."""
    weight = rollout.valid.astype(jnp.float32)
    advantage = jnp.where(rollout.valid, targets.advantage, 0.0)
    powers = jnp.stack([weight, advantage, advantage**2], axis=-1)
    if ppo.normalize_advantage == "minibatch":
        powers = by_minibatch(powers).sum(1)
    else:
        powers = powers.sum((0, 1))[None]
    return {"powers": powers, "fit": fit_sums(rollout, targets)}


def fit_sums(rollout: Rollout, targets: Targets) -> Float[Array, "5"]:
    """Count and power sums of the targets and of the old values' errors."""
    target = jnp.where(rollout.valid, targets.value, 0.0)
    error = jnp.where(rollout.valid, targets.value - rollout.value, 0.0)
    terms = [rollout.valid.astype(jnp.float32), target, target**2, error, error**2]
    return jnp.stack([x.sum() for x in terms])


def summary(total: Sums) -> Reports:
    return {"ppo/explained_variance": explained_variance(total["fit"])}


def explained_variance(fit: Float[Array, "5"]) -> Float[Array, ""]:
    n, y, yy, e, ee = fit
    n = jnp.maximum(n, 1.0)
    var_y, var_e = yy / n - (y / n) ** 2, ee / n - (e / n) ** 2
    return jnp.where(var_y > 0, 1.0 - var_e / jnp.maximum(var_y, 1e-12), 0.0)


# ---------------------------------------------------------------------------------------------
# Once per minibatch


class Constants(NamedTuple):
    mean: Float[Array, ""]  # of the advantages
    scale: Float[Array, ""]  # 1 over their deviation
    clip_eps: Float[Array, ""]
    entropy_coef: Float[Array, ""]


def constants(ppo: Ppo, total: Sums, moment: Moment) -> Constants:
    mean, scale = jnp.zeros(()), jnp.ones(())
    if ppo.normalize_advantage != "none":
        index = moment.index if ppo.normalize_advantage == "minibatch" else 0
        mean, scale = center_and_scale(total["powers"][index])
    clip_eps = scheduled(ppo.clip_eps, ppo.clip_schedule, moment.left)
    entropy_coef = scheduled(ppo.entropy_coef, ppo.entropy_schedule, moment.left)
    return Constants(mean, scale, clip_eps, entropy_coef)


def center_and_scale(powers: Float[Array, "3"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean and 1 / (deviation + 1e-8) of what was summed; N - 1 in the deviation."""
    n, s1, s2 = powers
    mean = s1 / jnp.maximum(n, 1.0)
    var = jnp.maximum(s2 - s1 * mean, 0.0) / jnp.maximum(n - 1.0, 1.0)
    return mean, 1.0 / (jnp.sqrt(var) + 1e-8)


def loss(
    ppo: Ppo, dist: Distribution, now: Constants, outputs: Outputs, rows: Minibatch
) -> tuple[Float[Array, ""], Reports]:
    """The clipped objective, a squared value error and an entropy bonus."""
    normalised = (rows.targets.advantage - now.mean) * now.scale
    rows = rows._replace(targets=rows.targets._replace(advantage=normalised))
    outputs, rows = masked(rows.weight, (outputs, rows))
    log_ratio = dist.log_prob(outputs.dist_params, rows.action) - rows.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - now.clip_eps, 1.0 + now.clip_eps)
    advantage = rows.targets.advantage
    terms = {
        "loss/policy": -jnp.minimum(ratio * advantage, clipped * advantage),
        "loss/value": value_loss(ppo.clip_value, now.clip_eps, outputs.value, rows),
        "loss/entropy": dist.entropy(outputs.dist_params),
        "ppo/approx_kl": ratio - 1.0 - log_ratio,  # Schulman's k3 estimator
        "ppo/clip_frac": (jnp.abs(ratio - 1.0) > now.clip_eps).astype(jnp.float32),
    }
    total = {name: valid_sum(rows.weight, term) for name, term in terms.items()}
    bonus = now.entropy_coef * total["loss/entropy"]
    return total["loss/policy"] + ppo.value_coef * total["loss/value"] - bonus, total


def value_loss(
    clip: bool, clip_eps: Float[Array, ""], value: Float[Array, "*rows"], rows: Minibatch
) -> Float[Array, "*rows"]:
    """Half the squared error; with clipping, the worse of the free and the bounded step."""
    error = (value - rows.targets.value) ** 2
    if clip:
        bounded = rows.value + jnp.clip(value - rows.value, -clip_eps, clip_eps)
        error = jnp.maximum(error, (bounded - rows.targets.value) ** 2)
    return 0.5 * error


def stop(target_kl: float, report: Reports, end_of_epoch: Bool[Array, ""]) -> Bool[Array, ""]:
    return end_of_epoch & (report["ppo/approx_kl"] > target_kl)

"""The clipped PPO objective (Schulman et al. 2017), as sums over rows.

Sums, not means: those of disjoint sets of rows add up, so any split of a minibatch over chunks,
devices and ranks gives the gradient of the whole after one division by the count of valid rows.
Public names: `REPORTED`, `Rows`, `ppo_sums`, `mask_rows`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Shaped

from spmdrl.config import AlgoConfig
from spmdrl.nets.distributions import Distribution

REPORTED = ("loss/policy", "loss/value", "loss/entropy", "ppo/approx_kl", "ppo/clip_frac")


class Rows(struct.PyTreeNode):
    """What the loss needs of each row besides the network's answer."""

    action: Shaped[Array, "N ..."]
    log_prob: Float[Array, "N"]  # when the action was taken
    value: Float[Array, "N"]  # when the action was taken
    advantage: Float[Array, "N"]  # normalised
    target: Float[Array, "N"]  # of the value
    weight: Float[Array, "N"]  # 1, or 0 for an automatic reset


def ppo_sums(
    algo: AlgoConfig,
    dist: Distribution,
    clip_eps: Float[Array, ""],
    dist_params: Float[Array, "N P"],
    value: Float[Array, "N"],
    rows: Rows,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Sum of the loss over valid rows, and the sums of what is reported."""
    dist_params, value, rows = jax.tree.map(
        lambda x: mask_rows(rows.weight, x), (dist_params, value, rows)
    )
    log_ratio = dist.log_prob(dist_params, rows.action) - rows.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps)
    policy = -jnp.minimum(ratio * rows.advantage, clipped * rows.advantage)
    value_loss = _value_loss(algo, clip_eps, value, rows)
    entropy = dist.entropy(dist_params)

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(rows.weight > 0, x, 0.0))

    sums = {
        "loss/policy": total(policy),
        "loss/value": total(value_loss),
        "loss/entropy": total(entropy),
        "ppo/approx_kl": total(ratio - 1.0 - log_ratio),  # Schulman's k3 estimator
        "ppo/clip_frac": total((jnp.abs(ratio - 1.0) > clip_eps).astype(jnp.float32)),
    }
    loss = (
        sums["loss/policy"]
        + algo.value_coef * sums["loss/value"]
        - algo.entropy_coef * sums["loss/entropy"]
    )
    return loss, sums


def mask_rows(weight: Float[Array, "N"], x: Shaped[Array, "N ..."]) -> Shaped[Array, "N ..."]:
    """Zero in rows of no weight.

    Before anything is computed from them: a NaN there would pass through the gradient of a later
    `where`, as 0 times NaN.
    """
    kept = weight.reshape(weight.shape + (1,) * (x.ndim - 1)) > 0
    return jnp.where(kept, x, jnp.zeros_like(x))


def _value_loss(algo: AlgoConfig, clip_eps: Array, value: Array, rows: Rows) -> Array:
    """Half the squared error; with clipping, the worse of the free and the bounded step."""
    error = (value - rows.target) ** 2
    if algo.clip_value:
        bounded = rows.value + jnp.clip(value - rows.value, -clip_eps, clip_eps)
        error = jnp.maximum(error, (bounded - rows.target) ** 2)
    return 0.5 * error

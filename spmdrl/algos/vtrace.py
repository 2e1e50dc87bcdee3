"""V-trace (Espeholt et al. 2018): returns of a policy from rollouts that another one collected."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float

from spmdrl.lazy import Array, jax, jnp
from spmdrl.parallel.recurrence import recurrence

__all__ = ["METRICS", "Clips", "Corrected", "vtrace"]

METRICS = (
    ("vtrace/rho_mean", "mean ratio of the learner's policy to the one that acted"),
    ("vtrace/clipped", "share of rows whose ratio is above `rho_clip`"),
)


class Clips(NamedTuple):
    """Bounds of the ratio pi(a) / mu(a) where it weighs errors, traces and the policy gradient."""

    rho: float
    c: float
    pg_rho: float


class Corrected(NamedTuple):
    value: Float[Array, "T B"]  # what the values should have been
    advantage: Float[Array, "T B"]  # weight of the policy gradient, its ratio included


def vtrace(
    r_t: Float[Array, "T B"],
    discount_t: Float[Array, "T B"],
    valid: Bool[Array, "T B"],
    v_tm1: Float[Array, "T B"],
    v_last: Float[Array, "B"],
    log_rho: Float[Array, "T B"],
    lambda_: float,
    clips: Clips,
) -> Corrected:
    """Over rollouts whose environments reset on the step after the end, where `valid` is False.

    Such a row holds the true final observation, so its value ends a time limit, but no error of the
    next episode flows through it. `discount_t` is 0 where an episode terminated.
    """
    rho = jnp.exp(log_rho)
    v_t = jnp.concatenate([v_tm1[1:], v_last[None]])

    def discounted(x: Array) -> Array:
        # Selected, not multiplied, here and below: values behind an end may not be finite.
        return jnp.where(discount_t > 0, discount_t * x, 0.0)

    delta_t = jnp.minimum(clips.rho, rho) * (r_t + discounted(v_t) - v_tm1)
    trace_t = discount_t * lambda_ * jnp.minimum(clips.c, rho)

    def backward(error: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        delta, trace, valid = x
        error = delta + jnp.where(trace > 0, trace * error, 0.0)
        error = jnp.where(valid, error, 0.0)
        return error, error

    def loop(*rows: Array) -> Array:
        start = jnp.zeros_like(v_last)
        return jax.lax.scan(backward, start, (delta_t, trace_t, valid), reverse=True, unroll=8)[1]

    error_t = recurrence(
        loop, jnp.where(valid, delta_t, 0.0), jnp.where(valid, trace_t, 0.0), reverse=True
    )
    target_t = v_tm1 + error_t
    ahead = jnp.concatenate([target_t[1:], v_last[None]])
    q_t = r_t + discounted(lambda_ * ahead + (1.0 - lambda_) * v_t)
    advantage = jnp.minimum(clips.pg_rho, rho) * (q_t - v_tm1)
    return Corrected(target_t, jnp.where(valid, advantage, 0.0))

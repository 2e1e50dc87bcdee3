"""Returns and advantages over rollouts whose environments reset on the step after the end."""

from __future__ import annotations

from jaxtyping import Bool, Float

from spmdrl.lazy import Array, jax, jnp
from spmdrl.parallel.recurrence import recurrence

__all__ = ["fold_discounts", "gae"]


def fold_discounts(
    terminated: Bool[Array, "T B"], truncated: Bool[Array, "T B"], gamma: float, lambda_: float
) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
    """`(discount_t, trace_t)`: of the next value, and of the next advantage.

    Only a real termination cuts the value. A time limit bootstraps from the value of the true
    final observation, which stands in the next row; but no advantage flows back over either.
    """
    discount_t = gamma * (1.0 - terminated.astype(jnp.float32))
    trace_t = gamma * lambda_ * (1.0 - (terminated | truncated).astype(jnp.float32))
    return discount_t, trace_t


def gae(
    r_t: Float[Array, "T B"],
    discount_t: Float[Array, "T B"],
    trace_t: Float[Array, "T B"],
    v_tm1: Float[Array, "T B"],
    v_last: Float[Array, "B"],
) -> Float[Array, "T B"]:
    """Generalised advantage estimation (Schulman et al. 2016).

    A_t = delta_t + trace_t A_{t+1} with delta_t = r_t + discount_t v_t - v_{t-1}.
    """
    v_t = jnp.concatenate([v_tm1[1:], v_last[None]])
    # Selected, not multiplied: a simulation that ends because it diverged has a final value that
    # is not finite, and 0 times that would poison the whole episode.
    delta_t = r_t + jnp.where(discount_t > 0, discount_t * v_t, 0.0) - v_tm1

    def backward(advantage: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, trace = x
        advantage = delta + jnp.where(trace > 0, trace * advantage, 0.0)
        return advantage, advantage

    def loop(delta_t: Array, trace_t: Array) -> Array:
        start = jnp.zeros_like(delta_t[0])
        return jax.lax.scan(backward, start, (delta_t, trace_t), reverse=True, unroll=8)[1]

    return recurrence(loop, delta_t, trace_t, reverse=True)

"""The gradient of one minibatch, as sums: over chunks of rows, then over shards of environments.

What leaves this module is one vector per shard, the gradient first: that is one message between
devices and ranks, and one step of the optimiser. `Wire` knows what stands where in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from spmdrl.algos.base import Algorithm, Minibatch, Outputs, mask_rows
from spmdrl.learning.minibatches import Sequences, Steps
from spmdrl.nets.cpu import chunked_dense
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.types import Obs, Params, Rollout, TrainState

__all__ = ["Wire", "chunk_rows", "sequence_gradient", "step_gradient", "sum_over_chunks"]

Sums = dict[str, Any]  # grads, reports and the count of valid rows


@dataclass(frozen=True)
class Wire:
    """The vector that travels: gradient, reports, valid rows, and whose gradient is not finite."""

    reports: tuple[str, ...]
    num_devices: int

    def pack(self, sums: Sums, flag: Callable[[Array], Float[Array, "D"]]) -> Float[Array, "n"]:
        """`flag` says on which device the gradient is finite, or is not."""
        gradient = ravel_pytree(sums["grads"])[0]
        rest = {"reports": sums["reports"], "count": sums["count"]}
        rest["nonfinite"] = flag(jnp.isfinite(gradient).all())
        return jnp.concatenate([gradient, ravel_pytree(rest)[0]])

    def unpack(self, size: int, vector: Float[Array, "n"]) -> tuple[Float[Array, "m"], Sums]:
        """The gradient of `size` parameters, and by name what is behind it."""
        blank = {
            "reports": dict.fromkeys(self.reports, jnp.zeros(())),
            "count": jnp.zeros(()),
            "nonfinite": jnp.zeros(self.num_devices),
        }
        return vector[:size], ravel_pytree(blank)[1](vector[size:])


# ---------------------------------------------------------------------------------------------
# Minibatches of single steps


def step_gradient(
    algorithm: Algorithm,
    policy: Policy,
    state: TrainState,
    selector: Steps,
    at_once: int | None,
    shard: tuple[Rollout, Any, Array],
    index: Int[Array, ""],
    constants: Any,
) -> Sums:
    """Of minibatch `index` of the shard `(rollout, targets, order)`, in chunks of rows."""
    rollout, targets, order = shard
    t, b = selector.rows(order, index)

    def chunk_sums(t: Array, b: Array) -> tuple[Sums, Any]:
        rows = take_rows(rollout, targets, rollout.valid, (t, b))
        return chunk_gradient(algorithm, policy, state, rows, constants)

    size = chunk_rows(t.size, at_once, _has_image(rollout.obs))
    sums, factors = sum_over_chunks(chunk_sums, size, t, b)
    return sums | {"grads": chunked_dense.add_kernels(sums["grads"], *factors)}


def take_rows(rollout: Rollout, targets: Any, shown: Bool[Array, "T B"], at: Any) -> Minibatch:
    """The rows at `[T, B]` index `at`. Observations that are not `shown` are zero."""
    weight, seen = (x[at].astype(jnp.float32) for x in (rollout.valid, shown))
    return Minibatch(
        obs=jax.tree.map(lambda x: _masked_floats(seen, x[at]), rollout.obs),
        first=rollout.first[at],
        action=rollout.action[at],
        log_prob=rollout.log_prob[at],
        value=rollout.value[at],
        reward=rollout.reward[at],
        terminated=rollout.terminated[at],
        truncated=rollout.truncated[at],
        weight=weight,
        targets=jax.tree.map(lambda x: x[at], targets),
    )


def _masked_floats(weight: Array, x: Array) -> Array:
    """A final observation may be NaN where a simulation diverged; images cannot."""
    return mask_rows(weight, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def chunk_gradient(
    algorithm: Algorithm, policy: Policy, state: TrainState, rows: Minibatch, constants: Any
) -> tuple[Sums, Any]:
    """What is summed over chunks, and the factors of large kernels, whose rows stay apart."""
    count = rows.weight.shape[0]
    carry = policy.initial_carry(count)

    def loss(params: Params, probes: chunked_dense.Factors) -> tuple[Array, Any]:
        variables = variables_of(params, state.obs_moments)
        (_, dist_params, value), inputs = policy.apply_probed(
            variables, probes, carry, rows.obs, rows.first
        )
        outputs = Outputs(dist_params, value)
        total, reports = algorithm.loss(policy.dist, constants, outputs, rows)
        return total, (reports, inputs)

    probes = chunked_dense.probes_of(state.params, count)
    (grads, errors), (reports, inputs) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        state.params, probes
    )
    sums = {"grads": chunked_dense.drop_kernels(grads), "reports": reports}
    return sums | {"count": rows.weight.sum()}, (inputs, errors)


def chunk_rows(rows: int, most: int | None, is_image: bool) -> int:
    """The largest chunk that divides the rows and is not above `most`; all rows if that is tiny."""
    if most is None:
        return rows
    size = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return size if is_image or 4 * size > most else rows


def _has_image(obs: Obs) -> bool:
    return any(x.dtype == jnp.uint8 for x in jax.tree.leaves(obs))


def sum_over_chunks(
    function: Callable[..., tuple[Any, Any]], size: int, *rows: Array
) -> tuple[Any, Any]:
    """`function` on chunks of the rows, so that its temporaries stay small.

    Of its two results the first is summed, the second has a row for each row.
    """
    chunks = rows[0].shape[0] // size
    if chunks == 1:
        return function(*rows)
    cut = tuple(x.reshape(chunks, size) for x in rows)

    def add(total: Any, chunk: tuple[Array, ...]) -> tuple[Any, Any]:
        more, kept = function(*chunk)
        return jax.tree.map(jnp.add, total, more), kept

    shapes, _ = jax.eval_shape(function, *(x[0] for x in cut))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, kept = jax.lax.scan(add, zeros, cut)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)


# ---------------------------------------------------------------------------------------------
# Minibatches of whole environments


def sequence_gradient(
    algorithm: Algorithm,
    policy: Policy,
    state: TrainState,
    selector: Sequences,
    shard: tuple[Rollout, Any, Array],
    index: Int[Array, ""],
    constants: Any,
) -> Sums:
    """All steps of minibatch `index`'s environments, from the carry with which they began."""
    rollout, targets, order = shard
    envs = selector.envs(order, index)
    shown = with_limits(rollout) if algorithm.bootstraps else rollout.valid
    rows = take_rows(rollout, targets, shown, (slice(None), envs))
    carry, *last = jax.tree.map(
        lambda x: x[envs], (rollout.carry, rollout.last_obs, rollout.last_first)
    )

    def loss(params: Params) -> tuple[Array, Any]:
        variables = variables_of(params, state.obs_moments)
        after, dist_params, value = policy.unroll(variables, carry, rows.obs, rows.first)
        outputs = Outputs(dist_params, value)
        if algorithm.bootstraps:
            # Cut off before it: the observation of a simulation that diverged may be NaN, whose
            # gradient would be too.
            _, _, v_last = policy.apply(*jax.lax.stop_gradient((variables, after)), *last)
            outputs = outputs._replace(last_value=v_last)
        return algorithm.loss(policy.dist, constants, outputs, rows)

    grads, reports = jax.grad(loss, has_aux=True)(state.params)
    return {"grads": grads, "reports": reports, "count": rows.weight.sum()}


def with_limits(rollout: Rollout) -> Bool[Array, "T B"]:
    """Valid rows, and those whose observation is the last one before a time limit."""
    limit = rollout.truncated & ~rollout.terminated
    return rollout.valid | jnp.concatenate([jnp.zeros_like(limit[:1]), limit[:-1]])

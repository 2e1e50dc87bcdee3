"""The stages of a PPO update, pure functions that end in partial sums.

What a stage sums over its rows is added over devices and ranks before the next one: moments of the
rollout, then advantages, then for every minibatch its gradient and the step. Public names:
`Learner`, `Prepared`, `Progress`, `no_moments`, `moment_sums`, `prepare`, `gradient_sums`,
`apply_gradient`, `begin`, `finish`, `prepared_specs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from spmdrl.algos.ppo import REPORTED, Rows, mask_rows, ppo_sums
from spmdrl.algos.returns import fold_discounts, gae
from spmdrl.config import Config
from spmdrl.nets import moments
from spmdrl.nets.cpu import chunked_dense as wide
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.parallel.mesh import AXIS
from spmdrl.parallel.placement import rollout_specs, split_envs
from spmdrl.parallel.sync import GradSync
from spmdrl.types import Array, Moments, Rollout, TrainState

# Rows whose activations fit into a CPU's cache.
IMAGE_CHUNK = 32
VECTOR_CHUNK = 1024


@dataclass(frozen=True)
class Learner:
    """What every stage needs and nothing changes."""

    config: Config
    policy: Policy
    optimizer: optax.GradientTransformation
    sync: GradSync
    shards: int  # of each device: groups of environments whose sums stay apart until the end

    @property
    def minibatches(self) -> int:
        return self.config.algo.minibatches

    @property
    def num_gradients(self) -> int:
        return self.config.algo.epochs * self.minibatches

    @property
    def normalizes(self) -> bool:
        return self.config.env.normalize_obs or self.config.env.normalize_reward


class Prepared(struct.PyTreeNode):
    """The rollout's targets, and in which order its steps are visited."""

    advantage: Float[Array, "T B"]
    target: Float[Array, "T B"]
    order: Int[Array, "E T B"]
    obs_moments: Moments
    reward_moments: Moments
    bad: Float[Array, "num_devices"]  # whose moments were not finite


class Progress(struct.PyTreeNode):
    """What changes from minibatch to minibatch."""

    state: TrainState
    stopped: Array  # by target_kl
    skipped: Array  # gradients left out because they were not finite
    index: Int[Array, ""]


def prepared_specs() -> Prepared:
    """The environment axis of every field."""
    same: Any = P()
    steps = P(None, AXIS)
    return Prepared(steps, steps, P(None, None, AXIS), same, same, same)


# ---------------------------------------------------------------------------------------------
# Stage 1: the moments of this rollout


def no_moments(learner: Learner) -> dict[str, Any]:
    """Instead of `moment_sums` where nothing is normalised: a message less."""
    return {"bad": jnp.zeros(learner.sync.num_devices)}


def moment_sums(learner: Learner, state: TrainState, rollout: Rollout) -> dict[str, Any]:
    def of_shard(shard: Rollout) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        if learner.config.env.normalize_obs:
            sums["obs"] = moments.power_sums(state.obs_moments, shard.obs, shard.valid)
        if learner.config.env.normalize_reward:
            sums["reward"] = moments.power_sums(
                state.reward_moments, shard.discounted_return, shard.valid
            )
        return sums | {"bad": flag_not_finite(learner, sums)}

    return each_shard(learner, of_shard, rollout)


# ---------------------------------------------------------------------------------------------
# Stage 2: advantages, and their moments in each minibatch


def prepare(
    learner: Learner, state: TrainState, rollout: Rollout, key: Array, sums: dict[str, Any]
) -> tuple[Prepared, dict[str, Any]]:
    algo, env = learner.config.algo, learner.config.env
    obs_moments, reward_moments = state.obs_moments, state.reward_moments
    if env.normalize_obs:  # used from the next rollout on, so that this one's ratios start at 1
        obs_moments = moments.merge(obs_moments, sums["obs"])
    if env.normalize_reward:
        reward_moments = moments.merge(reward_moments, sums["reward"])
    shards = each_shard(
        learner, lambda shard: advantages(learner, state, reward_moments, shard), rollout
    )
    advantage = jnp.concatenate(list(shards), axis=1)
    prepared = Prepared(
        advantage=advantage,
        target=advantage + rollout.value,
        order=step_order(
            jax.random.fold_in(key, state.step), rollout.env_ids, algo.epochs, algo.num_steps
        ),
        obs_moments=obs_moments,
        reward_moments=reward_moments,
        bad=sums["bad"],
    )
    return prepared, advantage_sums(learner, rollout, prepared)


def advantages(
    learner: Learner, state: TrainState, reward_moments: Moments, rollout: Rollout
) -> Float[Array, "T B"]:
    """Advantages of normalised rewards, by the parameters that collected the rollout."""
    algo, env = learner.config.algo, learner.config.env
    reward = rollout.reward
    if env.normalize_reward:
        reward = reward / jnp.sqrt(moments.variance(reward_moments) + 1e-8)
        reward = jnp.clip(reward, -env.reward_clip, env.reward_clip)
    discount_t, trace_t = fold_discounts(
        rollout.terminated, rollout.truncated, algo.gamma, algo.gae_lambda
    )
    actor = state.acting()
    variables = variables_of(actor.params, actor.obs_moments)
    _, _, v_last = learner.policy.apply(
        variables, rollout.last_carry, rollout.last_obs, rollout.last_first
    )
    return gae(reward, discount_t, trace_t, rollout.value, v_last)


def step_order(key: Array, env_ids: Array, epochs: int, num_steps: int) -> Int[Array, "E T B"]:
    """A permutation of its own steps for each environment and epoch.

    Keyed by the global id: the same wherever the environment lives.
    """
    draw = jax.vmap(lambda g: jax.random.bits(jax.random.fold_in(key, g), (epochs, num_steps)))
    # The step's number in the low bits: one array to sort, which XLA does much faster than two.
    # Equal high bits, which are rare, stay in order.
    low = (num_steps - 1).bit_length()
    numbered = (draw(env_ids) >> low << low) | jnp.arange(num_steps, dtype=jnp.uint32)
    order = jax.lax.sort(numbered, is_stable=False) & ((1 << low) - 1)
    return order.astype(jnp.int32).transpose(1, 2, 0)


def advantage_sums(learner: Learner, rollout: Rollout, prepared: Prepared) -> dict[str, Any]:
    """Per minibatch: count, sum, sum of squares. And what explained variance needs."""

    def of_shard(rollout: Rollout, prepared: Prepared) -> dict[str, Any]:
        weight = rollout.valid.astype(jnp.float32)
        advantage = jnp.where(rollout.valid, prepared.advantage, 0.0)
        powers = jnp.stack([weight, advantage, advantage**2], axis=-1)
        if learner.config.algo.normalize_advantage == "minibatch":
            powers = jax.vmap(lambda o: take_steps(powers, o))(prepared.order)
            powers = powers.reshape(learner.num_gradients, -1, 3).sum(1)
        else:
            powers = powers.sum((0, 1))[None]
        return {"powers": powers, "fit": fit_sums(rollout, prepared)}

    return each_shard(learner, of_shard, rollout, prepared)


def fit_sums(rollout: Rollout, prepared: Prepared) -> Float[Array, "5"]:
    """Count and power sums of the targets and of the old values' errors."""
    target = jnp.where(rollout.valid, prepared.target, 0.0)
    error = jnp.where(rollout.valid, prepared.target - rollout.value, 0.0)
    terms = [rollout.valid.astype(jnp.float32), target, target**2, error, error**2]
    return jnp.stack([x.sum() for x in terms])


def explained_variance(fit: Float[Array, "5"]) -> Float[Array, ""]:
    n, y, yy, e, ee = fit
    n = jnp.maximum(n, 1.0)
    var_y, var_e = yy / n - (y / n) ** 2, ee / n - (e / n) ** 2
    return jnp.where(var_y > 0, 1.0 - var_e / jnp.maximum(var_y, 1e-12), 0.0)


def center_and_scale(powers: Float[Array, "3"]) -> tuple[Array, Array]:
    """Mean and 1 / (deviation + 1e-8) of what was summed; N - 1 in the deviation."""
    n, s1, s2 = powers
    mean = s1 / jnp.maximum(n, 1.0)
    var = jnp.maximum(s2 - s1 * mean, 0.0) / jnp.maximum(n - 1.0, 1.0)
    return mean, 1.0 / (jnp.sqrt(var) + 1e-8)


# ---------------------------------------------------------------------------------------------
# Stage 3: the gradient of one minibatch, as sums


def gradient_sums(
    learner: Learner, progress: Progress, rollout: Rollout, prepared: Prepared, powers: Array
) -> Float[Array, "shards n"]:
    """Minibatch `progress.index`: a slice of every environment's shuffled steps.

    One vector with the gradient first: that is one message, and one step of the optimiser.
    """
    state = progress.state
    epoch, minibatch = jnp.divmod(progress.index, learner.minibatches)
    mode = learner.config.algo.normalize_advantage
    mean, scale = (jnp.zeros(()), jnp.ones(()))
    if mode != "none":
        mean, scale = center_and_scale(powers[progress.index if mode == "minibatch" else 0])
    algo = learner.config.algo
    clip_eps = scheduled(algo.clip_eps, algo.clip_schedule, learner, state)

    def loss(
        params: Any, probes: wide.Factors, obs: Array, first: Array, rows: Rows
    ) -> tuple[Array, Any]:
        variables = variables_of(params, state.obs_moments)
        carry = learner.policy.initial_carry(obs.shape[0])
        (_, dist_params, value), inputs = learner.policy.apply_probed(
            variables, probes, carry, obs, first
        )
        total, sums = ppo_sums(algo, learner.policy.dist, clip_eps, dist_params, value, rows)
        return total, (sums, inputs)

    def of_chunk(shard: Rollout, prep: Prepared, t: Array, b: Array) -> tuple[Any, Any]:
        """What is summed over chunks, and the factors, whose rows stay apart."""
        rows = Rows(
            action=shard.action[t, b],
            log_prob=shard.log_prob[t, b],
            value=shard.value[t, b],
            advantage=(prep.advantage[t, b] - mean) * scale,
            target=prep.target[t, b],
            weight=shard.valid[t, b].astype(jnp.float32),
        )
        obs = shard.obs[t, b]
        if jnp.issubdtype(obs.dtype, jnp.floating):
            obs = mask_rows(rows.weight, obs)
        probes = wide.probes_of(state.params, t.shape[0])
        (grads, errors), (sums, inputs) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            state.params, probes, obs, shard.first[t, b], rows
        )
        grads = wide.drop_kernels(grads)
        return {"grads": grads, "sums": sums, "count": rows.weight.sum()}, (inputs, errors)

    def of_shard(shard: Rollout, prep: Prepared) -> Float[Array, "n"]:
        size = learner.config.algo.num_steps // learner.minibatches
        t = jax.lax.dynamic_slice_in_dim(prep.order[epoch], minibatch * size, size)
        b = jnp.broadcast_to(jnp.arange(t.shape[1]), t.shape)
        total, factors = sum_over_chunks(
            lambda ti, bi: of_chunk(shard, prep, ti, bi),
            chunk_size(t.size, shard.obs),
            t.reshape(-1),
            b.reshape(-1),
        )
        grads = wide.add_kernels(total.pop("grads"), *factors)
        rest = total | {"bad": flag_not_finite(learner, grads)}
        return jnp.concatenate([ravel_pytree(grads)[0], ravel_pytree(rest)[0]])

    return each_shard(learner, of_shard, rollout, prepared)


def read_sums(learner: Learner, size: int, vector: Float[Array, "n"]) -> tuple[Array, Any]:
    """The gradient of `size` parameters, and by name what `gradient_sums` put behind it."""
    blank = {
        "sums": dict.fromkeys(REPORTED, jnp.zeros(())),
        "count": jnp.zeros(()),
        "bad": jnp.zeros(learner.sync.num_devices),
    }
    return vector[:size], ravel_pytree(blank)[1](vector[size:])


# ---------------------------------------------------------------------------------------------
# Stage 4: the same step everywhere


def apply_gradient(
    learner: Learner, progress: Progress, vector: Float[Array, "n"]
) -> tuple[Progress, dict[str, Array]]:
    config, state = learner.config, progress.state
    flat, restore = ravel_pytree(state.params)
    grads, total = read_sums(learner, flat.size, vector)
    count = jnp.maximum(total["count"], 1.0)
    grads = grads / count
    report = {name: s / count for name, s in total["sums"].items()}
    report["optim/grad_norm"] = optax.tree.norm(grads)
    updates, opt_state = learner.optimizer.update(grads, state.opt_state)
    lr = scheduled(config.optim.lr, config.optim.lr_schedule, learner, state)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, restore(updates))

    bad = total["bad"].sum() > 0
    keep = progress.stopped | bad
    new = state.replace(params=params, opt_state=opt_state)
    new = jax.tree.map(lambda old, stepped: jnp.where(keep, old, stepped), state, new)
    stopped = progress.stopped
    if config.algo.target_kl is not None:
        end_of_epoch = (progress.index + 1) % learner.minibatches == 0
        stopped |= end_of_epoch & (report["ppo/approx_kl"] > config.algo.target_kl)
    report["weight"] = 1.0 - keep.astype(jnp.float32)
    report["bad"] = total["bad"]
    next_progress = Progress(
        state=new,
        stopped=stopped,
        skipped=progress.skipped + bad.astype(jnp.int32),
        index=progress.index + 1,
    )
    return next_progress, report


def scheduled(value: float, schedule: str, learner: Learner, state: TrainState) -> Array:
    """The value now; linear schedules reach 0 after the last update."""
    if schedule == "constant":
        return jnp.asarray(value, jnp.float32)
    left = 1.0 - state.step.astype(jnp.float32) / learner.config.num_updates
    return value * jnp.maximum(left, 0.0)


def begin(state: TrainState) -> Progress:
    skipped, index = (jnp.zeros((), jnp.int32) for _ in range(2))  # each donated on its own
    return Progress(state=state, stopped=jnp.zeros((), bool), skipped=skipped, index=index)


def finish(
    learner: Learner,
    before: TrainState | None,
    progress: Progress,
    prepared: Prepared,
    fit: Array,
    reports: dict[str, Array],
) -> tuple[TrainState, dict[str, Array]]:
    """Count the update, take over the moments, and average the minibatches' reports.

    `before` is the state that the update began with; only `overlap` reads it.
    """
    weight, bad = reports.pop("weight"), reports.pop("bad").sum(0) + prepared.bad
    total = jnp.maximum(weight.sum(), 1.0)
    metrics = {k: jnp.where(weight > 0, x, 0.0).sum() / total for k, x in reports.items()}
    metrics["ppo/explained_variance"] = explained_variance(fit)
    state = progress.state
    metrics["optim/lr"] = scheduled(
        learner.config.optim.lr, learner.config.optim.lr_schedule, learner, state
    )
    metrics["optim/skipped"] = progress.skipped.astype(jnp.float32)
    metrics["bad_places"] = bad
    poisoned = prepared.bad.sum() > 0  # moments once not finite would stay so for ever
    choose = lambda old, new: jax.tree.map(lambda a, b: jnp.where(poisoned, a, b), old, new)  # noqa: E731
    state = state.replace(
        step=state.step + 1,
        obs_moments=choose(state.obs_moments, prepared.obs_moments),
        reward_moments=choose(state.reward_moments, prepared.reward_moments),
    )
    if learner.config.overlap:
        assert before is not None
        state = state.replace(behind=(before.params, before.obs_moments))
        metrics["overlap/lag"] = (before.step > 0).astype(jnp.float32)
    return state, metrics


# ---------------------------------------------------------------------------------------------
# Shards and chunks


def each_shard(learner: Learner, function: Callable[..., Any], *parts: Any) -> Any:
    """`function` on every shard of a device's environments, results along a new first axis.

    One shard is computed directly. Several go through a loop with one body, so that each result
    has the same bits whichever device computes it.
    """
    if learner.shards == 1:
        return jax.tree.map(lambda x: x[None], function(*parts))
    specs = (rollout_specs(), prepared_specs())[: len(parts)]
    return jax.lax.map(lambda p: function(*p), split_envs(specs, parts, learner.shards))


def take_steps(x: Array, order: Int[Array, "T B"]) -> Array:
    """Each environment's steps in its own order."""
    return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=0)


def chunk_size(rows: int, obs: Array) -> int:
    """The largest chunk that divides the rows and fits the cache; all rows where it were tiny."""
    is_image = obs.ndim == 5
    most = IMAGE_CHUNK if is_image else VECTOR_CHUNK
    size = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return size if is_image or 4 * size > most else rows


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


def flag_not_finite(learner: Learner, tree: Any) -> Float[Array, "num_devices"]:
    """One-hot "this place has a number that is not finite", all zero if it has not."""
    finite = jnp.asarray(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    here = jnp.arange(learner.sync.num_devices) == learner.sync.device_index()
    return (here & ~finite).astype(jnp.float32)

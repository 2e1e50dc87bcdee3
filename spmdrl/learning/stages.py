"""The stages of an update: pure functions `stage(learner, ...) -> (kept, to be summed)`.

What a stage keeps stays on its device. What it sums over its rows, with the shards along a first
axis, is added over shards, devices and ranks before the next stage begins: moments of the rollout,
then what the algorithm needs, then for every minibatch its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from spmdrl.algos.base import Algorithm, Models, Moment
from spmdrl.config import Config
from spmdrl.learning.gradients import Wire, sequence_gradient, step_gradient
from spmdrl.learning.minibatches import Selector, Steps, make_selector
from spmdrl.learning.optimizer import Optimizer, learning_rate, make_optimizer
from spmdrl.nets import moments
from spmdrl.nets.policy import Policy, matmul_precision, variables_of
from spmdrl.parallel.guards import finite_inputs
from spmdrl.parallel.mesh import AXIS
from spmdrl.parallel.placement import rollout_specs, split_envs
from spmdrl.parallel.platforms import likes
from spmdrl.parallel.sync import GradSync
from spmdrl.types import Array, Report, Rollout, TrainState, Tree

__all__ = [
    "ROWS", "Learner", "Prepared", "Progress", "apply_gradient", "finish", "flat_state",
    "gradient_sums", "make_learner", "moment_sums", "prepare",
]  # fmt: skip

ROWS = P(None, AXIS)  # where the environments stand in [T, B, ...]


@dataclass(frozen=True)
class Learner:
    """What every stage needs and nothing changes."""

    config: Config
    algorithm: Algorithm
    policy: Policy
    selector: Selector
    optimizer: Optimizer
    sync: GradSync
    wire: Wire
    shards: int  # of each device: groups of environments whose sums stay apart until the end
    rows_at_once: int | None  # of a minibatch
    flat_state: bool  # see `Platform`

    @property
    def num_gradients(self) -> int:
        return self.selector.epochs * self.selector.minibatches

    def run(self, stage: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Any]:
        """While a program is traced; backward passes included, products are as precise as asked."""
        with matmul_precision(self.config.net):
            return stage(self, *args)

    @property
    def normalizes(self) -> bool:
        return self.config.env.normalize_obs or self.config.env.normalize_reward


def make_learner(
    config: Config, policy: Policy, sync: GradSync, platform: str, has_image: bool
) -> Learner:
    algorithm, liked = config.algo.make(), likes(platform)
    return Learner(
        config=config,
        algorithm=algorithm,
        policy=policy,
        selector=make_selector(config),
        optimizer=make_optimizer(config.optim),
        sync=sync,
        wire=Wire(algorithm.reports, sync.num_devices),
        shards=config.sync.shards // sync.num_devices if config.sync.deterministic else 1,
        rows_at_once=liked.image_rows if has_image else liked.vector_rows,
        flat_state=liked.flat_state,
    )


class Prepared(Tree):
    """What the minibatches need besides the rollout."""

    targets: Any  # the algorithm's, [T, B, ...]
    order: Any  # of the selector
    obs_moments: Any
    reward_moments: Any


class Progress(Tree):
    """What changes from minibatch to minibatch."""

    state: TrainState
    stopped: Array  # by the algorithm
    skipped: Array  # gradients left out because they were not finite
    index: Int[Array, ""]


# ---------------------------------------------------------------------------------------------
# The stages in their order


def moment_sums(learner: Learner, state: TrainState, rollout: Rollout) -> tuple[Any, Any]:
    """The moments of this rollout."""
    env = learner.config.env

    def shard_powers(shard: Rollout) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        if env.normalize_obs:
            sums["obs"] = moments.obs_power_sums(state.obs_moments, shard.obs, shard.valid)
        if env.normalize_reward:
            known = state.reward_moments
            sums["reward"] = moments.power_sums(known, shard.discounted_return, shard.valid)
        return sums

    return (), each_shard(learner, shard_powers, (rollout_specs(), rollout))


def prepare(
    learner: Learner, state: TrainState, rollout: Rollout, key: Array, sums: dict[str, Any]
) -> tuple[Prepared, Any]:
    """Targets and minibatches; what the algorithm sums over them, and what is not finite."""
    obs_moments, reward_moments = state.obs_moments, state.reward_moments
    if "obs" in sums:  # used from the next rollout on, so that this one's ratios start at 1
        obs_moments = moments.merge_obs(obs_moments, sums["obs"])
    if "reward" in sums:
        reward_moments = moments.merge(reward_moments, sums["reward"])
    scaled = normalize_reward(learner, reward_moments, rollout)
    models = models_of(learner, state)
    targets = each_shard(
        learner, partial(learner.algorithm.prepare, models), (rollout_specs(), scaled)
    )
    targets = jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), targets)
    order = learner.selector.order(jax.random.fold_in(key, state.step), rollout.env_ids)

    def sums_of_shard(shard: Rollout, targets: Any, order: Any) -> dict[str, Any]:
        by_minibatch = partial(learner.selector.by_minibatch, order)
        found = learner.algorithm.sums(shard, targets, by_minibatch)
        return {"algorithm": found, "nonfinite": nonfinite_inputs(learner, shard)}

    parts = ((rollout_specs(), rollout), (ROWS, targets), (learner.selector.spec, order))
    partial_sums = each_shard(learner, sums_of_shard, *parts)
    return Prepared(targets, order, obs_moments, reward_moments), partial_sums


def gradient_sums(
    learner: Learner, progress: Progress, rollout: Rollout, prepared: Prepared, sums: Any
) -> tuple[Any, Float[Array, "shards n"]]:
    """The gradient of minibatch `progress.index`, and what travels with it."""
    algorithm, policy = learner.algorithm, learner.policy
    state = whole_state(learner, progress.state)
    moment = Moment(progress.index, share_left(learner, state))
    constants = algorithm.constants(sums["algorithm"], moment)
    selector = learner.selector
    if isinstance(selector, Steps):
        gradient = partial(step_gradient, algorithm, policy, state, selector, learner.rows_at_once)
    else:
        gradient = partial(sequence_gradient, algorithm, policy, state, selector)

    def shard_gradient(*shard: Any) -> Float[Array, "n"]:
        found = gradient(shard, progress.index, constants)
        return learner.wire.pack(found, partial(flag_here, learner))

    parts = ((ROWS, prepared.targets), (learner.selector.spec, prepared.order))
    return (), each_shard(learner, shard_gradient, (rollout_specs(), rollout), *parts)


def apply_gradient(
    learner: Learner, progress: Progress, vector: Float[Array, "n"], sums: Any
) -> tuple[tuple[Progress, dict[str, Array]], Any]:
    """The same step everywhere."""
    algorithm, state = learner.algorithm, progress.state
    size = sum(x.size for x in jax.tree.leaves(state.params))
    gradient, total = learner.wire.unpack(size, vector)
    count = jnp.maximum(total["count"], 1.0)
    if algorithm.reduce == "mean":
        gradient = gradient / count
    report = {name: s / count for name, s in total["reports"].items()}
    report["optim/grad_norm"] = jnp.sqrt(jnp.sum(gradient**2))
    lr = learning_rate(learner.config, state.step)
    params, opt_state = learner.optimizer.step(gradient, state.opt_state, state.params, lr)

    # A rollout that is not finite is left out as a whole.
    bad = (total["nonfinite"].sum() > 0) | (sums["nonfinite"].sum() > 0)
    keep = progress.stopped | bad
    new = state.replace(params=params, opt_state=opt_state)
    new = jax.tree.map(lambda old, stepped: jnp.where(keep, old, stepped), state, new)
    stopped = progress.stopped
    if algorithm.stop is not None:
        end_of_epoch = (progress.index + 1) % learner.selector.minibatches == 0
        stopped |= algorithm.stop(report, end_of_epoch)
    report |= {"weight": 1.0 - keep.astype(jnp.float32), "nonfinite": total["nonfinite"]}
    skipped = progress.skipped + bad.astype(jnp.int32)
    return (Progress(new, stopped, skipped, progress.index + 1), report), ()


def finish(
    learner: Learner,
    before: TrainState | None,
    progress: Progress,
    prepared: Prepared,
    sums: Any,
    reports: dict[str, Array],
) -> tuple[tuple[TrainState, Report], Any]:
    """Count the update, take over the moments, and average the minibatches' reports.

    `before` is the state that the update began with; only `lag` needs it.
    """
    state, config = whole_state(learner, progress.state), learner.config
    weight, gradients = reports.pop("weight"), reports.pop("nonfinite").sum(0)
    total = jnp.maximum(weight.sum(), 1.0)
    metrics = {k: jnp.where(weight > 0, x, 0.0).sum() / total for k, x in reports.items()}
    metrics |= learner.algorithm.summary(sums["algorithm"])
    metrics["optim/lr"] = learning_rate(config, state.step)
    metrics["optim/skipped"] = progress.skipped.astype(jnp.float32)
    # Moments that are once not finite would stay so forever.
    taken = (prepared.obs_moments, prepared.reward_moments)
    known = (state.obs_moments, state.reward_moments)
    sound = all_finite(taken)
    obs_moments, reward_moments = jax.tree.map(lambda a, b: jnp.where(sound, a, b), taken, known)
    state = state.replace(
        step=state.step + 1, obs_moments=obs_moments, reward_moments=reward_moments
    )
    if before is not None:
        state = state.replace(behind=before.next_behind())
        metrics["rollout/lag"] = jnp.minimum(before.step, config.lag).astype(jnp.float32)
    nonfinite = jnp.concatenate([sums["nonfinite"], gradients[None]])
    return (state, Report(metrics, nonfinite)), ()


# ---------------------------------------------------------------------------------------------
# Pieces of the stages


def models_of(learner: Learner, state: TrainState) -> Models:
    actor = state.acting()
    return Models(
        learner.policy,
        variables_of(state.params, state.obs_moments),
        variables_of(actor.params, actor.obs_moments),
    )


def flat_state(learner: Learner, state: TrainState) -> TrainState:
    """With the parameters as one array, where the device likes it: one launch steps them all."""
    if not learner.flat_state:
        return state
    return state.replace(params=ravel_pytree(state.params)[0])


def whole_state(learner: Learner, state: TrainState) -> TrainState:
    """The inverse of `flat_state`."""
    if not learner.flat_state:
        return state
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    shapes = jax.eval_shape(learner.policy.init, key)
    _, restore = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    return state.replace(params=restore(state.params))


def share_left(learner: Learner, state: TrainState) -> Float[Array, ""]:
    left = 1.0 - state.step.astype(jnp.float32) / learner.config.schedule_updates
    return jnp.maximum(left, 0.0)


def normalize_reward(learner: Learner, known: Any, rollout: Rollout) -> Rollout:
    env = learner.config.env
    if not env.normalize_reward:
        return rollout
    reward = rollout.reward / jnp.sqrt(moments.variance(known) + 1e-8)
    return rollout.replace(reward=jnp.clip(reward, -env.reward_clip, env.reward_clip))


def each_shard(learner: Learner, function: Callable[..., Any], *parts: tuple[Any, Any]) -> Any:
    """`function` on every shard of a device's environments, results along a new first axis.

    Each part is `(where its environments stand, tree)`. One shard is computed directly. Several go
    through a loop with one body, so that a result has the same bits whichever device computes it.
    """
    specs, trees = zip(*parts, strict=True)
    if learner.shards == 1:
        return jax.tree.map(lambda x: x[None], function(*trees))
    return jax.lax.map(lambda p: function(*p), split_envs(specs, trees, learner.shards))


def all_finite(tree: Any) -> Array:
    finite = jnp.asarray(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    return finite


def flag_here(learner: Learner, fine: Array) -> Float[Array, "D"]:
    """One-hot "not so on this device", all zero if it is fine."""
    here = jnp.arange(learner.sync.num_devices) == learner.sync.device_index()
    return (here & ~fine).astype(jnp.float32)


def nonfinite_inputs(learner: Learner, rollout: Rollout) -> Float[Array, "kinds D"]:
    """Which kinds of numbers of this device's rollout are not finite, before others see them."""
    return jnp.stack([flag_here(learner, fine) for fine in finite_inputs(rollout, jnp)])

"""What both ways of stepping share: the rows of a rollout, and what is derived from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from spmdrl.config import Config
from spmdrl.envs.base import EnvBatch
from spmdrl.nets.policy import Policy
from spmdrl.parallel.mesh import AXIS
from spmdrl.parallel.placement import in_shards, split_envs
from spmdrl.parallel.recurrence import recurrence
from spmdrl.types import Array, Carry, Obs, Rollout, TimeStep, Tree

__all__ = [
    "ActorState", "Scores", "Steps", "accumulate", "act", "draw_noise", "finish_rollout",
    "initial_state", "make_row", "next_state", "score_rollout", "transform_reward",
]  # fmt: skip


class ActorState(Tree):
    """Where B environments are between two rollouts."""

    obs: Obs
    first: Bool[Array, "B"]  # obs starts an episode
    resetting: Bool[Array, "B"]  # the next step is the automatic reset
    carry: Carry
    discounted_return: Float[Array, "B"]  # of the transformed rewards, for their normaliser
    episode_return: Float[Array, "B"]  # raw
    episode_length: Int[Array, "B"]
    envs: Any = ()  # the environments themselves, where they are nothing but arrays


class Steps(Tree):
    """T time-major rows as they come out of the stepping, before anything is derived."""

    obs: Obs
    first: Array
    valid: Array
    action: Array
    dist_params: Array
    value: Array | None  # None: all rows are valued at the end
    reward: Array  # raw
    terminated: Array
    truncated: Array
    episode_over: Array


def transform_reward(kind: str, reward: Array) -> Array:
    """The rewards that are learned from; reported returns stay raw."""
    if kind == "sign":
        return jnp.sign(reward)
    if kind == "abs_one":
        return jnp.clip(reward, -1.0, 1.0)
    if kind == "soft_asymmetric":
        squeezed = jnp.tanh(reward / 5.0)
        return jnp.where(reward < 0, 0.3 * squeezed, squeezed) * 5.0
    return reward


def draw_noise(policy: Policy, key: Array, update: Array, env_ids: Array, num_steps: int) -> Array:
    """`[T, B, ...]` noise of a whole rollout, keyed by update and global environment id."""
    key = jax.random.fold_in(key, update)
    draw = jax.vmap(lambda g: policy.dist.noise(jax.random.fold_in(key, g), (num_steps,)))
    return jnp.swapaxes(draw(env_ids), 0, 1)


def act(
    policy: Policy,
    shards: int,
    variables: Any,
    carry: Carry,
    obs: Obs,
    first: Array,
    noise: Array,
) -> tuple[Carry, Array, Array, Array | None]:
    """`(carry, action, dist_params, value)` of one step."""

    def rows_of_shard(carry: Carry, obs: Obs, first: Array, noise: Array) -> Any:
        carry, dist_params, value = policy.apply(variables, carry, obs, first)
        action = policy.dist.sample(dist_params, noise)
        return carry, action, dist_params, None if policy.separate_critic else value

    return in_shards(rows_of_shard, shards, carry, obs, first, noise)


class Scores(Tree):
    """Log-probability and value of every row, by the policy that acted."""

    log_prob: Float[Array, "T B"]
    value: Float[Array, "T B"]


def score_rollout(policy: Policy, shards: int, variables: Any, steps: Steps) -> Scores:
    """Log-probabilities and values after the last step: none of them had to wait for these."""

    def values(obs: Obs, first: Bool[Array, "T B"]) -> Float[Array, "T B"]:
        def value_of(row: tuple[Obs, Array]) -> Array:
            return policy.apply(variables, (), *row)[2]

        if policy.value_rows is None:
            return jax.vmap(lambda *row: value_of(row))(obs, first)
        at_once = max(1, policy.value_rows // first.shape[1])
        return jax.lax.map(value_of, (obs, first), batch_size=at_once)

    def score_shard(steps: Steps) -> Scores:
        value = values(steps.obs, steps.first) if steps.value is None else steps.value
        return Scores(policy.dist.log_prob(steps.dist_params, steps.action), value)

    if shards == 1:
        return score_shard(steps)
    found = jax.lax.map(score_shard, split_envs(P(None, AXIS), steps, shards))
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), found)


def accumulate(
    start: Array, x: Float[Array, "T B"], discount: float, ends: Bool[Array, "T B"]
) -> tuple[Array, Float[Array, "T B"]]:
    """`y_t = x_t + discount y_{t-1}`, from 0 again after each end; last y and all y."""

    def step(y: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        x, end = row
        y = x + discount * y
        return jnp.where(end, 0.0, y), y

    def loop(*rows: Array) -> Array:
        return jax.lax.scan(step, start, (x, ends))[1]

    after_end = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    factors = jnp.where(after_end, 0.0, discount).astype(x.dtype)  # else float64 under x64
    begun = jnp.concatenate([x[:1] + discount * start, x[1:]])
    y = recurrence(loop, begun, factors)
    return jnp.where(ends[-1], 0.0, y[-1]), y


def finish_rollout(
    config: Config,
    env_ids: Array,
    before: ActorState,
    steps: Steps,
    scores: Scores,
    after: ActorState,
) -> tuple[ActorState, Rollout, dict[str, Array]]:
    """What learning and reporting need, from the raw rows and their scores."""
    raw = jnp.where(steps.valid, steps.reward, 0.0)
    reward = transform_reward(config.env.reward, raw)
    ends = steps.terminated | steps.truncated
    discounted, returns = accumulate(before.discounted_return, reward, config.algo.gamma, ends)
    episode_return, episode_returns = accumulate(
        before.episode_return, raw, 1.0, steps.episode_over
    )
    ones = steps.valid.astype(jnp.float32)
    length, lengths = accumulate(
        before.episode_length.astype(jnp.float32), ones, 1.0, steps.episode_over
    )
    after = after.replace(
        discounted_return=discounted,
        episode_return=episode_return,
        episode_length=length.astype(jnp.int32),
    )
    rollout = Rollout(
        obs=steps.obs,
        first=steps.first,
        action=steps.action,
        log_prob=scores.log_prob,
        value=scores.value,
        reward=reward,
        discounted_return=returns,
        terminated=steps.terminated,
        truncated=steps.truncated,
        valid=steps.valid,
        last_obs=after.obs,
        last_first=after.first,
        carry=before.carry,
        last_carry=after.carry,
        env_ids=env_ids,
    )
    ended = {"over": steps.episode_over, "return": episode_returns, "length": lengths}
    return after, rollout, ended


def initial_state(env: EnvBatch, policy: Policy) -> ActorState:
    n = env.num_envs
    return ActorState(
        obs=env.reset(),
        first=np.ones(n, bool),
        resetting=np.zeros(n, bool),
        carry=policy.initial_carry(n),
        discounted_return=np.zeros(n, np.float32),
        episode_return=np.zeros(n, np.float32),
        episode_length=np.zeros(n, np.int32),
    )


def make_row(s: ActorState, action: Any, dist_params: Any, value: Any, answer: TimeStep) -> Steps:
    return Steps(
        obs=s.obs,
        first=s.first,
        valid=~s.resetting,
        action=action,
        dist_params=dist_params,
        value=value,
        reward=answer.reward,
        terminated=answer.terminated,
        truncated=answer.truncated,
        episode_over=answer.episode_over,
    )


def next_state(s: ActorState, carry: Carry, answer: TimeStep) -> ActorState:
    return s.replace(
        obs=answer.obs,
        first=s.resetting,  # after the reset row comes a first observation
        resetting=answer.terminated | answer.truncated,
        carry=carry,
    )

"""PPO on gymnax's CartPole with environments, network and learning in one jit.

    python gymnax_ppo.py --envs 64                          # some seconds

One call of the compiled function is one update; nothing returns to Python within. Network, batch
and loss are those of spmdrl. Simpler than there, and so less work: a time limit ends the episode
like a fall, because gymnax has reset the environment by then. XLA keeps its default flags.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from jax import Array
from work import (
    ADAM_EPS,
    GAE_LAMBDA,
    GAMMA,
    MAX_GRAD_NORM,
    SEED,
    VALUE_COEF,
    Clock,
    Work,
    read_work,
)


class ActorCritic(nn.Module):
    actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Array, Array]:
        actor = critic = obs
        for width in self.hidden:
            actor, critic = nn.tanh(nn.Dense(width)(actor)), nn.tanh(nn.Dense(width)(critic))
        return nn.Dense(self.actions)(actor), nn.Dense(1)(critic)[..., 0]


class Rows(NamedTuple):
    obs: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array


class State(NamedTuple):
    params: Any
    opt_state: Any
    env_state: Any
    obs: Array
    key: Array


class Trainer:
    """Holds what does not change, so that `update` is a function of the state alone."""

    def __init__(self, work: Work):
        self.work = work
        self.env, self.env_params = gymnax.make(work.env)
        self.net = ActorCritic(self.env.num_actions, work.hidden)
        self.apply: Any = self.net.apply
        minibatches = work.all_updates * work.epochs * work.minibatches
        schedule = optax.linear_schedule(work.lr, 0.0, minibatches)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(schedule, eps=ADAM_EPS)
        )

    def init(self, key: Array) -> State:
        key, net_key, reset_key = jax.random.split(key, 3)
        reset_keys = jax.random.split(reset_key, self.work.envs)
        obs, env_state = jax.vmap(self.env.reset, (0, None))(reset_keys, self.env_params)
        params = self.net.init(net_key, obs)
        return State(params, self.optimizer.init(params), env_state, obs, key)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(self, state: State) -> State:
        (env_state, obs, key), rows = jax.lax.scan(
            partial(self._step, state.params),
            (state.env_state, state.obs, state.key),
            length=self.work.steps,
        )
        advantage = gae(rows, self.apply(state.params, obs)[1])
        batch = (rows, advantage, advantage + rows.value)
        batch = jax.tree.map(lambda x: x.reshape(self.work.batch, *x.shape[2:]), batch)
        key, learn_key = jax.random.split(key)
        (params, opt_state), _ = jax.lax.scan(
            partial(self._epoch, batch),
            (state.params, state.opt_state),
            jax.random.split(learn_key, self.work.epochs),
        )
        return State(params, opt_state, env_state, obs, key)

    def _step(self, params: Any, carry: Any, _: None) -> tuple[Any, Rows]:
        env_state, obs, key = carry
        key, action_key, step_key = jax.random.split(key, 3)
        logits, value = self.apply(params, obs)
        action = jax.random.categorical(action_key, logits)
        step_keys = jax.random.split(step_key, self.work.envs)
        next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(
            self.env.step, (0, 0, 0, None)
        )(step_keys, env_state, action, self.env_params)
        rows = Rows(obs, action, log_prob_of(logits, action), value, reward, terminated | truncated)
        return (env_state, next_obs, key), rows

    def _epoch(self, batch: Any, carry: Any, key: Array) -> tuple[Any, None]:
        order = jax.random.permutation(key, self.work.batch)
        order = order.reshape(self.work.minibatches, -1)
        minibatches = jax.tree.map(lambda x: x[order], batch)
        return jax.lax.scan(self._minibatch, carry, minibatches)

    def _minibatch(self, carry: Any, minibatch: Any) -> tuple[Any, None]:
        params, opt_state = carry
        gradient = jax.grad(self._loss)(params, *minibatch)
        change, opt_state = self.optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, change), opt_state), None

    def _loss(self, params: Any, rows: Rows, advantage: Array, target: Array) -> Array:
        logits, value = self.apply(params, rows.obs)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(log_prob_of(logits, rows.action) - rows.log_prob)
        clip = self.work.clip
        clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
        policy = -jnp.minimum(ratio * advantage, clipped * advantage)
        bounded = rows.value + jnp.clip(value - rows.value, -clip, clip)
        error = jnp.maximum((value - target) ** 2, (bounded - target) ** 2)
        log_p = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.mean(policy + VALUE_COEF * 0.5 * error - self.work.entropy * entropy)


def log_prob_of(logits: Array, action: Array) -> Array:
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, action[..., None], axis=-1)[..., 0]


def gae(rows: Rows, last_value: Array) -> Array:
    next_value = jnp.concatenate([rows.value[1:], last_value[None]])
    goes_on = 1.0 - rows.done
    delta = rows.reward + GAMMA * goes_on * next_value - rows.value

    def backward(advantage: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, goes_on = x
        advantage = delta + GAMMA * GAE_LAMBDA * goes_on * advantage
        return advantage, advantage

    start = jnp.zeros_like(last_value)
    return jax.lax.scan(backward, start, (delta, goes_on), reverse=True)[1]


def main() -> None:
    work, _ = read_work(argparse.ArgumentParser(description=__doc__))
    trainer = Trainer(work)
    state = trainer.init(jax.random.PRNGKey(SEED))
    clock = Clock("one process, one jit")
    for _ in range(work.all_updates):
        state = jax.block_until_ready(trainer.update(state))
        clock.update(work.batch)


if __name__ == "__main__":
    main()

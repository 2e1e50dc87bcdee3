"""A whole update against the same written plainly: a loop, means instead of sums, optax by leaf."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig
from spmdrl.learning.minibatches import Steps
from spmdrl.nets.policy import variables_of
from spmdrl.runtime.build import build_trainer
from spmdrl.types import Rollout

ALGO = Ppo(num_steps=32, epochs=3, minibatches=4, entropy_coef=0.01, clip_value=True)
CARTPOLE = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8),
    algo=ALGO,
    optim=OptimConfig(lr=3e-3, lr_schedule="constant", max_grad_norm=0.3),
)
SWING = dataclasses.replace(
    CARTPOLE,
    env=EnvConfig(id="HalfCheetah-v4", num_envs=8),
    net=NetConfig(shared=True),
    algo=dataclasses.replace(ALGO, clip_value=False, normalize_advantage="none"),
)
# Two chunks of images a minibatch. Adam turns noise into whole steps where a gradient is nothing
# else, so its epsilon is large.
PONG = dataclasses.replace(
    CARTPOLE,
    env=EnvConfig(id="Pong-v5", num_envs=8),
    algo=dataclasses.replace(ALGO, epochs=1),
    optim=dataclasses.replace(CARTPOLE.optim, lr=6e-3, adam_eps=1e-3),
)


def advantages(config: Config, rows: Rollout, last_value: np.ndarray) -> np.ndarray:
    """From behind: a time limit cuts the trace, an end also what comes after."""
    assert isinstance(config.algo, Ppo)
    gamma, lam = config.algo.gamma, config.algo.gae_lambda
    after, values = np.zeros_like(last_value), [*rows.value, last_value]
    found = np.zeros_like(rows.value)
    for t in reversed(range(len(rows.reward))):
        goes_on = 1.0 - rows.terminated[t]
        error = rows.reward[t] + gamma * goes_on * values[t + 1] - values[t]
        after = found[t] = error + gamma * lam * goes_on * (1.0 - rows.truncated[t]) * after
    return found


def plain_loss(config: Config, policy: Any, params: Any, rows: dict[str, Any]) -> jax.Array:
    algo = config.algo
    assert isinstance(algo, Ppo)
    first = jnp.zeros(len(rows["obs"]), bool)
    _, dist_params, value = policy.apply(variables_of(params, ()), (), rows["obs"], first)
    advantage = rows["advantage"]
    if algo.normalize_advantage == "minibatch":
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    ratio = jnp.exp(policy.dist.log_prob(dist_params, rows["action"]) - rows["log_prob"])
    bounded = jnp.clip(ratio, 1 - algo.clip_eps, 1 + algo.clip_eps)
    gain = jnp.minimum(ratio * advantage, bounded * advantage)
    error = (value - rows["target"]) ** 2
    if algo.clip_value:
        near = rows["value"] + jnp.clip(value - rows["value"], -algo.clip_eps, algo.clip_eps)
        error = jnp.maximum(error, (near - rows["target"]) ** 2)
    entropy = policy.dist.entropy(dist_params)
    return jnp.mean(-gain + algo.value_coef * 0.5 * error - algo.entropy_coef * entropy)


def learn_plainly(config: Config, policy: Any, params: Any, rollout: Rollout, key: Any) -> Any:
    algo, optim = config.algo, config.optim
    variables = variables_of(params, ())
    _, _, last_value = policy.apply(variables, (), rollout.last_obs, rollout.last_first)
    rows = jax.tree.map(np.asarray, rollout)
    advantage = advantages(config, rows, np.asarray(last_value))
    columns = {name: getattr(rows, name) for name in ("obs", "action", "log_prob", "value")}
    columns |= {"advantage": advantage, "target": advantage + rows.value}
    selector = Steps(algo.epochs, algo.minibatches, algo.num_steps)
    order = selector.order(jax.random.fold_in(key, 0), rollout.env_ids)
    optimizer = optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.adam(optim.lr, optim.adam_b1, optim.adam_b2, optim.adam_eps),
    )
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, minibatch: dict[str, Any]) -> tuple[Any, Any]:
        gradient = jax.grad(partial(plain_loss, config, policy))(params, minibatch)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state

    for epoch in np.asarray(order):
        for steps in np.split(epoch, algo.minibatches):
            env = np.broadcast_to(np.arange(steps.shape[1]), steps.shape)
            chosen = rows.valid[steps, env]
            minibatch = {k: jnp.asarray(x[steps, env][chosen]) for k, x in columns.items()}
            params, state = step(params, state, minibatch)
    return params


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CARTPOLE, marks=pytest.mark.slow),
        SWING,
        pytest.param(PONG, marks=pytest.mark.slow),
    ],
    ids=["cartpole", "halfcheetah, one torso", "pong"],
)
def test_an_update_equals_the_same_written_plainly(config):
    trainer = build_trainer(config)
    policy, key = trainer.learner.policy, trainer.update_key
    before = jax.tree.map(np.array, trainer.state.params)
    rollout, _ = trainer.collect()
    expected = learn_plainly(config, policy, jax.tree.map(jnp.asarray, before), rollout, key)
    trainer.learn(rollout)
    learned = trainer.state
    moved = max(
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, expected)), strict=True)
    )
    assert moved > 0.01
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    jax.tree.map(close, jax.device_get(learned.params), jax.device_get(expected))

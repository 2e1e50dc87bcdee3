"""Advantage actor-critic (Mnih et al. 2016), written as a user would: one file, and a config too.

python -m spmdrl.train tests/a2c.py

One core: less than half a minute. Return 500 at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax

from spmdrl.algos import Algorithm, Minibatch, Models, Outputs
from spmdrl.algos.base import masked, valid_sum
from spmdrl.algos.returns import fold_discounts, gae
from spmdrl.config import AlgoConfig, Config, EnvConfig, OptimConfig
from spmdrl.types import Rollout


@dataclass(frozen=True)
class A2c(AlgoConfig):
    num_steps: int = 32
    epochs: int = 1
    minibatches: int = 1
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def make(self) -> Algorithm:
        reports = ("loss/policy", "loss/value", "loss/entropy")
        return Algorithm(partial(prepare, self), partial(loss, self), reports)


class Targets(NamedTuple):
    advantage: Any
    value: Any


def prepare(a2c: A2c, models: Models, rollout: Rollout) -> Targets:
    """The n-step return of every row, and what it is above the value."""
    discount_t, trace_t = fold_discounts(rollout.terminated, rollout.truncated, a2c.gamma, 1.0)
    last = (rollout.last_carry, rollout.last_obs, rollout.last_first)
    _, _, v_last = models.policy.apply(models.behaviour, *last)
    advantage = gae(rollout.reward, discount_t, trace_t, rollout.value, v_last)
    return Targets(advantage, advantage + rollout.value)


def loss(a2c: A2c, dist: Any, _: Any, outputs: Outputs, rows: Minibatch) -> tuple[Any, Any]:
    outputs, rows = masked(rows.weight, (outputs, rows))
    log_prob = dist.log_prob(outputs.dist_params, rows.action)
    terms = {
        "loss/policy": -log_prob * rows.targets.advantage,
        "loss/value": 0.5 * (outputs.value - rows.targets.value) ** 2,
        "loss/entropy": dist.entropy(outputs.dist_params),
    }
    total = jax.tree.map(partial(valid_sum, rows.weight), terms)
    bonus = a2c.entropy_coef * total["loss/entropy"]
    return total["loss/policy"] + a2c.value_coef * total["loss/value"] - bonus, total


config = Config(
    total_steps=1_500_000,
    env=EnvConfig(id="CartPole-v1", num_envs=32),
    algo=A2c(),
    optim=OptimConfig(lr=2e-3, max_grad_norm=0.5),
)

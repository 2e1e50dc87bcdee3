"""Impala and Appo: what they are at lag 0, at time limits, with memory and on the command line."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from spmdrl.algos import Appo, Impala, Ppo
from spmdrl.config import AlgoConfig, Config, ConfigError, EnvConfig, NetConfig, load
from spmdrl.config.rules import check_fields
from spmdrl.runtime.build import build_trainer
from spmdrl.runtime.session import lag_note
from tests.children import ROOT

SIZES: dict[str, Any] = {"num_steps": 24, "minibatches": 2}
LIMITED = EnvConfig(  # every episode ends by its limit within a rollout
    id="CartPole-v1", num_envs=8, normalize_obs=True, options={"max_episode_steps": 5}
)
LSTM = NetConfig(hidden=(16,), core="lstm", core_size=8)
NETS = [
    pytest.param(NetConfig(hidden=(16,)), id="mlp"),
    pytest.param(LSTM, id="lstm", marks=pytest.mark.slow),
]


def trained(algo: AlgoConfig, net: NetConfig, lag: int = 0, updates: int = 2):
    """Parameters as one vector, and the last update's metrics."""
    config = Config(env=LIMITED, algo=algo, net=net, lag=lag, total_steps=10_000)
    trainer = build_trainer(config)
    for _ in range(updates):
        report = trainer.learn(trainer.collect()[0])
        assert not report.nonfinite.any()
    leaves = jax.tree.leaves(jax.device_get(trainer.state.params))
    return np.concatenate([x.ravel() for x in leaves]), report.metrics


@pytest.mark.parametrize("net", NETS)
def test_appo_without_lag_is_ppo(net):
    ours, metrics = trained(Appo(epochs=2, **SIZES), net)
    theirs, _ = trained(Ppo(epochs=2, **SIZES), net)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert float(metrics["vtrace/rho_mean"]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("net", NETS)
def test_impala_learns_from_one_minibatch_as_on_policy_ppo_does(net):
    """Before the first step ratios are 1: the gradient of PPO's surrogate is the policy gradient,
    and values after a time limit are those that the actor saw."""
    one: dict[str, Any] = {"num_steps": 24, "minibatches": 1, "epochs": 1, "gae_lambda": 0.9}
    ours, metrics = trained(Impala(**one), net, updates=1)
    plain = Ppo(**one, normalize_advantage="none", clip_value=False)
    theirs, _ = trained(plain, net, updates=1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert float(metrics["vtrace/rho_mean"]) == pytest.approx(1.0, abs=1e-4)


def test_lag_moves_the_ratios_away_from_one():
    _, metrics = trained(Impala(**SIZES), NetConfig(hidden=(16,)), lag=2, updates=4)
    assert abs(float(metrics["vtrace/rho_mean"]) - 1.0) > 1e-5
    config = Config(algo=Impala(), lag=3)
    assert lag_note(config) == "; lag 3, corrected"


def test_impala_learns_once():
    with pytest.raises(ConfigError, match="impala learns once from a rollout; appo takes several"):
        check_fields(Config(algo=Impala(epochs=4)))


def test_flags_of_their_own():
    config = load([str(ROOT / "configs/cartpole_impala.py"), "--algo.rho-clip", "2", "--lag", "4"])
    assert isinstance(config.algo, Impala)
    assert (config.algo.rho_clip, config.lag) == (2.0, 4)
    with pytest.raises(ConfigError, match=r"no field --algo\.clip-eps"):
        load([str(ROOT / "configs/cartpole_impala.py"), "--algo.clip-eps", "2"])

"""Rollouts and updates as a whole, on one device."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
import pytest
from beartype.door import is_bearable
from jaxtyping import jaxtyped

from spmdrl.acting import collector as collector_module
from spmdrl.acting.collector import Collector
from spmdrl.acting.compiled import CompiledActor
from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, SyncConfig
from spmdrl.learning.state import init_train_state
from spmdrl.nets.policy import variables_of
from spmdrl.parallel import platforms
from spmdrl.parallel.guards import KINDS, NotFinite, NotFiniteError
from spmdrl.parallel.mesh import replicate
from spmdrl.runtime.build import build_trainer
from spmdrl.types import Report, Rollout, TrainState, Tree

PPO = Ppo(num_steps=32, epochs=2, minibatches=2)
SMALL = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8),
    algo=PPO,
)
SWING = dataclasses.replace(SMALL, env=EnvConfig(id="HalfCheetah-v4", num_envs=8))


class Setup:
    """A trainer whose updates all start from the same state."""

    def __init__(self, config: Config):
        self.config, self.trainer = config, build_trainer(config)
        assert isinstance(self.trainer.collector, Collector)
        self.collector, self.policy = self.trainer.collector, self.trainer.learner.policy
        self.key = replicate(jax.random.PRNGKey(3), self.trainer.mesh)

    def state(self) -> TrainState:
        key = jax.random.PRNGKey(0)
        state = init_train_state(self.config, self.policy, self.collector.spec, key)
        return replicate(state, self.trainer.mesh)

    def collect(self) -> Rollout:
        return self.collector.collect(self.state(), self.key)[0]

    def update(self, rollout: Rollout) -> tuple[TrainState, Report]:
        return self.trainer.update(self.state(), rollout, self.key)


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(as_numpy(a)), jax.tree.leaves(as_numpy(b)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def cartpole() -> tuple[Setup, Rollout]:
    setup = Setup(SMALL)
    return setup, setup.collect()


def in_a_loop(config: Config, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """As on an accelerator: the simulator is called from Python."""
    with monkeypatch.context() as patch:
        patch.setattr(collector_module, "simulates_inside", lambda *_: False)
        return Setup(config)


def with_envs(config: Config, num_envs: int) -> Config:
    return dataclasses.replace(config, env=dataclasses.replace(config.env, num_envs=num_envs))


@pytest.mark.parametrize(
    ("config", "num_envs"),
    [
        (SMALL, 8),
        pytest.param(SMALL, 32, marks=pytest.mark.slow),
        pytest.param(SWING, 8, marks=pytest.mark.slow),
        pytest.param(SWING, 32, marks=pytest.mark.slow),
    ],
    ids=["cartpole", "cartpole, two groups", "halfcheetah", "halfcheetah, two groups"],
)
def test_the_compiled_rollout_equals_the_python_loop(config, num_envs, monkeypatch):
    scan = Setup(with_envs(config, num_envs))
    loop = in_a_loop(scan.config, monkeypatch)
    assert isinstance(scan.collector.actors[0], CompiledActor)
    assert len(loop.collector.actors[0].groups) == (2 if num_envs == 32 else 1)
    a, b = as_numpy(scan.collect()), as_numpy(loop.collect())
    for name in ("obs", "action", "reward", "terminated", "truncated", "valid", "first"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    np.testing.assert_allclose(a.log_prob, b.log_prob, atol=1e-5)
    np.testing.assert_allclose(a.value, b.value, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["two torsos", "one torso"])
@pytest.mark.parametrize(("shards", "at_once"), [(1, 40), (4, 40), (1, None)])
def test_scores_equal_the_policy_asked_step_by_step(shards, at_once, shared, monkeypatch):
    # 32 steps in blocks of 5 and a rest of 2, or with shards of two environments 20 and 12
    liked = dataclasses.replace(platforms.CPU, value_rows=at_once)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", liked)
    config = dataclasses.replace(SMALL, net=NetConfig(shared=shared))
    if shards > 1:
        ordered = SyncConfig(deterministic=True, shards=shards)
        config = dataclasses.replace(config, sync=ordered)
    setup = Setup(config)
    rollout, policy = setup.collect(), setup.policy
    assert policy.separate_critic is not shared
    variables = variables_of(setup.state().params, ())
    for t in range(config.algo.num_steps):
        _, dist_params, value = policy.apply(variables, (), rollout.obs[t], rollout.first[t])
        log_prob = policy.dist.log_prob(dist_params, rollout.action[t])
        np.testing.assert_allclose(rollout.value[t], value, atol=1e-6)
        np.testing.assert_allclose(rollout.log_prob[t], log_prob, atol=1e-6)


@pytest.mark.slow
def test_nothing_moves_between_host_and_device_unasked(monkeypatch):
    scan, loop = Setup(SMALL), in_a_loop(with_envs(SMALL, 16), monkeypatch)
    for setup in (scan, loop):
        state = setup.state()
        for _ in range(2):
            with jax.transfer_guard("disallow"):
                rollout, _ = setup.collector.collect(state, setup.key)
                state, report = setup.trainer.update(state, rollout, setup.key)
                jax.device_get(report)


def misfits(tree: Tree) -> list[str]:
    """The fields that are not of the shape and type that is written beside their names."""
    hints = inspect.get_annotations(type(tree), eval_str=True)
    with jaxtyped("context"):  # T and B are the same in all of them
        return [n for n, hint in hints.items() if not is_bearable(getattr(tree, n), hint)]


def test_trees_have_the_shapes_that_their_types_say(cartpole):
    setup, rollout = cartpole
    for tree in (rollout, setup.state(), setup.collector.actors[0].state):
        assert misfits(tree) == []
    assert misfits(rollout.replace(reward=rollout.reward.T)) == ["reward"]
    assert misfits(rollout.replace(valid=rollout.reward)) == ["valid"]


def test_rows_after_an_end_are_invalid_and_start_nothing(cartpole):
    rows = as_numpy(cartpole[1])
    over = rows.terminated | rows.truncated
    assert over[:-1].any()
    assert np.array_equal(rows.valid[1:], ~over[:-1])
    assert np.array_equal(rows.first[2:], ~rows.valid[1:-1])
    assert (rows.reward[~rows.valid] == 0).all()


def test_a_reset_row_has_exactly_no_weight(cartpole):
    """Whatever its action, probability and observation are, the update has the same bits."""
    setup, rollout = cartpole
    reset = ~np.asarray(rollout.valid)
    wild = rollout.replace(
        action=np.where(reset, 1 - np.asarray(rollout.action), rollout.action),
        log_prob=np.where(reset, 7.0, rollout.log_prob).astype(np.float32),
        discounted_return=np.where(reset, np.nan, rollout.discounted_return).astype(np.float32),
        obs=np.where(reset[..., None], np.nan, rollout.obs).astype(np.float32),
    )
    assert same(setup.update(rollout), setup.update(jax.device_put(wild)))


def test_a_valid_row_has_weight(cartpole):
    setup, rollout = cartpole
    changed = np.asarray(rollout.log_prob).copy()
    t, b = np.argwhere(np.asarray(rollout.valid))[5]
    changed[t, b] += 1.0
    other = jax.device_put(rollout.replace(log_prob=changed))
    assert not same(setup.update(rollout)[0].params, setup.update(other)[0].params)


def test_first_ratios_are_one_so_the_first_policy_loss_is_minus_the_mean_advantage(cartpole):
    setup, rollout = cartpole
    variables = variables_of(setup.state().params, ())
    _, dist_params, value = setup.policy.apply(
        variables, (), rollout.obs.reshape(-1, 4), rollout.first.reshape(-1)
    )
    log_prob = setup.policy.dist.log_prob(dist_params, rollout.action.reshape(-1))
    ratio = np.exp(np.asarray(log_prob) - np.asarray(rollout.log_prob).reshape(-1))
    np.testing.assert_allclose(ratio, 1.0, atol=1e-5)

    _, _, last = setup.policy.apply(variables, (), rollout.last_obs, rollout.last_first)
    values = np.concatenate([np.asarray(value).reshape(rollout.value.shape), last[None]])
    expected = -advantage_by_hand(as_numpy(rollout), values)[np.asarray(rollout.valid)].mean()
    assert abs(expected) > 0.1  # either sign would do for 0
    algo = dataclasses.replace(PPO, epochs=1, minibatches=1, normalize_advantage="none")
    metrics = Setup(dataclasses.replace(SMALL, algo=algo)).update(rollout)[1].metrics
    assert float(metrics["loss/policy"]) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["ppo/approx_kl"]) == pytest.approx(0.0, abs=1e-6)


def advantage_by_hand(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """GAE of an environment without time limits, one step at a time."""
    gamma, lambda_ = PPO.gamma, PPO.gae_lambda
    found, later = np.zeros_like(rollout.reward), 0.0
    for t in reversed(range(len(found))):
        goes_on = 1.0 - rollout.terminated[t]
        delta = rollout.reward[t] + gamma * goes_on * values[t + 1] - values[t]
        found[t] = later = delta + gamma * lambda_ * goes_on * later
    return found


@pytest.mark.slow
def test_target_kl_stops_the_epochs(cartpole):
    _, rollout = cartpole

    def params_after(epochs: int, target_kl: float | None) -> Any:
        algo = dataclasses.replace(PPO, epochs=epochs, target_kl=target_kl)
        return Setup(dataclasses.replace(SMALL, algo=algo)).update(rollout)[0].params

    one, stopped, free = params_after(1, None), params_after(3, 1e-12), params_after(3, None)
    assert same(one, stopped)
    assert not same(one, free)


BREAKS = [
    ("observation", "obs", (4, 2, 1)),
    ("observation", "last_obs", (2, 1)),
    ("reward", "reward", (4, 2)),
    ("network output", "log_prob", (4, 2)),
]


@pytest.mark.parametrize(("kind", "name", "at"), BREAKS)
def test_numbers_that_are_not_finite_change_nothing_and_are_reported(cartpole, kind, name, at):
    setup, rollout = cartpole
    broken = np.asarray(getattr(rollout, name)).copy()
    broken[at] = np.nan
    assert np.asarray(rollout.valid)[[4, -1], 2].all()
    assert not np.asarray(rollout.terminated)[-1, 2]
    state, report = setup.update(jax.device_put(rollout.replace(**{name: broken})))
    assert same(state.params, setup.state().params)
    nonfinite = np.asarray(report.nonfinite)
    assert np.argmax(nonfinite.any(axis=1)) == KINDS.index(kind)  # the first kind
    with pytest.raises(NotFiniteError, match=f"non-finite {kind} on rank 0 in update 7"):
        NotFinite(SyncConfig(), devices=1).check(nonfinite, step=7)
    patient = NotFinite(SyncConfig(on_nonfinite="skip", max_skips=2), devices=1)
    patient.check(nonfinite, step=0)
    with pytest.raises(NotFiniteError, match="in a row"):
        patient.check(nonfinite, step=1)


def test_a_sound_rollout_raises_nothing(cartpole):
    setup, rollout = cartpole
    assert not np.asarray(setup.update(rollout)[1].nonfinite).any()

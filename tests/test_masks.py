"""Action masks from the environment to the distribution, and all the way through a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig, to_json
from spmdrl.envs import make_env
from spmdrl.envs.observations import make_reader
from spmdrl.episodes import Recording
from spmdrl.nets.distributions import Categorical
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer
from spmdrl.types import MASK, ObsPart
from tests.children import succeed
from tests.spmd.runs import run, updates

MASKED = Config(
    env=EnvConfig(id="tests.masked:Masked-v0", backend="gymnasium", num_envs=8),
    net=NetConfig(hidden=(32,)),
    algo=Ppo(num_steps=32, epochs=4, minibatches=2),
    optim=OptimConfig(lr=1e-2, lr_schedule="constant"),
)
DISCRETE, MULTI = Categorical((4,), squeeze=True), Categorical((3, 2), squeeze=False)
ALLOWED = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
LOGITS = np.random.default_rng(0).normal(0, 3, (4, 4)).astype(np.float32)


# ---------------------------------------------------------------------------------------------
# The distribution


def test_a_forbidden_action_has_no_probability_at_all():
    params = DISCRETE.masked(jnp.asarray(LOGITS), jnp.asarray(ALLOWED))
    every = [DISCRETE.log_prob(params, jnp.full(4, a, jnp.int32)) for a in range(4)]
    probability = np.exp(np.stack(every, -1))
    np.testing.assert_array_equal(probability[:3][~ALLOWED[:3]], 0.0)
    np.testing.assert_allclose(probability.sum(-1), 1.0, rtol=1e-6)
    by_hand = np.where(ALLOWED, np.exp(LOGITS.astype(np.float64)), 0.0)
    by_hand = by_hand[:3] / by_hand[:3].sum(-1, keepdims=True)
    np.testing.assert_allclose(probability[:3], by_hand, rtol=1e-4)


def test_where_everything_is_forbidden_nothing_is():
    params = DISCRETE.masked(jnp.asarray(LOGITS), jnp.asarray(ALLOWED))
    np.testing.assert_array_equal(params[3], LOGITS[3])


def test_forbidden_actions_are_neither_drawn_nor_the_mode():
    params = DISCRETE.masked(jnp.asarray(LOGITS), jnp.asarray(ALLOWED))
    noise = DISCRETE.noise(jax.random.key(0), (5000, 4))
    drawn = np.asarray(DISCRETE.sample(params, noise))
    assert all(set(drawn[:, row]) <= set(np.flatnonzero(ALLOWED[row])) for row in range(3))
    assert ALLOWED[np.arange(3), np.asarray(DISCRETE.mode(params))[:3]].all()
    assert set(drawn[:, 1]) == {3}


def test_entropy_is_that_of_the_allowed_actions():
    entropy = np.asarray(DISCRETE.entropy(DISCRETE.masked(jnp.zeros((4, 4)), jnp.asarray(ALLOWED))))
    np.testing.assert_allclose(entropy, np.log([2, 1, 4, 4]), atol=1e-6)


def test_gradients_are_finite_and_forbidden_actions_get_none():
    def total(logits: Any) -> Any:
        params = DISCRETE.masked(logits, jnp.asarray(ALLOWED))
        chosen = jnp.array([0, 3, 2, 1])
        return (DISCRETE.log_prob(params, chosen) + DISCRETE.entropy(params)).sum()

    gradient = np.asarray(jax.grad(total)(jnp.asarray(LOGITS)))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:3][~ALLOWED[:3]], 0.0)
    assert np.abs(gradient[0][ALLOWED[0]]).min() > 0


def test_each_component_has_its_own_part_of_the_mask():
    allowed = jnp.array([[0, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    params = MULTI.masked(jnp.asarray(LOGITS[:2, :1] * np.arange(5, dtype=np.float32)), allowed)
    drawn = np.asarray(MULTI.sample(params, MULTI.noise(jax.random.key(1), (2000, 2))))
    assert set(drawn[:, 0, 0]) == {1}
    assert set(drawn[:, 0, 1]) == {0, 1}, "all of it forbidden: all of it left"
    assert set(drawn[:, 1, 1]) == {0}


# ---------------------------------------------------------------------------------------------
# Reading


def test_a_mask_inside_the_observation_is_a_part_of_its_own():
    env = make_env(MASKED, range(3))
    assert env.spec.parts[MASK] == ObsPart((5,), np.dtype(bool), "mask")
    obs = env.reset()
    assert (obs[MASK].dtype, obs[MASK].sum(-1).tolist()) == (bool, [3, 3, 3])
    assert obs["vector"].shape == (3, 5)
    env.close()


@pytest.mark.parametrize("name", ["action_mask", "legal_action_mask"])
def test_a_mask_in_info_is_read_like_one_in_the_observation(name):
    reader = make_reader(
        gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3), "x", {name: (3,), "other": (7,)}
    )
    assert set(reader.spec.parts) == {"vector", MASK}
    info = {name: np.array([[True, False, True]]), "other": np.zeros((1, 7), bool)}
    read = reader.read(np.zeros((1, 2)), np, info)
    assert read[MASK].tolist() == [[True, False, True]]
    assert read["vector"].shape == (1, 2)


def test_a_mask_over_combinations_is_read_in_their_order():
    space = gym.spaces.Dict(
        x=gym.spaces.Box(-1, 1, (2,)), action_mask=gym.spaces.MultiBinary((4, 3))
    )
    reader = make_reader(space, gym.spaces.Box(0, np.array([3, 2]), dtype=np.int32), "x")
    assert reader.spec.action.joint == (4, 3)
    mask = np.zeros((1, 4, 3), bool)
    mask[0, 2, 1] = True
    read = reader.read({"x": np.zeros((1, 2)), "action_mask": mask}, np)
    assert np.unravel_index(read[MASK][0].argmax(), (4, 3)) == (2, 1)


# ---------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "run"
    run(updates(MASKED, 3), 1, World(), folder)
    (folder / "config.json").write_text(to_json(replace(MASKED, run_dir=str(folder))))
    return folder


@pytest.mark.slow
def test_a_masked_task_is_learned_without_one_forbidden_action():
    """The environment raises at the first of them."""
    trainer = build_trainer(MASKED)
    scores = []
    for _ in range(25):
        rollout, _ = trainer.collect()
        valid = np.asarray(rollout.valid)
        mask = np.asarray(rollout.obs[MASK])[valid]
        assert mask[np.arange(len(mask)), np.asarray(rollout.action)[valid]].all()
        scores.append(float(np.asarray(rollout.reward)[valid].mean()))
        report = trainer.learn(rollout)
        assert not np.asarray(report.nonfinite).any()
    assert scores[0] == pytest.approx(1 / 3, abs=0.12), "one of three that are allowed"
    assert np.mean(scores[-3:]) > 0.9


@pytest.mark.slow
def test_evaluating_recording_and_cloning_respect_it(trained, tmp_path):
    out = tmp_path / "episodes"
    succeed("-m", "spmdrl.evaluate", trained, "--episodes", 4, "--trust")
    succeed("-m", "spmdrl.record", trained, "--out", out, "--episodes", 4, "--trust")
    assert Recording(out).spec().parts[MASK].kind == "mask"
    learned = tmp_path / "clone"
    words = ["--epochs", 1, "--eval-episodes", 2, "--trust"]
    succeed("-m", "spmdrl.clone", out, "--run-dir", learned, *words)
    assert json.loads((learned / "eval.json").read_text())["episodes"] == 2

"""Observations that are a dict: images stay images, numbers are one vector, everywhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig, OptimConfig, to_json
from spmdrl.envs import make_env
from spmdrl.envs.observations import make_reader
from spmdrl.episodes import Batches, Recording
from spmdrl.nets import make_policy, moments
from spmdrl.nets.policy import variables_of
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer
from spmdrl.types import EnvSpec, ObsPart
from tests.children import succeed
from tests.spmd.runs import rows, run, updates

PICTURES = Config(
    env=EnvConfig(
        id="tests.pictures:Pictures-v0", backend="gymnasium", num_envs=8, normalize_obs=True
    ),
    net=NetConfig(hidden=(16,)),
    algo=Ppo(num_steps=32, epochs=4, minibatches=2),
    optim=OptimConfig(lr=3e-3, lr_schedule="constant"),
)
IMAGE, VECTOR = ObsPart((12, 12, 3), np.dtype(np.uint8)), ObsPart((3,), np.dtype(np.float32))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "run"
    run(updates(PICTURES, 6), 1, World(), folder)
    (folder / "config.json").write_text(to_json(replace(PICTURES, run_dir=str(folder))))
    return folder


def test_images_keep_their_names_and_numbers_are_joined():
    env = make_env(PICTURES, range(3))
    assert env.spec.obs == {"image": IMAGE, "vector": VECTOR}
    obs = env.reset()
    assert (obs["image"].shape, obs["image"].dtype) == ((3, 12, 12, 3), np.uint8)
    assert (obs["vector"].shape, obs["vector"].dtype) == ((3, 3), np.float32)
    assert obs["vector"][:, 0].tolist() == [0.0, 0.0, 0.0]  # clock comes before noise
    before = {name: part.copy() for name, part in obs.items()}
    env.send(np.zeros(3, np.int32))
    later = env.recv().obs
    env.send(np.zeros(3, np.int32))
    env.recv()
    assert later["vector"][:, 0].tolist() == pytest.approx([1 / 8] * 3), "it is a copy"
    assert not np.array_equal(later["image"], before["image"])


def test_a_dict_without_images_is_one_vector_as_it_always_was():
    space = gym.spaces.Dict(b=gym.spaces.Box(-1, 1, (2,)), a=gym.spaces.Discrete(3))
    reader = make_reader(space, gym.spaces.Discrete(2), "x")
    assert reader.spec.obs == ObsPart((5,), np.dtype(np.float32))
    obs = {"b": np.array([[0.5, -0.5]]), "a": np.array([2])}
    assert reader.read(obs, np).tolist() == [[0, 0, 1, 0.5, -0.5]]


def parts_of(space: gym.spaces.Dict) -> dict[str, ObsPart]:
    found = make_reader(space, gym.spaces.Discrete(2), "x").spec.obs
    assert isinstance(found, dict)
    return found


def test_an_image_that_is_called_vector():
    space = gym.spaces.Dict(
        vector=gym.spaces.Box(0, 255, (8, 8, 1), np.uint8), x=gym.spaces.Box(0, 1, (2,))
    )
    assert set(parts_of(space)) == {"vector", "vector_"}
    assert set(parts_of(gym.spaces.Dict(i=space["vector"]))) == {"i"}


def test_the_network_sees_every_part_and_scales_the_image():
    trainer = build_trainer(PICTURES)
    params = trainer.state.params
    assert set(params["actor_torso"]) == {"image", "vector"}
    policy, spec = trainer.learner.policy, trainer.collector.spec
    variables = variables_of(params, moments.of_observations(True, spec, spec.zeros()))
    plain = spec.zeros(2)
    for name in ("image", "vector"):
        other = {**plain, name: plain[name].copy()}
        other[name][1] = 100 if name == "image" else 0.1
        obs = jax.tree.map(jnp.asarray, other)
        _, logits, value = policy.apply(variables, (), obs, jnp.zeros(2, bool))
        assert not np.allclose(logits[0], logits[1]), name
        assert not np.allclose(value[0], value[1]), name
        assert np.abs(value).max() < 10, "bytes are scaled"


@pytest.mark.slow
def test_only_vectors_are_normalised(trained):
    trainer = build_trainer(PICTURES)
    rollout, _ = trainer.collect()
    trainer.learn(rollout)
    known = jax.device_get(trainer.state.obs_moments)
    assert set(known) == {"vector"}
    seen = np.asarray(rollout.obs["vector"])[np.asarray(rollout.valid)]
    np.testing.assert_allclose(known["vector"].mean, seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.variance(known["vector"]), seen.var(0), rtol=1e-3)


@pytest.mark.slow
def test_it_learns_what_only_the_image_shows():
    trainer = build_trainer(PICTURES)
    scores = []
    for _ in range(25):
        rollout, _ = trainer.collect()
        scores.append(float(np.asarray(rollout.reward)[np.asarray(rollout.valid)].mean()))
        trainer.learn(rollout)
    assert scores[0] == pytest.approx(0.5, abs=0.15)
    assert np.mean(scores[-3:]) > 0.9


@pytest.mark.slow
def test_resuming_is_exact(trained, tmp_path):
    copy = tmp_path / "cut"
    shutil.copytree(trained, copy)
    for step in (4, 5, 6):
        shutil.rmtree(copy / "checkpoints" / f"update-{step:08d}")
    run(updates(PICTURES, 6), 1, World(), copy)
    sha = [json.loads((d / "summary-0.json").read_text())["params_sha256"] for d in (copy, trained)]
    assert sha[0] == sha[1]
    assert rows(copy) == rows(trained)


@pytest.mark.slow
def test_it_is_evaluated_recorded_and_cloned(trained, tmp_path):
    out = tmp_path / "episodes"
    succeed("-m", "spmdrl.evaluate", trained, "--episodes", 4, "--trust")
    succeed("-m", "spmdrl.record", trained, "--out", out, "--episodes", 4, "--trust")
    recording = Recording(out)
    assert recording.spec().obs == {"image": IMAGE, "vector": VECTOR}
    arrays = recording.arrays(recording.episodes[0])
    assert arrays["obs/image"].shape == (8, 12, 12, 3)
    assert arrays["last_obs/vector"][0] == pytest.approx(1.0)
    batch = next(iter(Batches(recording, 5)))
    assert {name: x.shape for name, x in batch["obs"].items()} == {
        "image": (5, 12, 12, 3), "vector": (5, 3),
    }  # fmt: skip
    learned = tmp_path / "clone"
    words = ["--epochs", 1, "--eval-episodes", 2, "--trust"]
    succeed("-m", "spmdrl.clone", out, "--run-dir", learned, *words)
    assert json.loads((learned / "eval.json").read_text())["episodes"] == 2


@pytest.mark.parametrize(
    ("side", "torso", "answer"),
    [
        (12, "nature_cnn", "at least 36 x 36 pixels.*use --net.torso small_cnn"),
        (4, "small_cnn", "at least 5 x 5 pixels.*use --net.torso mlp"),
    ],
)
def test_an_image_that_is_too_small_is_refused_with_the_remedy(side, torso, answer):
    image = ObsPart((side, side, 3), np.dtype(np.uint8))
    action = make_env(PICTURES, range(1)).spec.action
    config = replace(PICTURES, net=NetConfig(torso=torso))
    with pytest.raises(ConfigError, match=answer):
        make_policy(config, EnvSpec({"image": image, "vector": VECTOR}, action))
    unasked = replace(PICTURES, net=NetConfig())
    make_policy(unasked, EnvSpec({"image": image, "vector": VECTOR}, action))

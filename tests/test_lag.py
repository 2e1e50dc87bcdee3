"""`--lag K`: rollout n by the model of update n - K, and as exact as everything else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, SyncConfig, from_json, to_json
from spmdrl.learning.state import params_sha256
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer
from spmdrl.runtime.session import lag_note
from tests.children import CARTPOLE, succeed
from tests.faults.kills import run_trials
from tests.spmd.runs import rows, run, updates

SMALL = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8, normalize_obs=True),
    algo=Ppo(num_steps=32, epochs=2, minibatches=2),
)


def lagging(lag: int, config: Config = SMALL) -> Config:
    return dataclasses.replace(updates(config, 5), lag=lag)


def by_hand(config: Config, count: int) -> str:
    """The same training, with every model kept and nothing collected ahead."""
    trainer = build_trainer(config)
    state, collector = trainer.state, trainer.collector
    models = [(state.params, state.obs_moments)]
    for n in range(count):
        params, obs_moments = models[max(0, n - config.lag)]
        actor = state.replace(params=params, obs_moments=obs_moments)
        rollout, _ = collector.collect(actor, trainer.act_key)
        state, _ = trainer.update(state, rollout, trainer.update_key)
        models.append((state.params, state.obs_moments))
    return params_sha256(jax.device_get(state.params))


def sha(folder: Path) -> str:
    return json.loads((folder / "summary-0.json").read_text())["params_sha256"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, Path]:
    """Runs with lag 1 and with lag 2."""
    folders = {lag: tmp_path_factory.mktemp("lag") / str(lag) for lag in (1, 2)}
    for lag, folder in folders.items():
        run(lagging(lag), 1, World(), folder)
    return folders


@pytest.mark.parametrize("lag", [1, 2])
def test_rollouts_come_from_so_many_updates_before(whole, lag):
    assert sha(whole[lag]) == by_hand(lagging(lag), 5)
    assert [row["rollout/lag"] for row in rows(whole[lag])] == [min(n, lag) for n in range(5)]


def test_every_lag_learns_something_else(whole):
    assert sha(whole[1]) != sha(whole[2])


def test_a_single_model_behind_keeps_its_old_names(whole):
    """Those of `--overlap`, so that its run directories resume."""

    def saved(lag: int, part: str) -> dict[str, np.ndarray]:
        return load_file(whole[lag] / "checkpoints" / "update-00000005" / f"{part}.safetensors")

    one = {name for name in saved(1, "learner") if name.startswith("behind")}
    assert "behind/0/actor_torso/Dense_0/kernel" in one
    assert "behind/1/mean" in one
    two = {name for name in saved(2, "learner") if name.startswith("behind")}
    assert two == {f"behind/{k}/{name.removeprefix('behind/')}" for k in (0, 1) for name in one}
    before = load_file(whole[1] / "checkpoints" / "update-00000004" / "params.safetensors")
    kernel = "actor_torso/Dense_0/kernel"
    np.testing.assert_array_equal(
        saved(1, "learner")[f"behind/0/{kernel}"], before[f"params/{kernel}"]
    )


def test_an_old_config_is_read():
    values = json.loads(to_json(SMALL))
    del values["lag"]
    assert from_json(json.dumps(values | {"overlap": True})) == dataclasses.replace(SMALL, lag=1)
    assert from_json(json.dumps(values | {"overlap": False})) == SMALL


def cut(folder: Path, copy: Path) -> Path:
    """The run as if it had ended after update 3."""
    shutil.copytree(folder, copy)
    for step in (4, 5):
        shutil.rmtree(copy / "checkpoints" / f"update-{step:08d}")
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("renew_every", [1000, 2], ids=["replayed", "made anew"])
def test_resuming_is_exact(lag, renew_every, tmp_path):
    config = lagging(lag)
    renewed = dataclasses.replace(config.checkpoint, renew_every=renew_every)
    config = dataclasses.replace(config, checkpoint=renewed)
    run(config, 1, World(), tmp_path / "whole")
    copy = cut(tmp_path / "whole", tmp_path / "cut")
    run(config, 1, World(), copy)
    assert sha(copy) == sha(tmp_path / "whole")
    assert rows(copy) == rows(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_ends_like_the_one_that_was_not(tmp_path):
    trials = run_trials(1, 2, tmp_path, first_seed=5, flags=("--lag", "2"))
    assert sum(t.kills for t in trials) >= 1
    assert all(t.held for t in trials)


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({}, False),
        ({"lag": 1}, True),
        ({"lag": 3}, True),
        ({"lag": 1, "sync": SyncConfig(strategy="gather")}, False),
        ({"lag": 1, "sync": SyncConfig(strategy="jax")}, False),
        ({"lag": 1, "env": EnvConfig(id="tests.jax_envs:CartPole", backend="jax")}, False),
    ],
)
def test_rollouts_are_collected_ahead_where_something_is_gained(changes, ahead):
    assert dataclasses.replace(SMALL, **changes).collects_ahead == ahead


def test_the_header_says_what_is_done_about_it():
    assert lag_note(SMALL) == ""
    assert lag_note(lagging(3)) == "; lag 3, uncorrected"


SIZES = [
    "--env.num-envs", 32, "--algo.num-steps", 16, "--total-steps", 32 * 16 * 5,
    "--sync.deterministic", "--log.panel", "off",
]  # fmt: skip
LAYOUTS = {
    "one rank": [],
    "two ranks": ["--nprocs", 2],
    "gather": ["--nprocs", 2, "--sync.strategy", "gather"],
    "jax": ["--nprocs", 2, "--sync.strategy", "jax"],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "lag"),
    [(CARTPOLE, 0), (CARTPOLE, 1), (CARTPOLE, 2)],
    ids=lambda x: Path(x).stem if isinstance(x, str) else str(x),
)
def test_the_same_bits_on_every_layout(config, lag, tmp_path):
    hashes = {}
    for name, flags in LAYOUTS.items():
        folder = tmp_path / name.replace(" ", "-")
        succeed("-m", "spmdrl.train", config, *SIZES, "--lag", lag, *flags, "--run-dir", folder)
        hashes[name] = json.loads((folder / "summary.json").read_text())["params_sha256"]
    assert len(set(hashes.values())) == 1, hashes

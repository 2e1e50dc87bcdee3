"""A run that begins with another's parameters, and schedules that have a length of their own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig, OptimConfig, changes, to_json
from spmdrl.learning.optimizer import learning_rate
from spmdrl.runtime.build import build_trainer
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot, to_named
from spmdrl.runtime.rundir import open_run
from spmdrl.runtime.validate import validate
from spmdrl.runtime.warm_start import check_init_from, read_source, source_of
from tests.children import CARTPOLE, python, succeed

SMALL = Config(
    total_steps=64,
    env=EnvConfig(num_envs=2, normalize_obs=True, normalize_reward=True),
    net=NetConfig(hidden=(8,)),
    algo=Ppo(num_steps=8, minibatches=2, epochs=1),
)


@pytest.fixture(scope="module")
def learned() -> Snapshot:
    """A checkpoint's content after two updates."""
    trainer = build_trainer(SMALL)
    for _ in range(2):
        trainer.learn(trainer.collect()[0])
    trainer.collector.close()
    state = jax.device_get(trainer.state)
    model = {"params": state.params, "obs_moments": state.obs_moments}
    rest = {"opt_state": state.opt_state, "reward_moments": state.reward_moments}
    return Snapshot(2, {"params": to_named(model), "learner": to_named(rest)}, {"return_mean": 1.0})


def first_state(config: Config, source: Snapshot):
    trainer = build_trainer(config, source=source)
    trainer.collector.close()
    return jax.device_get(trainer.state)


def equal(a, b) -> bool:
    named = to_named(a), to_named(b)
    return all(np.array_equal(named[0][k], named[1][k]) for k in named[0] | named[1])


def test_parameters_and_moments_are_taken_over_and_the_rest_begins_anew(learned):
    other = replace(SMALL, seed=7, optim=OptimConfig(lr=1e-2), env=replace(SMALL.env, num_envs=4))
    state, own = first_state(other, learned), build_trainer(other)
    own.collector.close()
    taken = to_named({"params": state.params, "obs_moments": state.obs_moments})
    assert all(np.array_equal(taken[k], v) for k, v in learned.arrays["params"].items())
    assert float(state.reward_moments.count) == learned.arrays["learner"]["reward_moments/count"]
    assert int(state.step) == 0
    assert equal(state.opt_state, own.state.opt_state), "zeros"
    assert not equal(state.params, own.state.params)


def test_reward_moments_begin_anew_where_they_are_not_used_or_not_there(learned):
    unused = replace(SMALL, env=replace(SMALL.env, normalize_reward=False))
    assert float(first_state(unused, learned).reward_moments.count) == 0
    of_a_clone = replace(learned, arrays={"params": learned.arrays["params"]})
    assert float(first_state(SMALL, of_a_clone).reward_moments.count) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"net": NetConfig(hidden=(16,))}, "params/.*this run expects"),
        ({"net": NetConfig(hidden=(8, 8))}, "other arrays than this run expects"),
        ({"env": replace(SMALL.env, id="Acrobot-v1")}, "obs_moments/mean|kernel"),
        ({"env": replace(SMALL.env, normalize_obs=False)}, "obs_moments"),
    ],
    ids=["width", "depth", "task", "normalizes"],
)
def test_another_network_is_refused(learned, change, said):
    with pytest.raises(ConfigError, match=said) as error:
        first_state(replace(SMALL, init_from="runs/x", **change), learned)
    assert "init_from runs/x" in str(error.value)


# ---------------------------------------------------------------------------------------------
# Which checkpoint


@pytest.fixture
def source(tmp_path, learned) -> Path:
    folder = tmp_path / "with:colon"
    folder.mkdir()
    (folder / "config.json").write_text(to_json(SMALL))
    keeper = Checkpointer(folder / "checkpoints", keep=5)
    for step, score in ((1, 5.0), (2, 1.0)):
        keeper.save(replace(learned, step=step, meta={"return_mean": score}))
    return folder


def test_a_checkpoint_is_named_after_the_colon(source):
    assert source_of(str(source)).name == "update-00000002"
    assert source_of(f"{source}:best").name == "update-00000001"
    assert source_of(f"{source}:1").name == "update-00000001"
    with pytest.raises(ConfigError, match="no checkpoint of update 9; there are: 1, 2"):
        source_of(f"{source}:9")


def test_what_a_run_began_with_is_written_down(source, tmp_path):
    config = replace(SMALL, init_from=f"{source}:1", run_dir=str(tmp_path / "new"))
    run = open_run(config)
    snapshot = read_source(config, run.path)
    assert snapshot is not None
    assert snapshot.step == 1
    about = json.loads((run.path / "init.json").read_text())
    assert about["checkpoint"].endswith("update-00000001")
    assert about["init_from"] == f"{source}:1"


def test_a_run_that_has_begun_does_not_need_the_other_one(source, tmp_path):
    config = replace(SMALL, init_from=str(source), run_dir=str(tmp_path / "new"))
    check_init_from(config)
    shutil.copytree(source / "checkpoints", tmp_path / "new" / "checkpoints")
    shutil.rmtree(source)
    check_init_from(config)
    assert read_source(config, tmp_path / "new") is None
    with pytest.raises(ConfigError, match="is not a run directory"):
        check_init_from(replace(config, restart=True))


def test_a_damaged_checkpoint_is_refused(source, tmp_path):
    (source_of(str(source)) / "params.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is damaged"):
        read_source(replace(SMALL, init_from=str(source)), tmp_path)


def test_a_resumed_run_keeps_its_beginning():
    assert changes(SMALL, replace(SMALL, init_from="x")) == ["init_from: None -> 'x'"]


# ---------------------------------------------------------------------------------------------
# Schedules


def rates(config: Config) -> list[float]:
    steps = range(config.num_updates)
    return [float(learning_rate(config, jnp.asarray(n, jnp.int32))) for n in steps]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_first_half_of_a_schedule_is_that_of_the_whole_run(schedule, warmup):
    optim = OptimConfig(lr_schedule=schedule, warmup=warmup)
    whole = replace(SMALL, optim=optim, total_steps=128)
    half = replace(whole, total_steps=64, schedule_steps=128)
    validate(half)
    assert rates(half) == rates(whole)[:4]
    assert rates(replace(half, schedule_steps=0)) != rates(whole)[:4]


def test_a_run_that_gets_more_steps_says_what_becomes_of_its_schedules(tmp_path):
    config = replace(SMALL, run_dir=str(tmp_path / "run"))
    assert open_run(config).notes == ()
    [note] = open_run(replace(config, total_steps=128)).notes
    assert "schedules now end at step 128 instead of 64" in note
    assert open_run(replace(config, total_steps=256, schedule_steps=128)).notes == ()


# ---------------------------------------------------------------------------------------------
# As a user types it

TINY = ["--env.num-envs", "2", "--algo.num-steps", "8", "--net.hidden", "8", "--log.panel", "off"]


@pytest.mark.slow
def test_train_from_another_run_and_resume(tmp_path):
    train = ["-m", "spmdrl.train", CARTPOLE, *TINY]
    one, two = tmp_path / "one", tmp_path / "two"
    succeed(*train, "--total-steps", "32", "--run-dir", one)
    again = [*train, "--init-from", f"{one}:2", "--optim.lr", "1e-2", "--run-dir", two]
    succeed(*again, "--total-steps", "32", "--nprocs", "2")
    log = (two / "log.txt").read_text()
    assert f"begins with the parameters of {one}:2, update 2" in log
    shutil.rmtree(one)
    succeed(*again, "--total-steps", "64")
    log = (two / "log.txt").read_text()
    assert "resumed at update 2 of 4" in log
    assert "schedules now end at step 64 instead of 32" in log
    refused = python(*train, "--init-from", two, "--net.hidden", "16", "--total-steps", "32")
    assert refused.returncode == 2
    assert f"spmdrl: init_from {two}: " in refused.stderr

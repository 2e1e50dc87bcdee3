"""`--overlap`: rollouts by the model of one update before, and as exact as everything else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, SyncConfig
from spmdrl.learning.state import params_sha256
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer
from spmdrl.runtime.validate import validate
from tests.spmd.runs import rows, run, updates

SMALL = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8, normalize_obs=True),
    algo=Ppo(num_steps=32, epochs=2, minibatches=2),
    overlap=True,
)


def by_hand(config: Config, count: int) -> str:
    """The same training, written down without any overlap: rollout k by the model k - 1."""
    trainer = build_trainer(config)
    state, collector = trainer.state, trainer.collector
    models = [(state.params, state.obs_moments)]
    for k in range(count):
        params, obs_moments = models[max(0, k - 1)]
        actor = state.replace(params=params, obs_moments=obs_moments)
        rollout, _ = collector.collect(actor, trainer.act_key)
        state, _ = trainer.update(state, rollout, trainer.update_key)
        models.append((state.params, state.obs_moments))
    return params_sha256(jax.device_get(state.params))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("overlap") / "whole"
    run(updates(SMALL, 5), 1, World(), folder)
    return folder


def sha(folder: Path) -> str:
    return json.loads((folder / "summary-0.json").read_text())["params_sha256"]


def test_rollouts_come_from_one_update_before(whole):
    assert sha(whole) == by_hand(updates(SMALL, 5), 5)
    assert [row["overlap/lag"] for row in rows(whole)] == [0, 1, 1, 1, 1]


@pytest.mark.slow
def test_it_learns_something_else_than_without(whole, tmp_path):
    plain = dataclasses.replace(updates(SMALL, 5), overlap=False)
    run(plain, 1, World(), tmp_path / "plain")
    assert sha(whole) != sha(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("renew_every", [1000, 2], ids=["replayed", "made anew"])
def test_resuming_is_exact(whole, renew_every, tmp_path):
    config = updates(SMALL, 5)
    renewed = dataclasses.replace(config.checkpoint, renew_every=renew_every)
    config = dataclasses.replace(config, checkpoint=renewed)
    run(config, 1, World(), tmp_path / "whole")
    copy = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", copy)
    for step in (4, 5):
        shutil.rmtree(copy / "checkpoints" / f"update-{step:08d}")
    run(config, 1, World(), copy)
    assert sha(copy) == sha(tmp_path / "whole")
    assert rows(copy) == rows(tmp_path / "whole")


def test_only_with_averaged_gradients():
    config = dataclasses.replace(SMALL, sync=SyncConfig(strategy="gather"))
    with pytest.raises(ConfigError, match="overlap is not supported with"):
        validate(config, 2)

"""`--overlap`: rollouts by the model of one update before, and as exact as everything else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from spmdrl.acting.collector import Collector
from spmdrl.config import AlgoConfig, Config, ConfigError, EnvConfig, SyncConfig
from spmdrl.learning.update import init_train_state, make_update, params_sha256
from spmdrl.nets import make_policy
from spmdrl.parallel.mesh import local_devices, make_mesh, replicate
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.runtime.validate import validate

sys.path.insert(0, str(Path(__file__).parent / "spmd"))

from runs import rows, run, updates

SMALL = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8, normalize_obs=True),
    algo=AlgoConfig(num_steps=32, epochs=2, minibatches=2),
    overlap=True,
)


def by_hand(config: Config, count: int) -> str:
    """The same training, written down without any overlap: rollout k by the model k - 1."""
    mesh = make_mesh(local_devices(1))
    ids = range(config.env.num_envs)
    collector = Collector(config, partial(make_policy, config), mesh, ids, 1, 1)
    sync = make_grad_sync(config.sync, World(), 1)
    update = make_update(config, collector.policy, sync, mesh)
    init_key, act_key, update_key = jax.random.split(jax.random.PRNGKey(config.seed), 3)
    act_key, update_key = replicate((act_key, update_key), mesh)
    first_obs = np.asarray(collector.actors[0].state.obs)[0]
    init = partial(init_train_state, config, collector.policy, collector.spec)
    state = replicate(jax.jit(init)(init_key, first_obs), mesh)
    models = [(state.params, state.obs_moments)]
    for k in range(count):
        params, obs_moments = models[max(0, k - 1)]
        actor = state.replace(params=params, obs_moments=obs_moments)
        rollout, _ = collector.collect(actor, act_key)
        state, _ = update(state, rollout, update_key)
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


def test_it_learns_something_else_than_without(whole, tmp_path):
    plain = dataclasses.replace(updates(SMALL, 5), overlap=False)
    run(plain, 1, World(), tmp_path / "plain")
    assert sha(whole) != sha(tmp_path / "plain")


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
    with pytest.raises(ConfigError, match="overlap does not go with"):
        validate(config, 2)

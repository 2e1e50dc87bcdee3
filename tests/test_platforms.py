"""An update as accelerators like it, on the processor in their place: the same up to rounding."""

import dataclasses

import jax
import numpy as np
import pytest

from spmdrl.algos import Impala, Ppo
from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.learning.stages import whole_state
from spmdrl.learning.update import Staged, begin, run_update
from spmdrl.parallel import platforms
from spmdrl.parallel.mesh import local_devices
from spmdrl.runtime.build import build_trainer

PPO = Ppo(num_steps=16, epochs=2, minibatches=2)
CARTPOLE = Config(env=EnvConfig(id="CartPole-v1", num_envs=8), algo=PPO)
CONFIGS = {
    "steps": CARTPOLE,
    "normalized": dataclasses.replace(
        CARTPOLE, env=dataclasses.replace(CARTPOLE.env, normalize_obs=True, normalize_reward=True)
    ),
    "lstm": dataclasses.replace(CARTPOLE, net=NetConfig(core="lstm", core_size=8)),
    "impala": dataclasses.replace(CARTPOLE, algo=Impala(num_steps=16, minibatches=2)),
}


@pytest.fixture
def accelerator(monkeypatch):
    liked = dataclasses.replace(platforms.GPU, takes_all_devices=False, mpi_reads_memory=True)

    def enter():
        monkeypatch.setitem(platforms.PLATFORMS, "cpu", liked)

    return enter


def close(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_is_the_same_as_on_a_cpu(name, accelerator):
    here = build_trainer(CONFIGS[name])
    rollout, _ = here.collect()
    accelerator()
    there = build_trainer(CONFIGS[name])
    assert there.learner.flat_state
    staged = Staged(there.learner, there.mesh)
    state = jax.tree.map(lambda x: x.copy(), there.state)
    in_stages, said = run_update(there.learner, staged, state, rollout, there.update_key)
    reports = [trainer.learn(rollout) for trainer in (here, there)]
    close(there.state, here.state)
    close(in_stages, here.state)
    close(reports[1].metrics, reports[0].metrics)
    close(said.metrics, reports[0].metrics)


def test_flat_parameters_are_the_same_parameters(accelerator):
    accelerator()
    trainer = build_trainer(CARTPOLE)
    progress = begin(trainer.learner, trainer.state)
    assert progress.state.params.ndim == 1
    again = whole_state(trainer.learner, progress.state)
    assert again.params.keys() == trainer.state.params.keys()
    close(again.params, trainer.state.params)


def test_the_table_knows_every_kind_of_device(accelerator):
    assert platforms.likes("cpu") is platforms.CPU
    assert platforms.likes("gpu") is platforms.likes("cuda") is platforms.GPU
    assert platforms.likes("tpu") is platforms.TPU
    assert platforms.likes("a new one").image_rows is None
    assert len(local_devices(0)) == 1

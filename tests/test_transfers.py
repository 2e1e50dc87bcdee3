"""What crosses between host and device in rollouts that are stepped beside an accelerator.

The processor stands in for it: what it likes is exchanged, and every crossing is an explicit call,
which is counted; jax's transfer guard refuses all others.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from spmdrl.acting.collector import Collector
from spmdrl.acting.parcels import parcel_for
from spmdrl.acting.stepped import SteppedActor
from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.parallel import platforms
from spmdrl.runtime.build import build_trainer

STEPS, ENVS = 8, 16
CONFIG = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=ENVS),
    algo=Ppo(num_steps=STEPS, epochs=1, minibatches=2),
)


@pytest.fixture
def accelerator(monkeypatch):
    liked = dataclasses.replace(platforms.GPU, takes_all_devices=False, mpi_reads_memory=True)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", liked)


@pytest.fixture
def crossings(monkeypatch):
    """The arrays that went to the device and those that came back."""
    up: list[Any] = []
    down: list[Any] = []
    put, get = jax.device_put, jax.device_get

    def counted_put(tree, *args, **kwargs):
        up.extend(x for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray | np.generic))
        return put(tree, *args, **kwargs)

    def counted_get(tree):
        down.extend(jax.tree.leaves(tree))
        return get(tree)

    monkeypatch.setattr(jax, "device_put", counted_put)
    monkeypatch.setattr(jax, "device_get", counted_get)
    return up, down


@pytest.mark.parametrize("core", ["none", pytest.param("lstm", marks=pytest.mark.slow)])
def test_one_transfer_each_way_for_every_group_and_step(accelerator, crossings, core):
    config = dataclasses.replace(CONFIG, net=NetConfig(core=core, core_size=8))
    trainer, (up, down) = build_trainer(config), crossings
    assert isinstance(trainer.collector, Collector)
    actor = trainer.collector.actors[0]
    assert isinstance(actor, SteppedActor)
    groups = len(actor.groups)
    assert groups == 2
    trainer.collect()  # it shows the first observation, too
    up.clear(), down.clear()
    with jax.transfer_guard("disallow"):
        trainer.collector.collect(trainer.state, trainer.act_key)
    seen = 4 * 4 + 1  # four numbers and the flag of a first observation
    shown = [x for x in up if x.dtype == np.uint8 and x.shape == (ENVS // groups, seen)]
    assert len(shown) == STEPS * groups
    # Once in a rollout: the answers of all its steps, and where the environments were before it,
    # among it the memory: two arrays of policy and value each, for inference and for learning.
    rest = [x for x in up if not any(x is y for y in shown)]
    carries = 4 * (groups + 1) if core == "lstm" else 0
    assert len(rest) == 1 + 3 + carries
    assert rest[carries and 8].nbytes <= STEPS * ENVS * (4 + 4)
    actions = [x for x in down if x.shape == (ENVS // groups,)]
    assert len(actions) == STEPS * groups
    assert len(down) - len(actions) == 3 + (4 if core == "lstm" else 0)


@pytest.mark.slow
def test_rollouts_do_not_depend_on_how_they_travel(monkeypatch, accelerator):
    """With chunks and network alike, in parcels or array by array."""
    parcels = build_trainer(CONFIG)
    loose = dataclasses.replace(platforms.likes("cpu"), one_transfer=False)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", loose)
    arrays = build_trainer(CONFIG)
    for _ in range(2):
        pairs = zip(*(jax.tree.leaves(t.collect()[0]) for t in (parcels, arrays)), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_parcel_gives_back_what_was_put_in(accelerator):
    rng = np.random.default_rng(0)
    tree: dict[str, np.ndarray] = {
        "image": rng.integers(256, size=(3, 2, 5), dtype=np.uint8),
        "vector": rng.standard_normal((3, 4)).astype(np.float32)[:, ::2],  # not contiguous
        "id": rng.integers(-9, 9, size=3).astype(np.int32),
        "byte": rng.integers(-9, 9, size=(3, 1)).astype(np.int8),
        "flag": np.array([True, False, True]),
    }
    parcel = parcel_for(tree, "cpu")
    packed = parcel.pack(tree)
    assert (packed.shape, packed.dtype) == ((3, 10 + 8 + 4 + 1 + 1), np.uint8)
    found = jax.jit(parcel.unpack)(packed)
    for name, x in tree.items():
        assert found[name].dtype == x.dtype
        assert np.array_equal(found[name], x), name


def test_a_processor_reads_arrays_where_they_are():
    tree = (np.zeros((2, 3)), np.ones(2, bool))
    assert parcel_for(tree, "cpu").pack(tree) is tree

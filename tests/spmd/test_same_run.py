"""Topology does not matter: every layout learns what one rank on one device learns."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from spmdrl.acting import collector
from spmdrl.parallel import mpi
from spmdrl.parallel.mesh import make_mesh
from spmdrl.parallel.process import SAME_BITS_FLAG
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.verify import compare
from tests.spmd.conftest import layouts
from tests.spmd.runs import CARTPOLE, JAX, MUJOCO, PONG, rows, run, updates

TASKS = {
    "cartpole": (CARTPOLE, 3),
    "mujoco": (MUJOCO, 2),
    "pong": (PONG, 2),
    "jax": (JAX, 3),
    "lag": (dataclasses.replace(CARTPOLE, lag=2), 4),
}
if 2 not in (ranks * devices for ranks, devices in layouts()):
    del TASKS["pong"]  # two places show it, in less time
if layouts() == []:  # every layout that is compared with one device shows these two as well
    del TASKS["jax"], TASKS["lag"]
STRATEGIES = ("allreduce", "gather")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, world):
    """A folder that every rank knows."""
    return Path(world.broadcast_json(str(tmp_path_factory.mktemp("spmd"))))


@pytest.fixture(scope="session", params=TASKS)
def alone(request, shared_folder, world):
    """The run of one rank on one device, done by every rank for itself."""
    config, count = TASKS[request.param]
    folder = shared_folder / f"{request.param}-alone-{world.rank}"
    run(updates(config, count), 1, World(), folder)
    return request.param, folder


@pytest.mark.skipif(layouts() != [], reason="the layouts are compared with one device instead")
def test_the_same_run_on_one_device_gives_the_same_bits_again(alone, shared_folder, world):
    task, reference = alone
    config, count = TASKS[task]
    folder = shared_folder / f"{task}-again"
    again = run(updates(config, count), 1, world, folder)
    before = json.loads((reference / "summary-0.json").read_text())
    assert again["params_sha256"] == before["params_sha256"]
    assert rows(folder) == rows(reference)
    assert len(rows(folder)) == count


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x[0]}x{x[1]}")
def test_every_layout_learns_the_same(alone, layout, strategy, shared_folder, world):
    task, reference = alone
    _, devices = layout
    if (task == "pong" and devices * world.size > 2) or (task == "lag" and devices > 2):
        pytest.skip("fewer places show it, in less time")
    if strategy == "gather" and world.size == 1:
        pytest.skip("gather is about several ranks")
    config, count = TASKS[task]
    folder = shared_folder / f"{task}-{strategy}-{devices}"
    run(updates(config, count, strategy=strategy), devices, world, folder)
    if not world.is_root:
        return
    result = compare(task, folder, reference, count, summary="summary-0.json")
    assert result.same_rollout
    assert result.first_difference <= 1e-5
    ours, theirs = rows(folder), rows(reference)
    assert [r["episode/count"] for r in ours] == [r["episode/count"] for r in theirs]
    assert ours[-1]["episode/return_mean"] == pytest.approx(theirs[-1]["episode/return_mean"])


@pytest.mark.skipif(len(jax.local_devices()) < 2, reason="the second device is the accelerator")
def test_an_accelerator_that_mpi_does_not_reach(alone, shared_folder, world, monkeypatch):
    """Learns on one device; the other exchanges and acts."""
    task, reference = alone
    if task != "lag":
        pytest.skip("one task shows it")
    host, accelerator = jax.local_devices()[:2]
    monkeypatch.setattr(mpi, "reaches_device", lambda: False)
    monkeypatch.setattr(collector, "acting_devices", lambda config, learners: [host])
    config, count = TASKS[task]
    folder = shared_folder / f"{task}-accelerator"
    run(updates(config, count), 1, world, folder, make_mesh([accelerator]))
    if world.size > 1:
        add = make_grad_sync(config.sync, world, 1).between
        assert add is not None
        total = add(jax.device_put(np.ones((1, 3)), accelerator))
        assert total.devices() == {host}
        assert total.tolist() == 3 * [world.size]
    if world.is_root:
        assert "on the processor" in (folder / "log.txt").read_text()
        result = compare(task, folder, reference, count, summary="summary-0.json")
        assert result.same_rollout
        assert result.first_difference <= 1e-5


same_bits = pytest.mark.skipif(
    SAME_BITS_FLAG not in os.environ.get("XLA_FLAGS", "") or layouts() == [],
    reason="compares topologies, under the flag that --sync.deterministic sets",
)


@pytest.fixture(scope="session", params=["cartpole", "mujoco"])
def alone_in_order(request, shared_folder, world):
    """One rank on one device in deterministic mode."""
    config, count = TASKS[request.param]
    config = updates(config, count, deterministic=True, shards=8)
    folder = shared_folder / f"{request.param}-ordered-alone-{world.rank}"
    return request.param, config, run(config, 1, World(), folder)


@same_bits
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x[0]}x{x[1]}")
def test_deterministic_mode_gives_the_same_bits(
    alone_in_order, layout, strategy, shared_folder, world
):
    task, config, reference = alone_in_order
    _, devices = layout
    if strategy == "gather" and world.size == 1:
        pytest.skip("gather is about several ranks")
    config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, strategy=strategy))
    together = run(config, devices, world, shared_folder / f"{task}-ordered-{strategy}-{devices}")
    assert together["params_sha256"] == reference["params_sha256"]
    if world.is_root:
        assert together["episode_return_mean"] == reference["episode_return_mean"]

"""Topology does not matter: every layout learns what one rank on one device learns."""

from __future__ import annotations

import pytest
from conftest import layouts
from runs import CARTPOLE, MUJOCO, PONG, rows, run, updates

from spmdrl.verify import compare
from spmdrl.world import World

TASKS = {"cartpole": (CARTPOLE, 3), "mujoco": (MUJOCO, 2), "pong": (PONG, 2)}
STRATEGIES = ("allreduce", "gather")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, world):
    """A folder that every rank knows."""
    from pathlib import Path

    return Path(world.broadcast_json(str(tmp_path_factory.mktemp("spmd"))))


@pytest.fixture(scope="session", params=TASKS)
def alone(request, shared_folder, world):
    """The run of one rank on one device, done by every rank for itself."""
    config, count = TASKS[request.param]
    folder = shared_folder / f"{request.param}-alone-{world.rank}"
    run(updates(config, count), 1, World(), folder)
    return request.param, folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x[0]}x{x[1]}")
def test_every_layout_learns_the_same(alone, layout, strategy, shared_folder, world):
    task, reference = alone
    _, devices = layout
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


@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x[0]}x{x[1]}")
@pytest.mark.parametrize("task", ["cartpole", "mujoco"])
def test_deterministic_mode_gives_the_same_bits(task, layout, shared_folder, world):
    _, devices = layout
    config, count = TASKS[task]
    config = updates(config, count, deterministic=True, shards=8)
    reference = run(config, 1, World(), shared_folder / f"{task}-det-alone-{world.rank}-{devices}")
    together = run(config, devices, world, shared_folder / f"{task}-det-{devices}")
    assert together["params_sha256"] == reference["params_sha256"]
    assert together["episode_return_mean"] == reference["episode_return_mean"] or not world.is_root

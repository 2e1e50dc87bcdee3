"""Sums over ranks, by every way that there is; sub-groups of ranks; what rank 0 decides."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmdrl.config import ConfigError, NetConfig, SyncConfig
from spmdrl.parallel import mpi
from spmdrl.parallel.mesh import AXIS, local_devices, make_mesh, on_device
from spmdrl.parallel.sync import GradSync, make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.verify import compare
from tests.spmd.runs import CARTPOLE, run, updates

WAYS = ("private calls", "public calls", "one thread")


@pytest.fixture(params=WAYS)
def way(request, world, monkeypatch):
    """How the ranks' sums are taken: what the installed mpi4jax and MPI might offer."""
    if world.size == 1:
        pytest.skip("is about several ranks")
    if request.param == "public calls":
        monkeypatch.setattr(mpi, "_lowerings", lambda: None)
    if request.param == "one thread":
        monkeypatch.setattr(world, "thread_level", "funneled")
        for name in ("allreduce", "allgather", "allreduce_after", "allgather_after"):
            monkeypatch.setattr(mpi, name, None)  # they would be called by XLA's threads
    return request.param


def test_this_mpi4jax_has_the_private_functions():
    """Else the faster way would be lost without a word; see `mpi._lowerings`."""
    pytest.importorskip("mpi4jax")
    assert mpi._lowerings() is not None


@pytest.mark.parametrize("change", ["no function", "no effect", "another signature"])
def test_an_mpi4jax_with_other_insides_is_noticed(change, monkeypatch):
    from mpi4jax._src import utils
    from mpi4jax._src.collective_ops import allgather, allreduce

    if change == "no function":
        monkeypatch.delattr(allreduce, "_mpi_allreduce_xla_encode")
    elif change == "no effect":
        monkeypatch.delattr(utils, "ordered_effect")
    else:
        monkeypatch.setattr(allgather, "_mpi_allgather_xla_encode", lambda ctx, x: None)
    assert mpi._lowerings.__wrapped__() is None


# ---------------------------------------------------------------------------------------------
# Sums


def brought_by(rank: int, shards: int) -> np.ndarray:
    return np.arange(shards * 3, dtype=np.float32).reshape(shards, 3) + 100.0 * rank


def total(sync: GradSync, devices: int) -> np.ndarray:
    """As the update takes it, of two shards a device."""
    mesh = make_mesh(local_devices(devices))
    tree = {"g": brought_by(sync.world.rank, 2 * devices)}
    add = jax.shard_map(
        lambda tree: sync.in_step(tree, None),
        mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False,
    )  # fmt: skip
    found = jax.jit(add)(tree)
    if sync.between is not None:
        found = sync.between(on_device(found, mesh.local_devices[0]))
    return np.asarray(found["g"])


def expected(size: int, devices: int) -> np.ndarray:
    return sum(brought_by(rank, 2 * devices).sum(0) for rank in range(size))


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_way_sums_over_all_ranks(way, world, deterministic):
    devices = len(jax.local_devices())
    sync = make_grad_sync(SyncConfig(deterministic=deterministic), world, devices)
    assert sync.mpi_in_step == (devices == 1 and way != "one thread")
    np.testing.assert_array_equal(total(sync, devices), expected(world.size, devices))


def test_calls_of_one_program_keep_their_order(way, world):
    if way == "one thread":
        pytest.skip("has no such calls")

    @jax.jit
    def chain(x):
        def step(x, _):
            x = mpi.allreduce_after(x, x) / world.size
            rows = mpi.allgather_after(x[None] + world.rank, x)
            return rows.mean(0), rows

        return jax.lax.scan(step, x, length=5)

    last, rows = chain(jnp.full(3, float(world.rank)))
    mean = (world.size - 1) / 2
    np.testing.assert_allclose(last, np.full(3, mean + 5 * mean))
    assert rows.shape == (5, world.size, 3)


TINY = dataclasses.replace(
    CARTPOLE,
    net=NetConfig(hidden=(16,)),
    algo=dataclasses.replace(CARTPOLE.algo, num_steps=16, minibatches=2, epochs=1),
)


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory) -> Path:
    """Where the runs of this module are; one of them has a single rank."""
    folder = Path(world.broadcast_json(str(tmp_path_factory.mktemp("ways"))))
    run(updates(TINY, 2), 1, World(), folder / f"alone-{world.rank}")
    return folder


def test_every_way_learns_what_one_rank_learns(way, world, request):
    if world.size > 2 or len(jax.local_devices()) > 1:
        pytest.skip("two devices show it, in less time")
    folder = request.getfixturevalue("alone")
    run(updates(TINY, 2), 1, world, folder / way)
    if world.is_root:
        result = compare(way, folder / way, folder / "alone-0", 2, summary="summary-0.json")
        assert result.same_rollout
        assert result.first_difference <= 1e-5


# ---------------------------------------------------------------------------------------------
# Groups of ranks


def test_a_group_of_ranks_sums_among_its_members(world):
    group = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    part = world.split(group)
    assert (part.rank, part.size) == (group.index(world.rank), len(group))
    assert part.gather_json(world.rank) == group
    np.testing.assert_array_equal(part.sum(np.array([world.rank])), [sum(group)])
    mine = jnp.full(2, float(world.rank))
    for those, ranks in ((part, group), (world, range(world.size))):
        if those.size > 1:
            add = partial(mpi.allreduce_after, earlier=None, comm=those.program_comm)
            np.testing.assert_array_equal(jax.jit(add)(mine), [sum(ranks)] * 2)
            sync = make_grad_sync(SyncConfig(), those, 1)
            np.testing.assert_array_equal(total(sync, 1), expected(those.size, 1))


def test_members_are_numbered_in_the_order_given(world):
    backwards = list(reversed(range(world.size)))
    part = world.split(backwards)
    assert part.rank == backwards.index(world.rank)
    assert part.from_root(lambda: world.rank) == backwards[0]


@pytest.mark.parametrize("ranks", [[], [99], [0, 0]])
def test_a_group_that_cannot_be_is_refused(world, ranks):
    with pytest.raises(ValueError, match="split"):
        world.split(ranks)


# ---------------------------------------------------------------------------------------------
# Rank 0 decides


def test_what_rank_0_decides_is_known_to_all(world):
    called = []

    def decide() -> dict:
        called.append(world.rank)
        return {"path": "runs/x", "pair": (1, 2)}

    assert world.from_root(decide) == {"path": "runs/x", "pair": [1, 2]}  # by way of JSON
    assert called == [0] * world.is_root


def test_a_refusal_of_rank_0_is_raised_everywhere(world):
    def refuse() -> None:
        raise ConfigError("devices is 9")

    with pytest.raises(ConfigError, match=r"^devices is 9$"):
        world.from_root(refuse)


def test_rows_of_all_ranks(world):
    mine = np.full((2, 3), world.rank, np.float32)
    rows = world.all_rows(mine)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(world.size), 2))
    np.testing.assert_array_equal(world.sum(mine), mine * 0 + sum(range(world.size)))


def test_too_many_devices_are_bad_input():
    with pytest.raises(ConfigError, match=r"devices is 99, but jax finds only \d"):
        local_devices(99)


def test_rows_without_anything_in_them_are_gathered_without_a_byte(world):
    """A byte for each would be written past the end of an array that has none."""
    found = world.gather_rows(np.empty((1_000_000, 0), np.uint8))
    assert (found is not None) == world.is_root
    assert found is None or found.shape == (1_000_000 * world.size, 0)

"""Minibatches of steps and of whole environments: every row once, the same on every topology."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config
from spmdrl.learning.minibatches import Sequences, Steps, make_selector, permutations
from spmdrl.parallel.placement import split_envs

# epochs, minibatches, steps of an environment in a minibatch, blocks of environments of a device;
# every case compiles anew, so there are few, with every number at its smallest once
SIZES = [(1, 1, 1, 1), (2, 4, 3, 2), (3, 2, 1, 3), (1, 3, 2, 1)]
each_size = pytest.mark.parametrize("size", SIZES)


def rows_of_each_minibatch(selector, key, ids, num_steps):
    """`[(step, global id), ...]` of each of the update's minibatches."""
    t, b = np.meshgrid(np.arange(num_steps), ids, indexing="ij")
    rows = np.stack([t, b], -1).astype(np.float32)
    found = np.asarray(chosen(selector, key, np.asarray(ids, np.int32), rows))
    return [[tuple(map(int, row)) for row in minibatch] for minibatch in found]


@partial(jax.jit, static_argnums=0)  # one program for all seeds, instead of one an operation
def chosen(selector, key, ids, rows):
    return selector.by_minibatch(selector.order(key, ids), rows)


@partial(jax.jit, static_argnums=0)
def drawn(selector, key, ids):
    return selector.order(key, ids)


def selectors(epochs, minibatches, num_steps):
    return [Steps(epochs, minibatches, num_steps), Sequences(epochs, minibatches)]


@each_size
@pytest.mark.parametrize(("seed", "first_block"), [(0, 0), (2**31 - 1, 50), (17, 3)])
def test_every_row_is_visited_exactly_once_per_epoch(size, seed, first_block):
    epochs, minibatches, share, blocks = size
    num_steps = minibatches * share
    ids = np.arange(blocks * minibatches) + first_block * minibatches
    everything = sorted((t, int(g)) for t in range(num_steps) for g in ids)
    for selector in selectors(epochs, minibatches, num_steps):
        found = rows_of_each_minibatch(selector, jax.random.key(seed), ids, num_steps)
        assert len(found) == epochs * minibatches
        for epoch in range(epochs):
            rows = found[epoch * minibatches : (epoch + 1) * minibatches]
            assert len({len(minibatch) for minibatch in rows}) == 1
            assert sorted(row for minibatch in rows for row in minibatch) == everything


@each_size
@pytest.mark.parametrize(("seed", "devices"), [(0, 2), (5, 4), (123456, 3)])
def test_the_same_minibatches_wherever_the_environments_live(size, seed, devices):
    epochs, minibatches, share, blocks = size
    num_steps, key = minibatches * share, jax.random.key(seed)
    ids = np.arange(devices * blocks * minibatches)
    for selector in selectors(epochs, minibatches, num_steps):
        together = rows_of_each_minibatch(selector, key, ids, num_steps)
        apart = [rows_of_each_minibatch(selector, key, part, num_steps)
                 for part in np.split(ids, devices)]  # fmt: skip
        for index, minibatch in enumerate(together):
            pieces = [row for part in apart for row in part[index]]
            assert sorted(pieces) == sorted(minibatch)


@pytest.mark.parametrize("selector", selectors(2, 3, 12), ids=["steps", "sequences"])
def test_shards_of_the_order_are_the_orders_of_the_shards(selector):
    key, ids = jax.random.key(7), jnp.arange(12, dtype=jnp.int32)
    cut = split_envs(selector.spec, drawn(selector, key, ids), 4)
    for shard, own in zip(cut, ids.reshape(4, 3), strict=True):
        np.testing.assert_array_equal(shard, drawn(selector, key, own))


def test_steps_of_every_environment_and_whole_environments():
    ids = np.arange(8)
    for minibatch in rows_of_each_minibatch(Steps(1, 2, 6), jax.random.key(0), ids, 6):
        assert sorted({g for _, g in minibatch}) == list(range(8))
    for minibatch in rows_of_each_minibatch(Sequences(1, 2), jax.random.key(0), ids, 6):
        envs = sorted({g for _, g in minibatch})
        assert len(envs) == 4
        assert sorted(minibatch) == [(t, g) for t in range(6) for g in envs]
        assert sorted(g // 2 for g in envs) == [0, 1, 2, 3]  # one of every block


def test_the_rows_of_a_minibatch_are_those_that_its_sums_are_made_of():
    selector, ids = Steps(2, 3, 12), jnp.arange(4, dtype=jnp.int32)
    order = drawn(selector, jax.random.key(1), ids)
    x = jnp.arange(48.0).reshape(12, 4)
    by_minibatch, rows = selector.by_minibatch(order, x), jax.jit(selector.rows)
    for index in range(6):
        t, b = rows(order, jnp.int32(index))
        np.testing.assert_array_equal(x[t, b], by_minibatch[index])
    whole = Sequences(2, 2)
    order = drawn(whole, jax.random.key(1), ids)
    by_minibatch, envs_of = whole.by_minibatch(order, x), jax.jit(whole.envs)
    for index in range(4):
        envs = envs_of(order, jnp.int32(index))
        np.testing.assert_array_equal(x[:, envs].reshape(-1), by_minibatch[index])


def test_epochs_and_environments_have_orders_of_their_own():
    order = np.asarray(drawn(Steps(3, 1, 16), jax.random.key(0), jnp.arange(10, dtype=jnp.int32)))
    columns = {tuple(column) for epoch in order for column in epoch.T}
    assert len(columns) == 30
    other = np.asarray(drawn(Steps(3, 1, 16), jax.random.key(1), jnp.arange(10, dtype=jnp.int32)))
    assert (other != order).any(axis=1).all()
    draws = drawn(Sequences(8, 8), jax.random.key(0), jnp.arange(16, dtype=jnp.int32))
    assert len({tuple(row) for row in np.asarray(draws).reshape(16, 8)}) == 16


def test_permutations_of_equal_bits_stay_in_order():
    np.testing.assert_array_equal(permutations(jnp.zeros((2, 5), jnp.uint32)), [range(5)] * 2)


def test_the_algorithm_chooses():
    class OfSequences(Ppo):
        selects = "sequences"

    assert isinstance(make_selector(Config(algo=Ppo())), Steps)
    assert isinstance(make_selector(Config(algo=OfSequences())), Sequences)

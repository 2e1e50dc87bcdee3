"""Running moments against numpy on everything that was seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.nets import moments
from spmdrl.types import Moments

T, B, D = 4, 6, 2
MERGES, PLACES = 3, 2


@jax.jit
def seen(known, x, valid):
    return moments.merge(known, moments.power_sums(known, x, valid))


def assert_moments(known, rows, tolerance=1e-5):
    rows = np.asarray(rows, np.float64)
    assert float(known.count) == len(rows)
    np.testing.assert_allclose(known.mean, rows.mean(0), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(moments.variance(known), rows.var(0), rtol=tolerance, atol=tolerance)


@jax.jit
def in_turns(x, turn, place):
    """Rows merged turn by turn, the sums of the places added in each, as in training."""
    known = moments.init((D,))
    for i in range(MERGES):
        parts = [moments.power_sums(known, x, (turn == i) & (place == p)) for p in range(PLACES)]
        known = moments.merge(known, jax.tree.map(lambda *s: sum(s), *parts))
    return known


def labels(largest):
    return st.lists(st.integers(0, largest), min_size=T * B, max_size=T * B)


values = st.lists(st.floats(-100, 100, width=32), min_size=T * B * D, max_size=T * B * D)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values, labels(MERGES), labels(PLACES - 1))
def test_any_split_over_time_and_places_equals_numpy(numbers, turn, place):
    """Rows whose turn is MERGES are never merged."""
    x = np.reshape(np.asarray(numbers, np.float32), (T, B, D))
    turn, place = np.reshape(turn, (T, B)), np.reshape(place, (T, B))
    known = in_turns(x, turn, place)
    rows = x[turn < MERGES].astype(np.float64)
    if len(rows) == 0:
        assert known.count == 0
        return
    assert known.count == len(rows)
    np.testing.assert_allclose(known.mean, rows.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(known.m2 / len(rows), rows.var(0), rtol=1e-4, atol=0.05)


def test_batches_of_different_sizes_equal_numpy():
    rng = np.random.default_rng(0)
    known, everything = moments.init((3,)), []
    for n in (1, 7, 50):
        x = rng.normal([0, 5, -3], [1, 0.1, 4], (n, 2, 3)).astype(np.float32)
        known = seen(known, x, np.ones((n, 2), bool))
        everything.append(x.reshape(-1, 3))
    assert_moments(known, np.concatenate(everything), tolerance=1e-4)


def test_by_hand():
    # 1, 2 and 6: mean 3, squared deviations 4 + 1 + 9 = 14. Then 7: mean 4, 9 + 4 + 4 + 9 = 26.
    known = moments.init(())
    known = seen(known, np.asarray([[1, 2, 6]], np.float32), np.ones((1, 3), bool))
    np.testing.assert_allclose([known.count, known.mean, known.m2], [3, 3, 14], rtol=1e-6)
    known = seen(known, np.asarray([[7]], np.float32), np.ones((1, 1), bool))
    np.testing.assert_allclose([known.count, known.mean, known.m2], [4, 4, 26], rtol=1e-6)
    np.testing.assert_allclose(moments.variance(known), 6.5, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_masked_rows_are_ignored_whatever_they_hold(bad):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((T, B, D)).astype(np.float32)
    valid = rng.random((T, B)) < 0.7
    x[~valid] = bad
    assert 0 < valid.sum() < valid.size
    assert_moments(seen(moments.init((D,)), x, valid), x[valid])


def test_uint8_images_are_counted_by_pixel():
    x = np.random.default_rng(2).integers(0, 256, (5, 3, 2, 2, 1), np.uint8)
    known = seen(moments.init((2, 2, 1)), x, np.ones((5, 3), bool))
    np.testing.assert_allclose(known.mean, x.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(moments.variance(known), x.var((0, 1), np.float64), rtol=1e-4)


def test_empty_batch_changes_nothing():
    known = Moments(jnp.float32(10), jnp.float32([1, -2]), jnp.float32([3, 0]))
    after = seen(known, np.full((T, B, D), np.nan, np.float32), np.zeros((T, B), bool))
    jax.tree.map(np.testing.assert_array_equal, after, known)
    blank = seen(moments.init((D,)), np.ones((T, B, D), np.float32), np.zeros((T, B), bool))
    jax.tree.map(np.testing.assert_array_equal, blank, moments.init((D,)))


def test_variance_is_one_before_data():
    np.testing.assert_array_equal(moments.variance(moments.init((3,))), np.ones(3))


def test_normalize_before_data_changes_nothing():
    x = jnp.asarray([[0.5, -2.0]], jnp.float32)
    np.testing.assert_allclose(moments.normalize(moments.init((2,)), x, 10.0), x, rtol=1e-6)


def test_normalize_centres_scales_and_clips():
    # Mean 10, variance 18 / 2 = 9: (13 - 10) / 3 = 1, (4 - 10) / 3 = -2, and 5 is the bound.
    known = Moments(jnp.float32(2), jnp.float32(10), jnp.float32(18))
    x = jnp.asarray([13, 4, 1000, -1000], jnp.float32)
    np.testing.assert_allclose(moments.normalize(known, x, 5.0), [1, -2, 5, -5], rtol=1e-5)


def test_normalized_data_has_mean_zero_and_deviation_one():
    x = np.random.default_rng(3).normal([4, -1], [2, 0.01], (500, 2, 2)).astype(np.float32)
    known = seen(moments.init((2,)), x, np.ones((500, 2), bool))
    scaled = np.asarray(moments.normalize(known, jnp.asarray(x), 10.0), np.float64)
    np.testing.assert_allclose(scaled.mean((0, 1)), 0, atol=1e-3)
    np.testing.assert_allclose(scaled.std((0, 1)), 1, atol=2e-3)


def test_large_offset_is_accurate_once_a_mean_is_known():
    """Without the shift, squares near 1e6 leave an error near 0.1 in a variance of 1."""
    rng = np.random.default_rng(4)
    x = (1e3 + rng.standard_normal((64, 257, 3))).astype(np.float32)
    known = seen(moments.init((3,)), x[:, :1], np.ones((64, 1), bool))
    for i in range(1, 257, 64):
        known = seen(known, x[:, i : i + 64], np.ones((64, 64), bool))
    rows = x.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(known.mean, rows.mean(0), rtol=0, atol=1e-3)
    np.testing.assert_allclose(moments.variance(known), rows.var(0), rtol=0, atol=1e-3)


def test_constant_data_has_no_negative_variance():
    known = moments.init(())
    for _ in range(5):
        known = seen(known, np.full((100, 3), 0.1, np.float32), np.ones((100, 3), bool))
    np.testing.assert_allclose(moments.variance(known), 0.0, atol=1e-6)
    assert moments.variance(known) >= 0

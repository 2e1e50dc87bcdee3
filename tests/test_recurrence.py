"""Returns and advantages without a loop, as on accelerators, against the loops of the CPU."""

import dataclasses

import jax
import numpy as np
import pytest

from spmdrl.acting.steps import accumulate
from spmdrl.algos.returns import fold_discounts, gae
from spmdrl.algos.vtrace import Clips, vtrace
from spmdrl.parallel import platforms
from spmdrl.parallel.recurrence import doubling


def by_hand(x, a, reverse):
    y, found = np.zeros(x.shape[1:]), np.zeros_like(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        y = found[t] = x[t] + np.where(a[t] > 0, a[t] * y, 0.0)
    return found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
def test_doubling_equals_a_loop(length, reverse):
    rng = np.random.default_rng(length)
    x = rng.standard_normal((length, 3))
    a = np.where(rng.random((length, 3)) < 0.2, 0.0, rng.random((length, 3)))
    found = doubling(x.astype(np.float32), a.astype(np.float32), reverse)
    np.testing.assert_allclose(found, by_hand(x, a, reverse), atol=1e-5)


def test_nothing_comes_through_an_end():
    x, a = np.array([[1.0], [np.nan], [2.0], [3.0]]), np.array([[0.5], [0.5], [0.0], [0.5]])
    found = np.asarray(doubling(x.astype(np.float32), a.astype(np.float32), False))[:, 0]
    assert np.isnan(found).tolist() == [False, True, False, False]
    np.testing.assert_allclose(found[2:], [2.0, 4.0])


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    shape = (37, 5)
    ends = rng.random(shape) < 0.15
    return {
        "reward": rng.standard_normal(shape).astype(np.float32),
        "value": rng.standard_normal(shape).astype(np.float32),
        "log_rho": 0.3 * rng.standard_normal(shape).astype(np.float32),
        "last": rng.standard_normal(5).astype(np.float32),
        "terminated": ends & (rng.random(shape) < 0.5),
        "truncated": ends,
        "valid": ~np.concatenate([np.zeros_like(ends[:1]), ends[:-1]]),
    }


def all_of_them(rows):
    discount, trace = fold_discounts(rows["terminated"], rows["truncated"], 0.99, 0.95)
    targets = (rows["value"], rows["last"])
    return {
        "advantages": gae(rows["reward"], discount, trace, *targets),
        "vtrace": vtrace(
            rows["reward"], discount, rows["valid"], *targets, rows["log_rho"], 0.9,
            Clips(1.0, 1.0, 1.0),
        ),
        "returns": accumulate(rows["last"], rows["reward"], 0.9, rows["truncated"]),
        "lengths": accumulate(rows["last"], rows["reward"], 1.0, rows["truncated"]),
    }  # fmt: skip


def test_both_ways_give_the_same(rows, monkeypatch):
    loops = jax.jit(lambda rows: all_of_them(rows))(rows)  # a function of its own is traced anew
    liked = dataclasses.replace(platforms.CPU, cheap_loops=False)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", liked)
    assert "scan" not in str(jax.make_jaxpr(lambda rows: all_of_them(rows))(rows))
    doubled = jax.jit(lambda rows: all_of_them(rows))(rows)
    for name, wanted in loops.items():
        found = jax.tree.leaves(doubled[name])
        for a, b in zip(found, jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


def test_the_loop_is_what_runs_here(rows):
    text = jax.jit(lambda rows: all_of_them(rows)).lower(rows).as_text()
    assert text.count("stablehlo.while") == 4

"""Memory: cells against flax's, resets by hand, gradients of the wide form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from spmdrl.nets import cores
from spmdrl.nets.cores import Gru, Lstm, run_cell, run_wide, scan_cell

T, B, F = 7, 3, 5


def inputs(resets=0.3):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(T, B, F)), jnp.float32)
    first = jnp.asarray(rng.random((T, B)) < resets)
    return x, first


def made(cls, size, x, first):
    core = cls(size)
    carry = cls.zeros(size, B)
    params = jax.jit(core.init)(jax.random.key(1), carry, x, first)["params"]
    params = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size).reshape(p.shape)), params)
    return core, params, carry


def flax_params(cls, params, size):
    """Our parameters as flax's cells hold them."""
    w, b = params["input"]["kernel"], params["input"]["bias"]
    u = params["recurrent"]["kernel"]
    if cls is Lstm:
        found = {}
        for gate, wi, bi, ui in zip("ifgo", *(jnp.split(p, 4, -1) for p in (w, b, u)), strict=True):
            found[f"i{gate}"] = {"kernel": wi}
            found[f"h{gate}"] = {"kernel": ui, "bias": bi + (gate == "f")}
        return found
    found = {}
    for gate, wi, bi, ui in zip("rzn", *(jnp.split(p, 3, -1) for p in (w, b, u)), strict=True):
        found[f"i{gate}"] = {"kernel": wi, "bias": bi}
        found[f"h{gate}"] = {"kernel": ui}
    found["hn"]["bias"] = params["recurrent"]["bias"]
    return found


def by_flax(cls, params, size, carry, x, first):
    cell = nn.OptimizedLSTMCell(size) if cls is Lstm else nn.GRUCell(size)
    theirs = {"params": flax_params(cls, params, size)}
    state = carry if cls is Lstm else carry[0]
    shown: list[Any] = []
    for t in range(T):
        state = jax.tree.map(lambda s, t=t: jnp.where(first[t][:, None], 0.0, s), state)
        state, y = cell.apply(theirs, state, x[t])
        shown.append(y)
    return state if cls is Lstm else (state,), jnp.stack(shown)


@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), cores.WIDE_CORE])
@pytest.mark.parametrize("cls", [Lstm, pytest.param(Gru, marks=pytest.mark.slow)])
def test_values_and_gradients_equal_flaxs_cells(cls, size):
    x, first = inputs()
    core, params, carry = made(cls, size, x, first)
    weights = jnp.sin(jnp.arange(T * B * size, dtype=jnp.float32)).reshape(T, B, size)

    def ours(params, carry, x):
        after, y = core.apply({"params": params}, carry, x, first)
        return jnp.sum(y * weights) + sum(jnp.sum(c**2) for c in after)

    def theirs(params, carry, x):
        after, y = by_flax(cls, params, size, carry, x, first)
        return jnp.sum(y * weights) + sum(jnp.sum(c**2) for c in after)

    start = jax.tree.map(lambda c: c + 0.3, carry)
    for a, b in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(params, start, x)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(theirs, (0, 1, 2)))(params, start, x)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("cls", [Lstm, Gru])
def test_an_unroll_equals_its_steps_one_by_one(cls):
    x, first = inputs()
    core, params, carry = made(cls, 8, x, first)
    whole, shown = core.apply({"params": params}, carry, x, first)
    for t in range(T):
        carry, y = core.apply({"params": params}, carry, x[t : t + 1], first[t : t + 1])
        np.testing.assert_allclose(y[0], shown[t], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), carry, whole)


def counting(carry, projected, product):
    """A cell that counts its steps."""
    return (carry[0] + 1.0,)


def test_a_cell_that_counts_starts_anew_where_an_episode_does():
    first = jnp.array([[False], [False], [True], [False], [True]])
    zeros = jnp.zeros((5, 1, 1))
    start = (jnp.full((1, 1), 4.0),)
    after, shown = run_cell(counting, jnp.zeros((1, 1)), jnp.zeros(1), start, zeros, first)
    assert shown[:, 0, 0].tolist() == [5.0, 6.0, 1.0, 2.0, 1.0]
    assert after[0].tolist() == [[1.0]]


def test_the_wide_form_is_the_plain_one():
    _, first = inputs()
    rng = np.random.default_rng(2)
    kernel = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
    projected = jnp.asarray(rng.normal(size=(T, B, 32)), jnp.float32)
    offset = jnp.asarray(rng.normal(size=32), jnp.float32)
    carry = Lstm.zeros(8, B)

    def wide(kernel, offset, carry, projected):
        offsets = jnp.broadcast_to(offset, projected.shape)
        return jnp.sum(run_wide(Lstm.cell, kernel, offsets, carry, projected, first)[1] ** 2)

    def plain(kernel, offset, carry, projected):
        return jnp.sum(scan_cell(Lstm.cell, kernel, offset, carry, projected, first)[1] ** 2)

    found = jax.grad(wide, (0, 1, 2, 3))(kernel, offset, carry, projected)
    expected = jax.grad(plain, (0, 1, 2, 3))(kernel, offset, carry, projected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )

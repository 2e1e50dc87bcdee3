"""Gradients of wide layers, put together from the factors of chunks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from spmdrl.nets.cpu import chunked_dense as wide


class Torso(nn.Module):
    layer: type

    @nn.compact
    def __call__(self, x):
        hidden = self.layer(5, kernel_init=nn.initializers.orthogonal(), name=wide.WIDE)(x)
        return nn.Dense(1)(jnp.tanh(hidden))[:, 0]


class TwoTorsos(nn.Module):
    layer: type = wide.WideDense

    @nn.compact
    def __call__(self, x):
        actor, critic = (Torso(self.layer, name=name) for name in ("actor", "critic"))
        return actor(x) + 2 * critic(nn.Dense(6)(x))


ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((12, 6)), jnp.float32)
PLAIN = TwoTorsos(nn.Dense)


def fresh_params():
    return TwoTorsos().init(jax.random.key(0), ROWS)["params"]


def by_factors(params, x):
    """The gradient of a sum of squares, without the wide kernels', and the factors of these."""

    def loss(params, probes):
        variables = wide.probed({"params": params}, probes)
        out, filled = TwoTorsos().apply(variables, x, mutable=[wide.INPUTS])
        return (out**2).sum(), wide.inputs_of(filled)

    probes = wide.probes_of(params, len(x))
    (grads, errors), inputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, probes)
    return wide.drop_kernels(grads), (inputs, errors)


def test_it_is_a_dense_layer():
    params = fresh_params()
    shapes = partial(jax.tree.map, jnp.shape)
    assert shapes(PLAIN.init(jax.random.key(0), ROWS)["params"]) == shapes(params)
    out, plain = (np.asarray(net.apply({"params": params}, ROWS)) for net in (TwoTorsos(), PLAIN))
    np.testing.assert_allclose(out, plain, rtol=1e-6)


def test_factors_of_chunks_make_the_gradient_of_all_rows():
    params = fresh_params()

    def loss(params):
        return jnp.sum(jnp.asarray(PLAIN.apply({"params": params}, ROWS)) ** 2)

    expected = jax.grad(loss)(params)
    parts = [by_factors(params, chunk) for chunk in jnp.split(ROWS, 3)]
    grads = jax.tree.map(lambda *x: sum(x), *(grads for grads, _ in parts))
    assert "kernel" not in grads["actor"]["wide"]
    factors = jax.tree.map(lambda *x: jnp.concatenate(x), *(factors for _, factors in parts))
    found = wide.add_kernels(grads, *factors)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_a_network_without_wide_layers_has_no_factors():
    params = nn.Dense(3).init(jax.random.key(0), ROWS)["params"]
    assert wide.probes_of(params, 4) == {}
    assert wide.drop_kernels(params) == params
    assert wide.add_kernels(params, {}, {}) == params
    assert wide.inputs_of({}) == {}

"""Optimisers by hand numbers, against optax on the tree, and as their names promise."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from spmdrl.config import Config, ConfigError, OptimConfig
from spmdrl.learning.optimizer import make_optimizer, on_tree, on_vector
from spmdrl.runtime.validate import validate

PARAMS = {"layer": {"kernel": jnp.float32([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.float32([0.1])}}
LOOSE = OptimConfig(max_grad_norm=1e9)
close = partial(np.testing.assert_allclose, rtol=1e-6)


def gradients(count: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(5), jnp.float32) for _ in range(count)]


def after(optimizer, steps, rate=0.1, params=PARAMS):
    state = optimizer.init(params)
    for gradient in steps:
        params, state = optimizer.step(gradient, state, params, jnp.float32(rate))
    return params


def single(optim: OptimConfig, steps: list[float], rates: list[float]) -> float:
    """One parameter that starts at 1."""
    optimizer = make_optimizer(optim)
    params = {"w": jnp.float32([1.0])}
    state = optimizer.init(params)
    for gradient, rate in zip(steps, rates, strict=True):
        params, state = optimizer.step(jnp.float32([gradient]), state, params, jnp.float32(rate))
    return float(params["w"][0])


def test_rmsprop_is_tensorflows_by_hand():
    # ms starts at 1: 0.9 * 1 + 0.1 * 4 = 1.3; step 0.5 * 2 / sqrt(1.3 + 0.1), epsilon inside.
    # Then 0.9 * 1.3 + 0.1 * 1 = 1.27; step 0.5 * 1 / sqrt(1.37).
    optim = dataclasses.replace(LOOSE, name="rmsprop", rmsprop_decay=0.9, rmsprop_eps=0.1)
    expected = 1.0 - 1.0 / math.sqrt(1.4) - 0.5 / math.sqrt(1.37)
    close(single(optim, [2.0, 1.0], [0.5, 0.5]), expected)


def test_rmsprop_with_epsilon_outside_and_slots_from_zero_is_pytorchs_by_hand():
    # ms = 0.1 * 4 = 0.4; step 0.5 * 2 / (sqrt(0.4) + 0.1)
    optim = dataclasses.replace(
        LOOSE, name="rmsprop", rmsprop_decay=0.9, rmsprop_eps=0.1, rmsprop_eps_inside=False,
        rmsprop_initial=0.0,
    )  # fmt: skip
    close(single(optim, [2.0], [0.5]), 1.0 - 1.0 / (math.sqrt(0.4) + 0.1))


def test_rmsprop_momentum_holds_the_learning_rate_of_its_time():
    # TensorFlow: mom = 0.5 mom + lr g / sqrt(ms + eps). Rates 0.5, then 0.1:
    # a = 0.5 * 2 / sqrt(1.4), b = 0.5 a + 0.1 * 1 / sqrt(1.37)
    optim = dataclasses.replace(
        LOOSE, name="rmsprop", rmsprop_decay=0.9, rmsprop_eps=0.1, rmsprop_momentum=0.5
    )
    a = 1.0 / math.sqrt(1.4)
    b = 0.5 * a + 0.1 / math.sqrt(1.37)
    close(single(optim, [2.0, 1.0], [0.5, 0.1]), 1.0 - a - b)


def test_sgd_and_its_momentum_by_hand():
    plain = dataclasses.replace(LOOSE, name="sgd")
    close(single(plain, [2.0, 1.0], [0.1, 0.1]), 1.0 - 0.3)
    # v = 2, then 0.9 * 2 + 1 = 2.8
    heavy = dataclasses.replace(plain, sgd_momentum=0.9)
    close(single(heavy, [2.0, 1.0], [0.1, 0.1]), 1.0 - 0.2 - 0.28)


def test_adamw_takes_the_parameters_into_account():
    # Adam's first step is lr * g / (|g| + eps); the decay adds lr * decay * w.
    optim = dataclasses.replace(LOOSE, name="adamw", adamw_decay=0.25, adam_eps=1e-12)
    close(single(optim, [3.0], [0.1]), 1.0 - 0.1 * (1.0 + 0.25))


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_on_the_vector_and_on_the_tree_are_the_same(name):
    optim = dataclasses.replace(LOOSE, name=name)
    transforms = {
        "adam": optax.scale_by_adam(eps=1e-5),
        "adamw": optax.chain(optax.scale_by_adam(eps=1e-5), optax.add_decayed_weights(1e-4)),
        "rmsprop": optax.scale_by_rms(0.99, 0.1, initial_scale=1.0, eps_in_sqrt=True),
        "sgd": optax.identity(),
    }
    ours = after(make_optimizer(optim), gradients(4))
    jax.tree.map(close, ours, after(on_tree(transforms[name]), gradients(4)))
    jax.tree.map(close, ours, after(on_vector(transforms[name]), gradients(4)))


def test_an_optimiser_that_sees_matrices_gets_them():
    seen = []

    def look(updates, state, params):
        seen.append((jax.tree.map(jnp.shape, updates), jax.tree.map(jnp.shape, params)))
        return updates, state

    after(on_tree(optax.GradientTransformation(lambda params: (), look)), gradients(1))
    shapes = {"layer": {"bias": (1,), "kernel": (2, 2)}}
    assert seen == [(shapes, shapes)]


def test_gradients_are_clipped_to_their_global_norm():
    clipped = make_optimizer(dataclasses.replace(LOOSE, name="sgd", max_grad_norm=0.5))
    moved = after(clipped, [jnp.float32([3.0, 4.0, 0.0, 0.0, 0.0])], rate=1.0)
    difference = ravel_pytree(PARAMS)[0] - ravel_pytree(moved)[0]
    close(difference, [0.3, 0.4, 0.0, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("optim", "field"),
    [
        (OptimConfig(name="sgd", adam_b1=0.5), "adam_b1"),
        (OptimConfig(rmsprop_eps=1e-3), "rmsprop_eps"),
        (OptimConfig(name="adam", adamw_decay=0.5), "adamw_decay"),
        (OptimConfig(name="rmsprop", sgd_momentum=0.5), "sgd_momentum"),
    ],
)
def test_a_field_of_another_optimiser_is_refused(optim, field):
    with pytest.raises(ConfigError, match=f"optim.{field} has no effect with optim.name"):
        validate(dataclasses.replace(Config(), optim=optim))


def test_fields_of_the_chosen_optimiser_are_fine():
    for optim in (
        OptimConfig(name="adamw", adam_b1=0.5, adamw_decay=0.5),
        OptimConfig(name="rmsprop", rmsprop_eps=1e-3),
    ):
        validate(dataclasses.replace(Config(), optim=optim))

"""From the gradient of a minibatch to new parameters.

The gradient arrives as one vector, because that is one message. Optimisers that treat every number
by itself work on the vector too, which is faster than a tree of small arrays; others get the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from spmdrl.algos.base import scheduled
from spmdrl.config import Config, OptimConfig
from spmdrl.types import Params

__all__ = ["Optimizer", "learning_rate", "make_optimizer", "on_tree", "on_vector"]


class Optimizer(NamedTuple):
    """Gradient clipping included; the learning rate is given with each step."""

    init: Callable[[Params], Any]
    step: Callable[[Array, Any, Params, Array | float], tuple[Params, Any]]
    """`(flat gradient, state, parameters, learning rate) -> (parameters, state)`."""


def make_optimizer(optim: OptimConfig) -> Optimizer:
    clip = optax.clip_by_global_norm(optim.max_grad_norm)
    if optim.name == "rmsprop" and optim.rmsprop_momentum:
        return on_vector(optax.chain(clip, _scale_by_rms(optim)), optim.rmsprop_momentum)
    return on_vector(optax.chain(clip, *_elementwise(optim)))


def _elementwise(optim: OptimConfig) -> list[optax.GradientTransformation]:
    adam = optax.scale_by_adam(optim.adam_b1, optim.adam_b2, optim.adam_eps)
    if optim.name == "adam":
        return [adam]
    if optim.name == "adamw":
        return [adam, optax.add_decayed_weights(optim.adamw_decay)]
    if optim.name == "rmsprop":
        return [_scale_by_rms(optim)]
    return [optax.trace(optim.sgd_momentum)] if optim.sgd_momentum else []


def _scale_by_rms(optim: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_rms(
        optim.rmsprop_decay,
        optim.rmsprop_eps,
        initial_scale=optim.rmsprop_initial,
        eps_in_sqrt=optim.rmsprop_eps_inside,
    )


def on_vector(transform: optax.GradientTransformation, step_momentum: float = 0.0) -> Optimizer:
    """Parameters and their slots as one vector; only for elementwise optimisers.

    `step_momentum` is that of the steps themselves, learning rate included (TensorFlow's RMSProp).
    """

    def init(params: Params) -> Any:
        flat = ravel_pytree(params)[0]
        state = transform.init(flat)
        return (state, jnp.zeros_like(flat)) if step_momentum else state

    def step(
        gradient: Float[Array, "n"], state: Any, params: Params, lr: Array | float
    ) -> tuple[Params, Any]:
        flat, restore = ravel_pytree(params)
        inner, velocity = state if step_momentum else (state, None)
        updates, inner = transform.update(gradient, inner, flat)
        if velocity is not None:
            velocity = step_momentum * velocity + lr * updates
            moved = jax.tree.map(lambda p, v: p - v, params, restore(velocity))
            return moved, (inner, velocity)
        return jax.tree.map(lambda p, u: p - lr * u, params, restore(updates)), inner

    return Optimizer(init, step)


def on_tree(transform: optax.GradientTransformation) -> Optimizer:
    """For optimisers that see layers and their shapes."""

    def step(
        gradient: Float[Array, "n"], state: Any, params: Params, lr: Array | float
    ) -> tuple[Params, Any]:
        grads = ravel_pytree(params)[1](gradient)
        updates, state = transform.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, updates), state

    return Optimizer(transform.init, step)


def learning_rate(config: Config, step: Array) -> Float[Array, ""]:
    """The learning rate of update `step`."""
    optim = config.optim
    done = step.astype(jnp.float32)
    if not optim.warmup:
        left = jnp.maximum(1.0 - done / config.schedule_updates, 0.0)
        return scheduled(optim.lr, optim.lr_schedule, left)
    rest = max(config.schedule_updates - optim.warmup, 1)
    left = jnp.clip(1.0 - (done - optim.warmup) / rest, 0.0, 1.0)
    rise = jnp.minimum((done + 1.0) / optim.warmup, 1.0)
    return rise * scheduled(optim.lr, optim.lr_schedule, left)

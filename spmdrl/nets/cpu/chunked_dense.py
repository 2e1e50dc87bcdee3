"""Dense layers whose kernel's gradient is one product over all rows of a minibatch.

The other gradients are summed over chunks of rows that fit a CPU's cache. For a kernel of a million
numbers such a chunk is too short: much of its time would go to writing and adding whole kernels. So
a chunk gives the factors instead: the layer's inputs and the gradients of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from spmdrl.types import Params

__all__ = [
    "INPUTS", "WIDE", "Factors", "WideDense", "add_kernels", "drop_kernels", "inputs_of", "probed",
    "probes_of",
]  # fmt: skip

WIDE = "wide"  # the name of such a layer
INPUTS = "wide_inputs"  # a collection that `apply` fills where it is mutable
PROBES = "wide_probes"  # zeros to add to the outputs: the gradient of a probe is its output's

Path = tuple[str, ...]  # of a layer in the tree of parameters
Factors = dict[Path, Float[Array, "N _"]]


class WideDense(nn.Module):
    """`nn.Dense` with the same parameters."""

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Any = jnp.float32  # of products and output

    @nn.compact
    def __call__(self, x: Float[Array, "N I"]) -> Float[Array, "N F"]:
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x, kernel, bias = (y.astype(self.dtype) for y in (x, kernel, bias))
        self.sow(INPUTS, "x", x)
        # Probes are float32, as the gradients of which they are a part.
        return self.perturb("out", x @ kernel + bias, collection=PROBES).astype(self.dtype)


def probes_of(params: Params, rows: int) -> Factors:
    """Zeros for every wide layer of the network."""
    return {path[:-1]: jnp.zeros((rows, kernel.shape[1])) for path, kernel in _kernels(params)}


def _kernels(params: Params) -> list[tuple[Path, Array]]:
    return [(k, x) for k, x in flatten_dict(params).items() if k[-2:] == (WIDE, "kernel")]


def probed(variables: dict[str, Any], probes: Factors) -> dict[str, Any]:
    """Variables of a network with these probes in it."""
    return variables | {PROBES: unflatten_dict({(*p, "out"): x for p, x in probes.items()})}


def inputs_of(filled: Mapping[str, Any]) -> Factors:
    """What `apply` put into its mutable collections, as factors."""
    flat = flatten_dict(filled.get(INPUTS, {}))
    return {path[:-1]: x for path, (x,) in flat.items()}


def drop_kernels(params: Params) -> Params:
    dropped = {path for path, _ in _kernels(params)}
    return unflatten_dict({k: x for k, x in flatten_dict(params).items() if k not in dropped})


def add_kernels(grads: Params, inputs: Factors, errors: Factors) -> Params:
    """With the gradients that `drop_kernels` took away."""
    kernels = {(*path, "kernel"): _product(x, errors[path]) for path, x in inputs.items()}
    return unflatten_dict(flatten_dict(grads) | kernels)


def _product(x: Float[Array, "N I"], g: Float[Array, "N F"]) -> Float[Array, "I F"]:
    """`x.T @ g`; a transpose of its own, or XLA:CPU would read with a stride (see `conv`)."""
    rows = jax.lax.optimization_barrier(with_layout_constraint(x.T, Layout((0, 1))))
    return jnp.matmul(rows, g.astype(x.dtype), preferred_element_type=jnp.float32)

"""Memory between torso and heads: LSTM and GRU over T steps of B environments.

The products with the inputs are made for all rows at once; only what depends on the step before is
in the scan. The carry is zero where an episode starts, before that row is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from spmdrl.types import Carry

__all__ = ["CORES", "Core", "Gru", "Lstm", "run_cell"]

# From this width on, the kernel's gradient as one product over all steps pays for its extra arrays.
WIDE_CORE = 128

Cell = Callable[[Carry, Array, Array], Carry]  # carry, projected input, product with the kernel


class Core(nn.Module):
    """`(carry, x[T, B], first[T, B]) -> (carry, y[T, B])`; subclasses say what a step is."""

    size: int

    gates: ClassVar[int]  # products of this many times `size`
    states: ClassVar[int]  # arrays in the carry, the one that is shown last
    offset: ClassVar[bool] = False  # a bias in the last gate's product with the carry

    @nn.compact
    def __call__(
        self, carry: Carry, x: Float[Array, "T B F"], first: Bool[Array, "T B"]
    ) -> tuple[Carry, Float[Array, "T B n"]]:
        projected = nn.Dense(
            self.gates * self.size, kernel_init=nn.initializers.orthogonal(1.0), name="input"
        )(x)
        kernel, offset = Recurrent(self.size, self.gates, self.offset, name="recurrent")()
        return run_cell(self.cell, kernel, offset, carry, projected, first)

    @classmethod
    def zeros(cls, size: int, rows: int) -> Carry:
        return tuple(jnp.zeros((rows, size), jnp.float32) for _ in range(cls.states))

    @staticmethod
    def cell(carry: Carry, projected: Array, product: Array) -> Carry:
        raise NotImplementedError


class Recurrent(nn.Module):
    """The kernel of the product with the carry, orthogonal in each gate, and its offset."""

    size: int
    gates: int
    offset: bool

    @nn.compact
    def __call__(self) -> tuple[Array, Array]:
        width = self.gates * self.size
        kernel = self.param("kernel", _orthogonal_gates, (self.size, width), jnp.float32)
        if not self.offset:
            return kernel, jnp.zeros(width)
        bias = self.param("bias", nn.initializers.zeros, (self.size,), jnp.float32)
        return kernel, jnp.concatenate([jnp.zeros(width - self.size), bias])


def _orthogonal_gates(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
    size, gates = shape[0], shape[1] // shape[0]
    make = nn.initializers.orthogonal(1.0)
    parts = [make(k, (size, size), dtype) for k in jax.random.split(key, gates)]
    return jnp.concatenate(parts, axis=1)


class Lstm(Core):
    """Hochreiter and Schmidhuber 1997, with 1 added to the forget gate (Jozefowicz et al. 2015)."""

    gates, states = 4, 2

    @staticmethod
    def cell(carry: Carry, projected: Array, product: Array) -> Carry:
        memory, _ = carry
        enter, keep, new, show = jnp.split(projected + product, 4, axis=-1)
        memory = nn.sigmoid(keep + 1.0) * memory + nn.sigmoid(enter) * jnp.tanh(new)
        return memory, nn.sigmoid(show) * jnp.tanh(memory)


class Gru(Core):
    """Cho et al. 2014, in the form whose reset gate acts after the product with the carry."""

    gates, states, offset = 3, 1, True

    @staticmethod
    def cell(carry: Carry, projected: Array, product: Array) -> Carry:
        (hidden,) = carry
        reset_x, keep_x, new_x = jnp.split(projected, 3, axis=-1)
        reset_h, keep_h, new_h = jnp.split(product, 3, axis=-1)
        keep = nn.sigmoid(keep_x + keep_h)
        new = jnp.tanh(new_x + nn.sigmoid(reset_x + reset_h) * new_h)
        return ((1.0 - keep) * new + keep * hidden,)


CORES: dict[str, type[Core]] = {"lstm": Lstm, "gru": Gru}


# ---------------------------------------------------------------------------------------------
# The scan


def run_cell(
    cell: Cell,
    kernel: Float[Array, "n m"],
    offset: Float[Array, "m"],
    carry: Carry,
    projected: Float[Array, "T B m"],
    first: Bool[Array, "T B"],
) -> tuple[Carry, Float[Array, "T B n"]]:
    """A step sees `projected`, and `offset` plus the product of what was shown and the kernel."""
    if kernel.shape[0] < WIDE_CORE:
        return scan_cell(cell, kernel, offset, carry, projected, first)[:2]
    offsets = jnp.broadcast_to(offset, projected.shape)
    return run_wide(cell, kernel, offsets, carry, projected, first)


def scan_cell(
    cell: Cell, kernel: Array, offset: Array, carry: Carry, projected: Array, first: Array
) -> tuple[Carry, Array, Array]:
    """The last carry, and of every step what was shown after it and before it."""
    by_row = offset.ndim > 1

    def step(carry: Carry, row: tuple[Array, ...]) -> tuple[Carry, tuple[Array, Array]]:
        projected, first, *own = row
        carry = forget(carry, first)
        before = carry[-1]
        carry = cell(carry, projected, before @ kernel + (own[0] if by_row else offset))
        return carry, (carry[-1], before)

    rows = (projected, first, offset) if by_row else (projected, first)
    carry, (shown, before) = jax.lax.scan(step, carry, rows)
    return carry, shown, before


def forget(carry: Carry, first: Bool[Array, "B"]) -> Carry:
    """Zero where an episode starts."""
    return jax.tree.map(lambda x: jnp.where(first[:, None], jnp.zeros_like(x), x), carry)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_wide(
    cell: Cell, kernel: Array, offsets: Array, carry: Carry, projected: Array, first: Array
) -> tuple[Carry, Array]:
    """`scan_cell` whose backward pass has no kernel's gradient in it.

    That is the product of what was shown and of the offsets' gradients, over all steps at once.
    """
    return scan_cell(cell, kernel, offsets, carry, projected, first)[:2]


def _run_wide_fwd(
    cell: Cell, kernel: Array, offsets: Array, carry: Carry, projected: Array, first: Array
) -> tuple[tuple[Carry, Array], Any]:
    def run(offsets: Array, carry: Carry, projected: Array) -> tuple[Carry, Array, Array]:
        return scan_cell(cell, kernel, offsets, carry, projected, first)

    (after, shown, before), pull = jax.vjp(run, offsets, carry, projected)
    return (after, shown), (pull, before)


def _run_wide_bwd(cell: Cell, saved: Any, gradients: tuple[Carry, Array]) -> tuple[Any, ...]:
    pull, before = saved
    offsets, carry, projected = pull((*gradients, jnp.zeros_like(before)))
    kernel = jnp.einsum("tbn,tbm->nm", before, offsets)
    return kernel, offsets, carry, projected, None


run_wide.defvjp(_run_wide_fwd, _run_wide_bwd)

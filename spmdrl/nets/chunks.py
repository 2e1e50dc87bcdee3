"""A part of a network on many rows, some at a time, so that its temporaries stay small.

What a chunk computed is forgotten and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array

__all__ = ["in_chunks"]


def in_chunks(
    module: nn.Module, function: Callable[[Any, Array], Any], x: Array, most: int | None
) -> Any:
    """`function(module, x)`; it may make submodules, as the module's own `__call__` would."""
    count = x.shape[0]
    if most is None or count <= most:
        return function(module, x)
    size = max(n for n in range(1, most + 1) if count % n == 0)

    def one(module: nn.Module, nothing: tuple[()], rows: Array) -> tuple[tuple[()], Array]:
        return nothing, function(module, rows)

    every = nn.scan(
        nn.remat(one, prevent_cse=False),
        variable_broadcast="params",
        split_rngs={"params": False},
    )
    _, out = every(module, (), x.reshape(-1, size, *x.shape[1:]))
    return jax.tree.map(lambda y: y.reshape(count, *y.shape[2:]), out)

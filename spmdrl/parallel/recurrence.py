"""`y_t = x_t + a_t y_{t-1}` along the first axis: returns, advantages and traces are all of this.

A CPU runs a loop. On an accelerator every step of a loop is a handful of launches, so there the
distance over which rows are combined is doubled again and again, which takes log2(T) of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float

from spmdrl.lazy import Array, jax, jnp
from spmdrl.parallel.platforms import PLATFORMS

__all__ = ["doubling", "recurrence"]


def recurrence(
    loop: Callable[..., Any],
    x: Float[Array, "T *rows"],
    a: Float[Array, "T *rows"],
    reverse: bool = False,
) -> Float[Array, "T *rows"]:
    """`loop(x, a)` must give the same, step by step; it is what runs where loops are cheap."""
    loops = {name: loop for name, liked in PLATFORMS.items() if liked.cheap_loops}

    def tree(x: Array, a: Array) -> Array:
        return doubling(x, a, reverse)

    return jax.lax.platform_dependent(x, a, default=tree, **loops)


def doubling(
    x: Float[Array, "T *rows"], a: Float[Array, "T *rows"], reverse: bool
) -> Float[Array, "T *rows"]:
    """Hillis and Steele 1986. With `reverse` y_t depends on y_{t+1}."""
    distance, length = 1, x.shape[0]
    while distance < length:
        before, factor = (_shifted(y, distance, reverse, fill) for y, fill in ((x, 0.0), (a, 1.0)))
        # Selected, not multiplied: what lies behind an end may not be finite.
        x = x + jnp.where(a > 0, a * before, 0.0)
        a, distance = a * factor, 2 * distance
    return x


def _shifted(y: Array, distance: int, reverse: bool, fill: float) -> Array:
    edge = jnp.full((distance, *y.shape[1:]), fill, y.dtype)
    parts = [y[distance:], edge] if reverse else [edge, y[:-distance]]
    return jnp.concatenate(parts)

"""Several arrays as one on their way to a device.

To an accelerator every transfer costs microseconds, however small it is. A processor's arrays are
read where they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from spmdrl.parallel.platforms import likes

__all__ = ["Parcel", "parcel_for"]


class Parcel(NamedTuple):
    """How a tree of arrays travels; all of them have the same rows along their first axis."""

    pack: Callable[[Any], Any]  # on the host
    unpack: Callable[[Any], Any]  # inside a program


def parcel_for(example: Any, platform: str) -> Parcel:
    """For trees of arrays that differ from the example in nothing but the number of rows."""
    if not likes(platform).one_transfer:
        return Parcel(lambda tree: tree, lambda tree: tree)
    leaves, structure = jax.tree.flatten(example)
    kinds = [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in leaves]
    widths = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
    edges = np.cumsum([0, *widths]).tolist()

    def pack(tree: Any) -> np.ndarray:
        rows = [np.ascontiguousarray(x).reshape(len(x), -1) for x in jax.tree.leaves(tree)]
        return np.concatenate([x.view(np.uint8) for x in rows], axis=1)

    def unpack(packed: UInt8[Array, "N n"]) -> Any:
        cuts = [packed[:, a:b] for a, b in itertools.pairwise(edges)]
        pairs = zip(cuts, kinds, strict=True)
        return jax.tree.unflatten(structure, [_read(cut, *kind) for cut, kind in pairs])

    return Parcel(pack, unpack)


def _read(raw: UInt8[Array, "N n"], shape: tuple[int, ...], dtype: np.dtype) -> Array:
    rows = raw.shape[0]
    if dtype == np.bool_:
        return raw.reshape(rows, *shape) != 0
    if dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(raw, dtype).reshape(rows, *shape)
    grouped = raw.reshape(rows, *shape, dtype.itemsize)
    return jax.lax.bitcast_convert_type(grouped, jnp.dtype(dtype))

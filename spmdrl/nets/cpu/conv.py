"""Strided convolution as one matrix product, for CPUs.

XLA's convolution gradients are slow on CPU, and slower still inside a scan. Space-to-depth turns
a stride-s kernel of size k into a stride-1 kernel of size k/s; its few shifted views side by side
make the left factor of a product. Images stay bytes as long as possible and are moved four at a
time. Parameters keep the layout of `nn.Conv`, so that a checkpoint does not depend on how it was
computed.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Shaped, UInt8, UInt32

__all__ = ["Conv", "SameConv", "conv_as_matmul", "conv_of_bytes", "packs"]

WORD = 4  # bytes


class Conv(nn.Module):
    """`nn.Conv(features, (size, size), (stride, stride), padding="VALID")`, computed either way."""

    features: int
    size: int
    stride: int
    method: Literal["matmul", "xla"]
    scale: float = 1.0  # of the input; kept out of the image, which may be uint8
    channels_first: bool = False  # in the input; in the output they are last
    dtype: Any = jnp.float32  # of products and output

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N h w F"]:
        shape = (self.size, self.size, x.shape[1 if self.channels_first else -1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(2**0.5), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        kernel, bias = (kernel * self.scale).astype(self.dtype), bias.astype(self.dtype)
        if self.method == "matmul" and packs(x, self.stride, self.channels_first):
            return conv_of_bytes(x, kernel, self.stride, self.channels_first) + bias
        if self.channels_first:
            x = x.transpose(0, 2, 3, 1)
        if self.method == "matmul":
            return conv_as_matmul(x, kernel, self.stride) + bias
        return _conv_xla(x.astype(self.dtype), kernel, self.stride) + bias


class SameConv(nn.Module):
    """`nn.Conv(features, (3, 3))`, whose output is as large as its input, computed either way."""

    features: int
    method: Literal["matmul", "xla"]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "N H W C"]) -> Float[Array, "N H W F"]:
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x, kernel, bias = (y.astype(self.dtype) for y in (x, kernel, bias))
        if self.method == "matmul":
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            return conv_as_matmul(x, kernel, 1) + bias
        return _conv_xla(x, kernel, 1, "SAME") + bias


def _conv_xla(x: Array, kernel: Array, stride: int, padding: str = "VALID") -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv_as_matmul(
    x: Shaped[Array, "N H W C"], kernel: Float[Array, "k k C F"], stride: int
) -> Float[Array, "N h w F"]:
    """VALID convolution; the kernel's size must be a multiple of the stride."""
    size, _, channels, features = kernel.shape
    cells = size // stride
    patches = _patches(_space_to_depth(x, stride), cells).astype(kernel.dtype)
    weights = kernel.reshape(cells, stride, cells, stride, channels, features)
    weights = weights.transpose(0, 2, 1, 3, 4, 5).reshape(-1, features)
    out = _matmul(patches.reshape(-1, patches.shape[-1]), weights)
    return out.reshape(*patches.shape[:3], features)


def _space_to_depth(x: Array, s: int) -> Array:
    n, height, width, channels = x.shape
    height, width = height // s * s, width // s * s  # VALID never looks beyond
    x = x[:, :height, :width].reshape(n, height // s, s, width // s, s, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, height // s, width // s, s * s * channels)


def _patches(x: Shaped[Array, "N H W C"], cells: int) -> Shaped[Array, "N h w P"]:
    """Every `cells` x `cells` window, its cells side by side."""
    height, width = x.shape[1] - cells + 1, x.shape[2] - cells + 1
    views = [x[:, i : i + height, j : j + width] for i in range(cells) for j in range(cells)]
    return jnp.concatenate(views, axis=-1)


@jax.custom_vjp
def _matmul(x: Float[Array, "M K"], w: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return x @ w


def _matmul_fwd(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _matmul_bwd(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    # The barrier keeps the transpose apart from the product: fused, XLA:CPU walks the long
    # dimension with a stride and is several times slower.
    x_t = jax.lax.optimization_barrier(x.T)
    return g @ w.T, x_t @ g


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


# ---------------------------------------------------------------------------------------------
# Bytes, four to a word: XLA:CPU moves words as fast as bytes


def packs(x: Array, stride: int, channels_first: bool) -> bool:
    """Whether four bytes that lie side by side always go to the same place."""
    together = x.shape[-1] if not channels_first else math.gcd(x.shape[-1], stride)
    return x.dtype == jnp.uint8 and together % WORD == 0


def conv_of_bytes(
    x: UInt8[Array, "N ..."], kernel: Float[Array, "k k C F"], stride: int, channels_first: bool
) -> Float[Array, "N h w F"]:
    """`conv_as_matmul` of images that are not differentiated."""
    size, _, channels, features = kernel.shape
    cells = size // stride
    words = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, WORD), jnp.uint32)
    weights = kernel.reshape(cells, stride, cells, stride, channels, features)
    if channels_first:
        words = _words_to_depth(words, stride)
        weights = weights.transpose(0, 2, 4, 1, 3, 5)
    else:
        words = _space_to_depth(words, stride)
        weights = weights.transpose(0, 2, 1, 3, 4, 5)
    # The barrier has the words put in order once, not once for every view of them.
    patches = _patches(jax.lax.optimization_barrier(words), cells)
    out = _bytes_matmul(patches.reshape(-1, patches.shape[-1]), weights.reshape(-1, features))
    return out.reshape(*patches.shape[:3], features)


def _words_to_depth(x: UInt32[Array, "N C H W"], s: int) -> UInt32[Array, "N h w D"]:
    n, channels, height, width = x.shape
    height, wide = height // s * s, s // WORD
    x = x[:, :, :height, : width // wide * wide]
    x = x.reshape(n, channels, height // s, s, width // wide, wide)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(n, height // s, width // wide, channels * s * wide)


@jax.custom_vjp
def _bytes_matmul(x: UInt32[Array, "M K"], w: Float[Array, "K4 N"]) -> Float[Array, "M N"]:
    columns = jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)
    return columns.astype(w.dtype) @ w


def _bytes_matmul_fwd(x: Array, w: Array) -> tuple[Array, Array]:
    return _bytes_matmul(x, w), x


def _bytes_matmul_bwd(x: Array, g: Array) -> tuple[np.ndarray, Array]:
    # As in _matmul_bwd, but the words are transposed and become floats afterwards. Without the
    # layout the transpose would be nothing but another way to read, with a stride again.
    words = jax.lax.optimization_barrier(with_layout_constraint(x.T, Layout((0, 1))))
    rows = jnp.stack([(words >> shift) & 255 for shift in range(0, 32, 8)], axis=1)
    rows = jax.lax.optimization_barrier(rows.astype(g.dtype).reshape(-1, x.shape[0]))
    return np.zeros(x.shape, jax.dtypes.float0), rows @ g


_bytes_matmul.defvjp(_bytes_matmul_fwd, _bytes_matmul_bwd)

"""Strided convolution as one matrix product, for CPUs.

XLA's convolution gradients are slow on CPU, and slower still inside a scan. Space-to-depth turns
a stride-s kernel of size k into a stride-1 kernel of size k/s; its few shifted views side by side
make the left factor of a product. Parameters keep the layout of `nn.Conv`, so that a checkpoint
does not depend on how it was computed. Public names: `Conv`, `conv_as_matmul`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Shaped


class Conv(nn.Module):
    """`nn.Conv(features, (size, size), (stride, stride), padding="VALID")`, computed either way."""

    features: int
    size: int
    stride: int
    method: Literal["matmul", "xla"]
    scale: float = 1.0  # of the input; kept out of the image, which may be uint8

    @nn.compact
    def __call__(self, x: Shaped[Array, "N H W C"]) -> Float[Array, "N h w F"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.orthogonal(2**0.5), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        kernel = kernel * self.scale
        if self.method == "matmul":
            return conv_as_matmul(x, kernel, self.stride) + bias
        return _conv_xla(x.astype(jnp.float32), kernel, self.stride) + bias


def _conv_xla(x: Array, kernel: Array, stride: int) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv_as_matmul(
    x: Shaped[Array, "N H W C"], kernel: Float[Array, "k k C F"], stride: int
) -> Float[Array, "N h w F"]:
    """VALID convolution; the kernel's size must be a multiple of the stride."""
    size, _, channels, features = kernel.shape
    cells = size // stride
    n, height, width, _ = x.shape
    out_h, out_w = (height - size) // stride + 1, (width - size) // stride + 1
    x = _space_to_depth(x, stride)
    views = [x[:, i : i + out_h, j : j + out_w, :] for i in range(cells) for j in range(cells)]
    patches = jnp.concatenate(views, axis=-1).astype(jnp.float32)
    weights = kernel.reshape(cells, stride, cells, stride, channels, features)
    weights = weights.transpose(0, 2, 1, 3, 4, 5).reshape(-1, features)
    return _matmul(patches.reshape(n * out_h * out_w, -1), weights).reshape(
        n, out_h, out_w, features
    )


def _space_to_depth(x: Array, s: int) -> Array:
    n, height, width, channels = x.shape
    height, width = height // s * s, width // s * s  # VALID never looks beyond
    x = x[:, :height, :width].reshape(n, height // s, s, width // s, s, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, height // s, width // s, s * s * channels)


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

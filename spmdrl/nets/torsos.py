"""From an observation to features: one encoder for each of its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Shaped

from spmdrl.config import ConfigError, NetConfig, own_code
from spmdrl.nets.chunks import in_chunks
from spmdrl.nets.cpu.chunked_dense import WIDE, WideDense
from spmdrl.nets.cpu.conv import Conv, SameConv
from spmdrl.nets.own_torso import OwnTorso, find_network, try_out
from spmdrl.types import EnvSpec, Obs, ObsPart, channels_first, sides

__all__ = [
    "SQRT2", "IdsMlp", "ImpalaResnet", "Joined", "Mlp", "NatureCnn", "SmallCnn", "TorsoMaker",
    "dense", "embeds", "encoder_of", "one_hot", "planes", "torso_maker",
]  # fmt: skip

SQRT2 = 2.0**0.5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": nn.relu}
NATURE_SIDE, SMALL_SIDE = 36, 5  # pixels: below these nothing is left after the convolutions
GRID_SIDE = 3  # cells: small grids are worth smaller kernels
MOST_VALUES, MOST_ONE_HOT, EMBEDDING = 64, 4096, 16
Method = Literal["matmul", "xla"]
TorsoMaker = Callable[[str], nn.Module]  # by the name of its parameters


def dense(features: int, gain: float, name: str | None = None, dtype: Any = None) -> nn.Dense:
    init = nn.initializers.orthogonal(gain)
    return nn.Dense(features, kernel_init=init, name=name, dtype=dtype)


class Mlp(nn.Module):
    hidden: tuple[int, ...]
    activation: str
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        scale = 1 / 255 if x.dtype == jnp.uint8 else 1.0
        x = x.reshape(x.shape[0], -1).astype(jnp.float32) * scale
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](dense(width, SQRT2, dtype=self.dtype)(x))
        return x


class IdsMlp(nn.Module):
    """Ids as 0s and 1s or, where that would be wide, as learned vectors; then an MLP."""

    hidden: tuple[int, ...]
    activation: str
    values: tuple[int, ...]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x = _channels_last(x)
        if embeds(self.values, x.shape[1:]):
            x = nn.Embed(sum(self.values), EMBEDDING, param_dtype=jnp.float32)(self._rows(x))
        else:
            x = one_hot(x, self.values)
        return Mlp(self.hidden, self.activation, self.dtype, name="mlp")(x)

    def _rows(self, x: Array) -> Array:
        """Of the table of vectors, in which every entry with its own number of ids has its own."""
        starts = [sum(self.values[:i]) for i in range(len(self.values))]
        return x.astype(jnp.int32) + jnp.asarray(starts, jnp.int32)


class NatureCnn(nn.Module):
    """Mnih et al. 2015; takes images or grids of ids, channels first or last."""

    method: Method
    values: tuple[int, ...] = ()
    at_once: int | None = None  # rows of the convolutions, in a long sequence
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x = in_chunks(self, NatureCnn.convolutions, x, self.at_once)
        wide = WideDense(512, nn.initializers.orthogonal(SQRT2), self.dtype, name=WIDE)
        return nn.relu(wide(x))

    def convolutions(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x, scale, first = _channels(x, self.values)
        x = nn.relu(Conv(32, 8, 4, self.method, scale, first, dtype=self.dtype)(x))
        x = nn.relu(Conv(64, 4, 2, self.method, dtype=self.dtype)(x))
        x = nn.relu(Conv(64, 3, 1, self.method, dtype=self.dtype)(x))
        return x.reshape(x.shape[0], -1)


class SmallCnn(nn.Module):
    """Two convolutions and a dense layer, for images that are too small for the Nature CNN."""

    method: Method
    values: tuple[int, ...] = ()
    at_once: int | None = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x = in_chunks(self, SmallCnn.convolutions, x, self.at_once)
        return nn.relu(dense(128, SQRT2, dtype=self.dtype)(x))

    def convolutions(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        side = min(sides(x.shape[1:]))
        x, scale, first = _channels(x, self.values)
        size, stride, second = (4, 2, 3) if side >= 16 else (3, 1, 3)
        if side < SMALL_SIDE:
            size, stride, second = 2, 1, 2
        x = nn.relu(Conv(16, size, stride, self.method, scale, first, dtype=self.dtype)(x))
        x = nn.relu(Conv(32, second, 1, self.method, dtype=self.dtype)(x))
        return x.reshape(x.shape[0], -1)


class ImpalaResnet(nn.Module):
    """The deep network of Espeholt et al. 2018: 15 convolutions in three sections."""

    method: Method
    values: tuple[int, ...] = ()
    at_once: int | None = None
    width: int = 1  # multiplies the published channels
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x = in_chunks(self, ImpalaResnet.convolutions, x, self.at_once)
        return nn.relu(dense(256, SQRT2, "dense", self.dtype)(x))

    def convolutions(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x, scale, first = _channels(x, self.values)
        x = (x.transpose(0, 2, 3, 1) if first else x).astype(jnp.float32) * scale
        for i, channels in enumerate((16, 32, 32)):
            name = f"section_{i}"
            x = ResnetSection(channels * self.width, self.method, self.dtype, name=name)(x)
        return nn.relu(x).reshape(x.shape[0], -1)


class ResnetSection(nn.Module):
    channels: int
    method: Method
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "N H W C"]) -> Float[Array, "N h w F"]:
        x = max_pool(self.same_conv("conv")(x))
        for block in range(2):
            inner = x
            for layer in range(2):
                inner = self.same_conv(f"block_{block}_conv_{layer}")(nn.relu(inner))
            x = x + inner
        return x

    def same_conv(self, name: str) -> SameConv:
        return SameConv(self.channels, self.method, self.dtype, name=name)


def max_pool(x: Float[Array, "N H W C"]) -> Float[Array, "N h w C"]:
    """3 x 3, stride 2; the border counts as minus infinity."""
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    least = np.array(-np.inf, x.dtype)
    return jax.lax.reduce_window(x, least, jax.lax.max, window, strides, "SAME")


class Joined(nn.Module):
    """The features of every array of the observation, side by side in order of name."""

    makers: Mapping[str, TorsoMaker]

    @nn.compact
    def __call__(self, obs: Obs) -> Float[Array, "N F"]:
        return jnp.concatenate([self.makers[k](k)(obs[k]) for k in sorted(self.makers)], axis=-1)


# ---------------------------------------------------------------------------------------------
# Ids


def one_hot(x: Shaped[Array, "N ..."], values: tuple[int, ...]) -> Float[Array, "N ..."]:
    """0s and 1s side by side along the last axis; of two values one number says everything."""

    def wide(ids: Array, count: int) -> Array:
        if count == 2:
            return ids.astype(jnp.float32)[..., None]
        return jax.nn.one_hot(ids, count, dtype=jnp.float32)  # else float64 under x64

    if len(values) == 1:
        return wide(x, values[0]).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([wide(x[..., i], n) for i, n in enumerate(values)], axis=-1)


def planes(x: Shaped[Array, "N ..."], values: tuple[int, ...]) -> Float[Array, "N H W F"]:
    """A grid of ids as one plane for each of them."""
    return one_hot(x[..., None] if x.ndim == 3 else _channels_last(x), values)


def _channels_last(x: Array) -> Array:
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 and channels_first(x.shape[1:]) else x


def embeds(values: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether ids of this shape are too many for 0s and 1s."""
    cells = math.prod(shape) if len(values) == 1 else math.prod(shape[:-1])
    width = cells * sum(values)
    return max(values) > MOST_VALUES or width > MOST_ONE_HOT


def _channels(x: Array, values: tuple[int, ...]) -> tuple[Array, float, bool]:
    """What the first convolution takes: array, scale, and whether its channels are first."""
    if values:
        return planes(x, values), 1.0, False
    return x, 1 / 255 if x.dtype == jnp.uint8 else 1.0, channels_first(x.shape[1:])


# ---------------------------------------------------------------------------------------------
# Which encoder fits


def torso_maker(
    net: NetConfig, spec: EnvSpec, env_id: str, conv: Method, at_once: int | None = None
) -> TorsoMaker:
    """A function that makes the torso, under the name that its parameters get.

    `at_once` limits the rows whose convolutions are computed together.
    """
    if isinstance(spec.obs, ObsPart):
        return _encoder(net, spec.obs, env_id, conv, at_once)
    makers = {
        name: _encoder(encoder_config(net, spec, part), part, f"{env_id} ({name})", conv, at_once)
        for name, part in spec.parts.items()
    }
    return lambda name: Joined(makers, name=name)


def encoder_config(net: NetConfig, spec: EnvSpec, part: ObsPart) -> NetConfig:
    """An encoder that was asked for by name is for the images; numbers beside them get the MLP.

    One of the user's own is for everything where there are no images.
    """
    if part.is_image or part.is_grid or (own_code.own_network(net.torso) and not spec.has_image):
        return net
    return NetConfig(hidden=net.hidden, activation=net.activation, dtype=net.dtype)


def encoder_of(net: NetConfig, part: ObsPart) -> str:
    """The encoder that was asked for by name, or the one that fits."""
    if net.torso != "auto":
        return net.torso
    if not (part.is_image or part.is_grid):
        return "mlp"
    side = min(sides(part.shape))
    if side >= NATURE_SIDE:
        return "nature_cnn"
    return "small_cnn" if side >= _least_side(part) else "mlp"


def _least_side(part: ObsPart) -> int:
    return GRID_SIDE if part.is_grid else SMALL_SIDE


def _encoder(
    net: NetConfig, part: ObsPart, env_id: str, conv: Method, at_once: int | None
) -> TorsoMaker:
    kind, dtype = encoder_of(net, part), jnp.dtype(net.dtype)
    if own_code.own_network(kind):
        return _own_encoder(net, part, env_id, at_once)
    if kind == "mlp":
        if part.kind == "ids":
            return lambda name: IdsMlp(net.hidden, net.activation, part.values, dtype, name=name)
        return lambda name: Mlp(net.hidden, net.activation, dtype, name=name)
    if not (part.is_image or part.is_grid):
        raise ConfigError(
            f"net.torso {kind} needs images; {env_id} gives {part.dtype} of shape "
            f"{part.shape}; use --net.torso mlp"
        )
    least = {"nature_cnn": NATURE_SIDE, "impala_resnet": 1}.get(kind, _least_side(part))
    if min(sides(part.shape)) < least:
        raise ConfigError(
            f"net.torso {kind} needs images of at least {least} x {least} pixels; {env_id} gives "
            f"{part.shape}; use --net.torso {'small_cnn' if kind == 'nature_cnn' else 'mlp'}"
        )
    if kind == "nature_cnn":
        return lambda name: NatureCnn(conv, part.values, at_once, dtype, name=name)
    if kind == "impala_resnet":
        return lambda name: ImpalaResnet(conv, part.values, at_once, net.width, dtype, name=name)
    return lambda name: SmallCnn(conv, part.values, at_once, dtype, name=name)


def _own_encoder(net: NetConfig, part: ObsPart, env_id: str, at_once: int | None) -> TorsoMaker:
    make, read = find_network(net), partial(as_numbers, part)
    try_out(net, OwnTorso(make, read), part, env_id)
    return lambda name: OwnTorso(make, read, at_once, name=name)


def as_numbers(part: ObsPart, x: Shaped[Array, "N ..."]) -> Shaped[Array, "N ..."]:
    """What a network of the user's own is shown: images from 0 to 1 with their channels last, ids
    as 0s and 1s or, where that would be wide, as they are."""
    if part.kind == "ids":
        if part.is_grid:
            return planes(x, part.values)
        return x.astype(jnp.int32) if embeds(part.values, part.shape) else one_hot(x, part.values)
    scale = 1 / 255 if x.dtype == jnp.uint8 else 1.0
    return (_channels_last(x) if part.is_image else x).astype(jnp.float32) * scale

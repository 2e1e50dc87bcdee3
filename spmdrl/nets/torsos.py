"""From an observation to features: one encoder for each of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Shaped

from spmdrl.config import ConfigError, NetConfig
from spmdrl.nets.cpu.chunked_dense import WIDE, WideDense
from spmdrl.nets.cpu.conv import Conv
from spmdrl.types import EnvSpec, Obs, ObsPart

__all__ = ["SQRT2", "Joined", "Mlp", "NatureCnn", "SmallCnn", "TorsoMaker", "dense", "torso_maker"]

SQRT2 = 2.0**0.5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": nn.relu}
NATURE_SIDE, SMALL_SIDE = 36, 5  # pixels: below these nothing is left after the convolutions
Method = Literal["matmul", "xla"]
TorsoMaker = Callable[[str], nn.Module]  # by the name of its parameters


def dense(features: int, gain: float, name: str | None = None) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(gain), name=name)


class Mlp(nn.Module):
    hidden: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        scale = 1 / 255 if x.dtype == jnp.uint8 else 1.0
        x = x.reshape(x.shape[0], -1).astype(jnp.float32) * scale
        for width in self.hidden:
            x = ACTIVATIONS[self.activation](dense(width, SQRT2)(x))
        return x


class NatureCnn(nn.Module):
    """Mnih et al. 2015; takes uint8 images, channels first or last."""

    method: Method

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        x = nn.relu(Conv(32, 8, 4, self.method, 1 / 255, channels_first(x.shape[1:]))(x))
        x = nn.relu(Conv(64, 4, 2, self.method)(x))
        x = nn.relu(Conv(64, 3, 1, self.method)(x))
        wide = WideDense(512, nn.initializers.orthogonal(SQRT2), name=WIDE)
        return nn.relu(wide(x.reshape(x.shape[0], -1)))


class SmallCnn(nn.Module):
    """Two convolutions and a dense layer, for images that are too small for the Nature CNN."""

    method: Method

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        first = channels_first(x.shape[1:])
        size, stride = (4, 2) if min(sides(x.shape[1:])) >= 16 else (3, 1)
        x = nn.relu(Conv(16, size, stride, self.method, 1 / 255, first)(x))
        x = nn.relu(Conv(32, 3, 1, self.method)(x))
        return nn.relu(dense(128, SQRT2)(x.reshape(x.shape[0], -1)))


class Joined(nn.Module):
    """The features of every array of the observation, side by side in order of name."""

    makers: Mapping[str, TorsoMaker]

    @nn.compact
    def __call__(self, obs: Obs) -> Float[Array, "N F"]:
        return jnp.concatenate([self.makers[k](k)(obs[k]) for k in sorted(self.makers)], axis=-1)


def channels_first(shape: tuple[int, ...]) -> bool:
    return shape[0] < shape[2]


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of an image."""
    return shape[1:] if channels_first(shape) else shape[:2]  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------
# Which encoder fits


def torso_maker(net: NetConfig, spec: EnvSpec, env_id: str, conv: Method) -> TorsoMaker:
    """A function that makes the torso, under the name that its parameters get."""
    if isinstance(spec.obs, ObsPart):
        return _encoder(net, spec.obs, env_id, conv)
    # An encoder that was asked for by name is for the images; numbers beside them get the MLP.
    makers = {
        name: _encoder(net if part.is_image else _plain(net), part, f"{env_id} ({name})", conv)
        for name, part in spec.parts.items()
    }
    return lambda name: Joined(makers, name=name)


def _plain(net: NetConfig) -> NetConfig:
    return NetConfig(hidden=net.hidden, activation=net.activation)


def _encoder(net: NetConfig, part: ObsPart, env_id: str, conv: Method) -> TorsoMaker:
    kind = net.torso if net.torso != "auto" else _fitting(part)
    if kind == "mlp":
        return lambda name: Mlp(net.hidden, net.activation, name=name)
    if not part.is_image:
        raise ConfigError(
            f"net.torso {kind} needs uint8 images; {env_id} gives {part.dtype} of shape "
            f"{part.shape}; use --net.torso mlp"
        )
    least = NATURE_SIDE if kind == "nature_cnn" else SMALL_SIDE
    if min(sides(part.shape)) < least:
        raise ConfigError(
            f"net.torso {kind} needs images of at least {least} x {least} pixels; {env_id} gives "
            f"{part.shape}; use --net.torso {'small_cnn' if kind == 'nature_cnn' else 'mlp'}"
        )
    if kind == "nature_cnn":
        return lambda name: NatureCnn(conv, name=name)
    return lambda name: SmallCnn(conv, name=name)


def _fitting(part: ObsPart) -> str:
    if not part.is_image:
        return "mlp"
    side = min(sides(part.shape))
    return "nature_cnn" if side >= NATURE_SIDE else "small_cnn" if side >= SMALL_SIDE else "mlp"

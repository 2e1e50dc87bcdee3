"""Actor-critic networks behind one signature for feed-forward and recurrent policies.

`apply(variables, carry, obs, first) -> (carry, dist_params, value)`, where `variables` holds the
parameters and the observation moments, as Flax holds batch statistics; a feed-forward carry is ().
Public names: `Policy`, `make_policy`, `variables_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Shaped

from spmdrl.config import Config, ConfigError
from spmdrl.nets import moments
from spmdrl.nets.cpu.chunked_dense import INPUTS, WIDE, Factors, WideDense, inputs_of, probed
from spmdrl.nets.cpu.conv import Conv
from spmdrl.nets.distributions import DiagNormal, Distribution, make_distribution
from spmdrl.types import Carry, EnvSpec, Moments, Params

SQRT2 = 2.0**0.5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": nn.relu}


class Policy(NamedTuple):
    """A network and the distribution of its actions."""

    init: Callable[[Array], Params]
    apply: Callable[[Any, Carry, Array, Array], tuple[Carry, Array, Array]]
    initial_carry: Callable[[int], Carry]
    dist: Distribution
    apply_probed: Callable[..., tuple[tuple[Carry, Array, Array], Factors]]  # see `nets.wide`
    critic_apart: bool  # values need nothing of the actor, so no step has to wait for them


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

    method: Literal["matmul", "xla"]

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Float[Array, "N F"]:
        channels_first = x.shape[1] < x.shape[3]
        x = nn.relu(Conv(32, 8, 4, self.method, 1 / 255, channels_first)(x))
        x = nn.relu(Conv(64, 4, 2, self.method)(x))
        x = nn.relu(Conv(64, 3, 1, self.method)(x))
        wide = WideDense(512, nn.initializers.orthogonal(SQRT2), name=WIDE)
        return nn.relu(wide(x.reshape(x.shape[0], -1)))


class ActorCritic(nn.Module):
    make_torso: Callable[[str], nn.Module]
    dist: Distribution
    shared: bool
    log_std_init: float
    obs_clip: float | None  # None leaves observations as they are

    @nn.compact
    def __call__(
        self, carry: Carry, obs: Shaped[Array, "N ..."], first: Array
    ) -> tuple[Carry, Array, Array]:
        if self.obs_clip is not None:
            known: Any = self.get_variable("obs_stats", "moments")
            obs = moments.normalize(known, obs, self.obs_clip)
        actor = self.make_torso("torso" if self.shared else "actor_torso")(obs)
        critic = actor if self.shared else self.make_torso("critic_torso")(obs)
        dist_params = dense(self.dist.num_params, 0.01, "policy_head")(actor)
        value = dense(1, 1.0, "value_head")(critic)[:, 0]
        if isinstance(self.dist, DiagNormal):
            init = nn.initializers.constant(self.log_std_init)
            log_std = self.param("log_std", init, (self.dist.dim,), jnp.float32)
            log_std = jnp.broadcast_to(log_std, dist_params.shape)
            dist_params = jnp.concatenate([dist_params, log_std], axis=-1)
        return carry, dist_params, value


def variables_of(params: Params, obs_moments: Moments) -> dict[str, Any]:
    """What `Policy.apply` takes as its first argument."""
    return {"params": params, "obs_stats": {"moments": obs_moments}}


def make_policy(config: Config, spec: EnvSpec, platform: str = "") -> Policy:
    """`platform` is that of the device it will run on, by default jax's."""
    dist = make_distribution(spec.action)
    if config.env.normalize_obs and spec.is_image:
        raise ConfigError(
            f"env.normalize_obs is for vectors; {config.env.id} gives images, which are scaled "
            "by 1/255 already"
        )
    net = ActorCritic(
        make_torso=_torso_maker(config, spec, platform or jax.default_backend()),
        dist=dist,
        shared=config.net.shared,
        log_std_init=config.net.log_std_init,
        obs_clip=config.env.obs_clip if config.env.normalize_obs else None,
    )

    def init(key: Array) -> Params:
        obs = jnp.zeros((1, *spec.obs_shape), spec.obs_dtype)
        blank = variables_of({}, moments.init(spec.obs_shape))
        blank.pop("params")
        first = jnp.zeros((1,), bool)
        _, grown = net.apply(blank, (), obs, first, rngs={"params": key}, mutable=["params"])
        return grown["params"]

    def apply(variables: Any, carry: Carry, obs: Array, first: Array) -> Any:
        return net.apply(variables, carry, obs, first)

    def apply_probed(variables: Any, probes: Factors, *inputs: Any) -> Any:
        out, filled = net.apply(probed(variables, probes), *inputs, mutable=[INPUTS])
        return out, inputs_of(filled)

    return Policy(
        init=init,
        apply=apply,
        apply_probed=apply_probed,
        initial_carry=lambda _: (),
        dist=dist,
        critic_apart=not (config.net.shared or spec.is_image),  # a few images are enough at once
    )


def _torso_maker(config: Config, spec: EnvSpec, platform: str) -> Callable[[str], nn.Module]:
    torso = config.net.torso
    if torso == "auto":
        torso = "nature_cnn" if spec.is_image else "mlp"
    if torso == "mlp":
        return lambda name: Mlp(config.net.hidden, config.net.activation, name=name)
    if not spec.is_image:
        raise ConfigError(
            f"net.torso nature_cnn needs uint8 images; {config.env.id} gives "
            f"{spec.obs_dtype} of shape {spec.obs_shape}; use --net.torso mlp"
        )
    return lambda name: NatureCnn(_conv_method(config, platform), name=name)


def _conv_method(config: Config, platform: str) -> Literal["matmul", "xla"]:
    if config.net.conv == "auto":
        return "matmul" if platform == "cpu" else "xla"
    return config.net.conv

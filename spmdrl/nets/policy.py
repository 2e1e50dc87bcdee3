"""Actor-critic networks behind one signature for feed-forward and recurrent policies.

`apply(variables, carry, obs, first) -> (carry, dist_params, value)` for a step, where `variables`
holds the parameters and the observation moments, as Flax holds batch statistics; `unroll` for T
steps in a row. A feed-forward carry is ().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool

from spmdrl.config import Config, ConfigError
from spmdrl.nets import moments
from spmdrl.nets.cpu.chunked_dense import INPUTS, Factors, inputs_of, probed
from spmdrl.nets.distributions import Categorical, DiagNormal, Distribution, make_distribution
from spmdrl.nets.sight import Sight, make_sight, with_symbols
from spmdrl.nets.torsos import Method, TorsoMaker, dense, torso_maker
from spmdrl.parallel.platforms import likes
from spmdrl.types import MASK, Carry, EnvSpec, Obs, Params

__all__ = ["ActorCritic", "Policy", "make_policy", "variables_of"]

Answer = tuple[Carry, Array, Array]  # carry, parameters of the distribution, value


class Policy(NamedTuple):
    """A network and the distribution of its actions."""

    init: Callable[[Array], Params]
    apply: Callable[[Any, Carry, Obs, Array], Answer]
    unroll: Callable[[Any, Carry, Obs, Array], Answer]
    initial_carry: Callable[[int], Carry]
    dist: Distribution
    # `apply` that also gives what the gradients of large kernels are made of (nets.cpu).
    apply_probed: Callable[..., tuple[Answer, Factors]]
    separate_critic: bool  # values need nothing of the actor, so no step has to wait for them


class ActorCritic(nn.Module):
    make_actor: TorsoMaker
    make_critic: TorsoMaker
    sight: Sight  # what each of them sees
    dist: Distribution
    shared: bool
    log_std_init: float
    obs_clip: float | None  # None leaves observations as they are

    @nn.compact
    def __call__(self, carry: Carry, obs: Obs, first: Bool[Array, "N"]) -> Answer:
        if self.obs_clip is not None:
            known: Any = self.get_variable("obs_stats", "moments")
            obs = moments.normalize_obs(known, obs, self.obs_clip)
        sight, shared = self.sight, self.shared
        actor = self.make_actor("torso" if shared else "actor_torso")(sight.policy(obs))
        critic = actor if shared else self.make_critic("critic_torso")(sight.value(obs))
        dist_params = dense(self.dist.num_params, 0.01, "policy_head")(actor)
        value = dense(1, 1.0, "value_head")(critic)[:, 0]
        if isinstance(self.dist, DiagNormal):
            init = nn.initializers.constant(self.log_std_init)
            log_std = self.param("log_std", init, (self.dist.dim,), jnp.float32)
            log_std = jnp.broadcast_to(log_std, dist_params.shape)
            dist_params = jnp.concatenate([dist_params, log_std], axis=-1)
        if sight.masked and isinstance(self.dist, Categorical):
            dist_params = self.dist.masked(dist_params, obs[MASK])
        return carry, dist_params, value


def variables_of(params: Params, obs_moments: Any) -> dict[str, Any]:
    """What `Policy.apply` takes as its first argument."""
    return {"params": params, "obs_stats": {"moments": obs_moments}}


def make_policy(config: Config, spec: EnvSpec, platform: str = "") -> Policy:
    """`platform` is that of the device it will run on, by default jax's."""
    _check_normalizes(config, spec)
    spec = with_symbols(config.net, spec, config.env.id)
    sight = make_sight(config.net, spec, config.env.id)
    method = _conv_method(config, platform)
    net = ActorCritic(
        make_actor=torso_maker(config.net, sight.policy.spec, config.env.id, method),
        make_critic=torso_maker(config.net, sight.value.spec, config.env.id, method),
        sight=sight,
        dist=make_distribution(spec.action),
        shared=config.net.shared,
        log_std_init=config.net.log_std_init,
        obs_clip=config.env.obs_clip if config.env.normalize_obs else None,
    )

    def init(key: Array) -> Params:
        blank = {"obs_stats": {"moments": moments.of_observations(True, spec)}}
        obs, first = jax.tree.map(jnp.asarray, spec.zeros(1)), jnp.zeros((1,), bool)
        _, grown = net.apply(blank, (), obs, first, rngs={"params": key}, mutable=["params"])
        return grown["params"]

    def apply(variables: Any, carry: Carry, obs: Obs, first: Array) -> Answer:
        return net.apply(variables, carry, obs, first)  # type: ignore[return-value]

    def apply_probed(variables: Any, probes: Factors, *inputs: Any) -> tuple[Answer, Factors]:
        out, filled = net.apply(probed(variables, probes), *inputs, mutable=[INPUTS])
        return out, inputs_of(filled)

    return Policy(
        init=init,
        apply=apply,
        unroll=_all_at_once(apply),
        apply_probed=apply_probed,
        initial_carry=lambda _: (),
        dist=net.dist,
        separate_critic=not (config.net.shared or spec.has_image),  # few images are enough at once
    )


def _check_normalizes(config: Config, spec: EnvSpec) -> None:
    kinds = {part.kind for part in spec.parts.values()}
    if config.env.normalize_obs and "vector" not in kinds:
        what = "images, which are scaled by 1/255 already" if "image" in kinds else "ids"
        raise ConfigError(f"env.normalize_obs is for vectors; {config.env.id} gives {what}")


def _all_at_once(apply: Callable[..., Answer]) -> Callable[..., Answer]:
    """T steps of a network without memory: rows of one large batch."""

    def unroll(variables: Any, carry: Carry, obs: Obs, first: Bool[Array, "T B"]) -> Answer:
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (obs, first))
        _, *answers = apply(variables, carry, *rows)
        dist_params, value = (x.reshape(*first.shape, *x.shape[1:]) for x in answers)
        return carry, dist_params, value

    return unroll


def _conv_method(config: Config, platform: str) -> Method:
    if config.net.conv == "auto":
        return likes(platform or jax.default_backend()).conv
    return config.net.conv

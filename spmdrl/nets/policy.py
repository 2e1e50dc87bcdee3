"""Actor-critic networks behind one signature for feed-forward and recurrent policies.

`apply(variables, carry, obs, first) -> (carry, dist_params, value)` for a step, where `variables`
holds the parameters and the observation moments, as Flax holds batch statistics; `unroll` for T
steps in a row. A feed-forward carry is ().
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool

from spmdrl.config import Config, ConfigError, NetConfig
from spmdrl.nets import moments
from spmdrl.nets.cores import CORES
from spmdrl.nets.cpu.chunked_dense import INPUTS, Factors, inputs_of, probed
from spmdrl.nets.distributions import Categorical, DiagNormal, Distribution, make_distribution
from spmdrl.nets.sight import Sight, View, make_sight, with_symbols
from spmdrl.nets.torsos import Method, TorsoMaker, dense, torso_maker
from spmdrl.parallel.platforms import likes
from spmdrl.types import LAST_ACTION, LAST_REWARD, MASK, Carry, EnvSpec, Obs, Params

__all__ = ["ActorCritic", "Policy", "make_policy", "matmul_precision", "variables_of"]

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
    value_rows: int | None  # that are valued together; None: all


class ActorCritic(nn.Module):
    make_actor: TorsoMaker
    make_critic: TorsoMaker
    sight: Sight  # what each of them sees
    dist: Distribution
    shared: bool
    log_std_init: float
    obs_clip: float | None  # None leaves observations as they are
    memory: Memory

    @nn.compact
    def __call__(self, carry: Carry, obs: Obs, first: Bool[Array, "*rows"]) -> Answer:
        """Of one step, rows `[N]`, or of several in a row, `[T, B]`."""
        if self.obs_clip is not None:
            known: Any = self.get_variable("obs_stats", "moments")
            obs = moments.normalize_obs(known, obs, self.obs_clip)
        if first.ndim > 1:
            obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        carry, actor, critic = self.features(carry, obs, first)
        dist_params, value = self.heads(actor, critic, obs)
        dist_params = dist_params.reshape(*first.shape, -1)
        return carry, dist_params, value.reshape(first.shape)

    def features(self, carry: Carry, obs: Obs, first: Array) -> tuple[Carry, Array, Array]:
        """What the heads of policy and value see."""
        sight, memory, extra = self.sight, self.memory, history(obs)
        if self.shared:
            both = whole(self.make_actor("torso")(sight.policy(obs)))
            carry, both = memory.core("core", carry, beside(both, extra), first)
            return carry, both, both
        actor = whole(self.make_actor("actor_torso")(sight.policy(obs)))
        critic = whole(self.make_critic("critic_torso")(sight.value(obs)))
        mine, yours = carry or ((), ())
        mine, actor = memory.core("actor_core", mine, beside(actor, extra), first)
        yours, critic = memory.core("critic_core", yours, beside(critic, extra), first)
        return (mine, yours) if memory.kind != "none" else (), actor, critic

    def heads(self, actor: Array, critic: Array, obs: Obs) -> tuple[Array, Array]:
        dist_params = dense(self.dist.num_params, 0.01, "policy_head")(actor)
        value = dense(1, 1.0, "value_head")(critic)[:, 0]
        if isinstance(self.dist, DiagNormal):
            init = nn.initializers.constant(self.log_std_init)
            log_std = self.param("log_std", init, (self.dist.dim,), jnp.float32)
            log_std = jnp.broadcast_to(log_std, dist_params.shape)
            dist_params = jnp.concatenate([dist_params, log_std], axis=-1)
        if self.sight.masked and isinstance(self.dist, Categorical):
            dist_params = self.dist.masked(dist_params, obs[MASK])
        return dist_params, value


@dataclass(frozen=True)
class Memory:
    """What kind of core there is, if any."""

    kind: str
    size: int
    bptt: int  # steps through which gradients flow back; 0: all

    def core(self, name: str, carry: Carry, x: Array, first: Array) -> tuple[Carry, Array]:
        """The features after the core, one row for each of `x`."""
        if self.kind == "none":
            return carry, x
        steps = first if first.ndim > 1 else first[None]
        rows = x.reshape(*steps.shape, -1)
        module, length = CORES[self.kind](self.size, name=name), self.bptt or len(steps)
        shown = []
        for start in range(0, len(steps), length):
            part = slice(start, start + length)
            carry, y = module(jax.lax.stop_gradient(carry), rows[part], steps[part])
            shown.append(y)
        return carry, jnp.concatenate(shown).reshape(x.shape[0], -1)

    def zeros(self, rows: int, shared: bool) -> Carry:
        if self.kind == "none":
            return ()
        one = CORES[self.kind].zeros
        return one(self.size, rows) if shared else (one(self.size, rows), one(self.size, rows))


def whole(features: Array) -> Array:
    """After torsos that may compute with fewer digits: memory and heads are in float32."""
    return features.astype(jnp.float32)


def history(obs: Obs) -> list[Array]:
    """Last reward and last action, as far as they are shown."""
    if not isinstance(obs, dict):
        return []
    return [obs[name] for name in (LAST_REWARD, LAST_ACTION) if name in obs]


def beside(features: Array, extra: list[Array]) -> Array:
    return jnp.concatenate([features, *extra], axis=-1) if extra else features


def variables_of(params: Params, obs_moments: Any) -> dict[str, Any]:
    """What `Policy.apply` takes as its first argument."""
    return {"params": params, "obs_stats": {"moments": obs_moments}}


def matmul_precision(net: NetConfig) -> AbstractContextManager[Any]:
    """Holds for what is traced inside; of a gradient, parts are traced after the network."""
    if net.matmul_precision == "default":
        return nullcontext()
    return jax.default_matmul_precision(net.matmul_precision)


def make_policy(config: Config, spec: EnvSpec, platform: str = "") -> Policy:
    """`platform` is that of the device it will run on, by default jax's."""
    _check_normalizes(config, spec)
    spec = with_symbols(config.net, spec, config.env.id)
    sight = make_sight(config.net, spec, config.env.id)
    liked = likes(platform or jax.default_backend())
    method: Method = liked.conv if config.net.conv == "auto" else config.net.conv
    memory = Memory(config.net.core, config.net.core_size, config.net.bptt)

    def torso(view: View, at_once: int | None = None) -> TorsoMaker:
        return torso_maker(config.net, view.spec, config.env.id, method, at_once)

    net = ActorCritic(
        make_actor=torso(sight.policy),
        make_critic=torso(sight.value),
        sight=sight,
        memory=memory,
        dist=make_distribution(spec.action),
        shared=config.net.shared,
        log_std_init=config.net.log_std_init,
        obs_clip=config.env.obs_clip if config.env.normalize_obs else None,
    )

    def init(key: Array) -> Params:
        blank = {"obs_stats": {"moments": moments.of_observations(True, spec)}}
        obs, first = jax.tree.map(jnp.asarray, spec.zeros(1)), jnp.zeros((1,), bool)
        carry = memory.zeros(1, config.net.shared)
        _, grown = net.apply(blank, carry, obs, first, rngs={"params": key}, mutable=["params"])
        return grown["params"]

    def apply(variables: Any, carry: Carry, obs: Obs, first: Array) -> Answer:
        with matmul_precision(config.net):
            return net.apply(variables, carry, obs, first)  # type: ignore[return-value]

    def apply_probed(variables: Any, probes: Factors, *inputs: Any) -> tuple[Answer, Factors]:
        with matmul_precision(config.net):
            out, filled = net.apply(probed(variables, probes), *inputs, mutable=[INPUTS])
        return out, inputs_of(filled)

    rows = liked.image_rows if spec.has_image else None
    long_net = net.clone(make_actor=torso(sight.policy, rows), make_critic=torso(sight.value, rows))

    def unroll(variables: Any, carry: Carry, obs: Obs, first: Array) -> Answer:
        with matmul_precision(config.net):
            return long_net.apply(variables, carry, obs, first)  # type: ignore[return-value]

    # Of few images as many as there are can be valued at once; a core values as it acts.
    together = config.net.shared or spec.has_image or memory.kind != "none"
    return Policy(
        init=init,
        apply=apply,
        unroll=unroll,
        apply_probed=apply_probed,
        initial_carry=lambda rows: memory.zeros(rows, config.net.shared),
        dist=net.dist,
        separate_critic=not together,
        value_rows=liked.value_rows,
    )


def _check_normalizes(config: Config, spec: EnvSpec) -> None:
    kinds = {part.kind for part in spec.parts.values()}
    if config.env.normalize_obs and "vector" not in kinds:
        what = "images, which are scaled by 1/255 already" if "image" in kinds else "ids"
        raise ConfigError(f"env.normalize_obs is for vectors; {config.env.id} gives {what}")

"""Action distributions as pure functions of one flat array of parameters.

Sampling takes its noise from outside, so that a whole rollout's noise is drawn in one call, keyed
by the environment's global id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from spmdrl.types import ActionSpace

__all__ = ["Categorical", "DiagNormal", "Distribution", "make_distribution"]

# Its softmax is exactly 0, and differences of such numbers stay small: no ratio overflows.
FORBIDDEN = -1e5


@runtime_checkable
class Distribution(Protocol):
    @property
    def num_params(self) -> int:
        """Width of the network's last layer."""
        ...

    def noise(self, key: Array, rows: tuple[int, ...]) -> Float[Array, "*rows _"]: ...
    def sample(self, params: Array, noise: Array) -> Array: ...
    def mode(self, params: Array) -> Array: ...
    def log_prob(self, params: Array, action: Array) -> Float[Array, "*rows"]: ...
    def entropy(self, params: Array) -> Float[Array, "*rows"]: ...


@dataclass(frozen=True)
class Categorical:
    """Independent categorical components; `squeeze` for the plain Discrete action."""

    nvec: tuple[int, ...]
    squeeze: bool

    @property
    def num_params(self) -> int:
        return sum(self.nvec)

    def noise(self, key: Array, rows: tuple[int, ...]) -> Float[Array, "*rows _"]:
        return jax.random.gumbel(key, (*rows, self.num_params), jnp.float32)

    def sample(self, params: Array, noise: Array) -> Array:
        return self.mode(params + noise)  # the Gumbel-max trick

    def mode(self, params: Array) -> Array:
        choices = [jnp.argmax(part, axis=-1).astype(jnp.int32) for part in self._split(params)]
        return choices[0] if self.squeeze else jnp.stack(choices, axis=-1)

    def log_prob(self, params: Array, action: Shaped[Array, ...]) -> Float[Array, "*rows"]:
        action = action[..., None] if self.squeeze else action
        total = jnp.zeros(params.shape[:-1], jnp.float32)
        for i, part in enumerate(self._split(params)):
            index = action[..., i, None].astype(jnp.int32)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(part), index, axis=-1)
            total = total + chosen[..., 0]
        return total

    def entropy(self, params: Array) -> Float[Array, "*rows"]:
        total = jnp.zeros(params.shape[:-1], jnp.float32)
        for part in self._split(params):
            log_p = jax.nn.log_softmax(part)
            total = total - jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return total

    def masked(self, params: Array, allowed: Bool[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """The parameters with which no forbidden choice has any probability.

        Where all choices of a component are forbidden, as an environment may say at its end, all
        are left: the action is ignored, and nothing may become infinite.
        """
        parts = [
            jnp.where(ok | ~ok.any(-1, keepdims=True), part, FORBIDDEN)
            for part, ok in zip(self._split(params), self._split(allowed), strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def _split(self, params: Array) -> list[Array]:
        edges = [sum(self.nvec[: i + 1]) for i in range(len(self.nvec) - 1)]
        return jnp.split(params, edges, axis=-1)


@dataclass(frozen=True)
class DiagNormal:
    """Diagonal Gaussian; parameters are the means, then the log standard deviations."""

    dim: int

    @property
    def num_params(self) -> int:
        return self.dim

    def noise(self, key: Array, rows: tuple[int, ...]) -> Float[Array, "*rows _"]:
        return jax.random.normal(key, (*rows, self.dim), jnp.float32)

    def sample(self, params: Array, noise: Array) -> Array:
        mean, log_std = jnp.split(params, 2, axis=-1)
        return mean + jnp.exp(log_std) * noise

    def mode(self, params: Array) -> Array:
        return jnp.split(params, 2, axis=-1)[0]

    def log_prob(self, params: Array, action: Array) -> Float[Array, "*rows"]:
        mean, log_std = jnp.split(params, 2, axis=-1)
        z = (action - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self, params: Array) -> Float[Array, "*rows"]:
        _, log_std = jnp.split(params, 2, axis=-1)
        return jnp.sum(log_std + 0.5 * (1.0 + math.log(2 * math.pi)), axis=-1)


def make_distribution(space: ActionSpace) -> Distribution:
    if space.kind == "box":
        return DiagNormal(math.prod(space.shape))
    return Categorical(space.nvec, squeeze=space.kind == "discrete")

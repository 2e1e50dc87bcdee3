"""Running mean and variance, mergeable exactly over devices, ranks and time.

Each place sends shifted power sums, which add up; the sum is merged with what was known before
(Chan, Golub, LeVeque 1983). The shift is the mean known so far, the same everywhere, so that
little is lost to cancellation. Of observations that are a dict, each vector has its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from spmdrl.types import EnvSpec, Moments, Obs, ObsPart

__all__ = [
    "init", "merge", "merge_obs", "normalize", "normalize_obs", "obs_power_sums",
    "of_observations", "power_sums", "variance",
]  # fmt: skip

PowerSums = tuple[Array, Array, Array]  # count, sum of (x - shift), sum of (x - shift)^2


def init(shape: tuple[int, ...], shift: Any = None) -> Moments:
    """Nothing seen; `shift` is a guess of the mean, which only makes the first sums smaller."""
    # Three arrays of their own: the train state is donated, and one buffer cannot be given twice.
    count, mean, m2 = (jnp.zeros(s, jnp.float32) for s in ((), shape, shape))
    if shift is not None:
        mean = jnp.array(shift, jnp.float32)
    return Moments(count=count, mean=mean, m2=m2)


def power_sums(known: Moments, x: Shaped[Array, "T B ..."], valid: Bool[Array, "T B"]) -> PowerSums:
    """Sums over the valid rows; those of disjoint sets of rows may be added."""
    weight = valid.astype(jnp.float32).reshape(valid.shape + (1,) * (x.ndim - valid.ndim))
    shifted = jnp.where(weight > 0, x.astype(jnp.float32) - known.mean, 0.0)
    return weight.sum(), shifted.sum((0, 1)), (shifted**2).sum((0, 1))


def merge(known: Moments, sums: PowerSums) -> Moments:
    """What is known after the rows behind `sums` were seen too."""
    count, s1, s2 = sums
    batch_count = jnp.maximum(count, 1.0)  # no row at all leaves everything as it was
    delta = s1 / batch_count
    batch_m2 = jnp.maximum(s2 - s1 * delta, 0.0)
    total = jnp.maximum(known.count + count, 1.0)
    return Moments(
        count=known.count + count,
        mean=known.mean + delta * (count / total),
        m2=known.m2 + batch_m2 + delta**2 * (known.count * count / total),
    )


def variance(known: Moments) -> Float[Array, ...]:
    """Population variance; 1 before anything was seen."""
    seen = known.count > 0
    return jnp.where(seen, known.m2 / jnp.maximum(known.count, 1.0), 1.0)


def normalize(
    known: Moments, x: Shaped[Array, "*rows ..."], clip: float
) -> Float[Array, "*rows ..."]:
    mean = jnp.where(known.count > 0, known.mean, 0.0)  # a guess is not yet a mean
    scaled = (x.astype(jnp.float32) - mean) / jnp.sqrt(variance(known) + 1e-8)
    return jnp.clip(scaled, -clip, clip)


# ---------------------------------------------------------------------------------------------
# Observations: one array, or a dict of which only vectors are normalised


def of_observations(wanted: bool, spec: EnvSpec, first_obs: Obs = None) -> Any:
    """Moments of what is normalised: nothing, the vector, or each vector of a dict."""
    if not wanted:
        return init((0,))
    if isinstance(spec.obs, ObsPart):
        return init(spec.obs.shape, first_obs)
    vectors = {name: part for name, part in spec.obs.items() if part.kind == "vector"}
    return {
        name: init(part.shape, None if first_obs is None else first_obs[name])
        for name, part in vectors.items()
    }


def obs_power_sums(known: Any, obs: Obs, valid: Bool[Array, "T B"]) -> Any:
    if isinstance(known, Moments):
        return power_sums(known, obs, valid)
    return {name: power_sums(part, obs[name], valid) for name, part in known.items()}


def merge_obs(known: Any, sums: Any) -> Any:
    if isinstance(known, Moments):
        return merge(known, sums)
    return {name: merge(part, sums[name]) for name, part in known.items()}


def normalize_obs(known: Any, obs: Obs, clip: float) -> Obs:
    if isinstance(known, Moments):
        return normalize(known, obs, clip)
    return {k: normalize(known[k], x, clip) if k in known else x for k, x in obs.items()}

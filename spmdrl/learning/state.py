"""The learner's state before the first update, and a fingerprint of its parameters."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.config import Config
from spmdrl.learning.optimizer import make_optimizer
from spmdrl.nets import moments
from spmdrl.nets.policy import Policy
from spmdrl.types import Array, EnvSpec, TrainState

__all__ = ["init_train_state", "params_sha256"]


def init_train_state(
    config: Config,
    policy: Policy,
    spec: EnvSpec,
    key: Array,
    first_obs: Any = None,
    model: Any = None,
) -> TrainState:
    """`first_obs` is any observation; the moments count from it, against cancellation.

    `model` is what another run has learned, instead of random parameters.
    """
    if model is None:
        params = policy.init(key)
        obs_moments = moments.of_observations(config.env.normalize_obs, spec, first_obs)
    else:
        params, obs_moments = model["params"], model["obs_moments"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(config.optim).init(params),
        obs_moments=obs_moments,
        reward_moments=moments.init(()) if model is None else model["reward_moments"],
        behind=((params, obs_moments),) * config.lag,
    )


def params_sha256(params: Any) -> str:
    """Fingerprint of every bit of the parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()

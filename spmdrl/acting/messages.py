"""What travels between actors and learners, derived by tracing: nobody has to collect for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.acting.steps import (
    ActorState,
    Steps,
    act,
    draw_noise,
    finish_rollout,
    make_row,
    next_state,
    score_rollout,
)
from spmdrl.config import Config
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.parallel.placement import env_axis
from spmdrl.parallel.wire import Form, ModelHeader, RolloutHeader
from spmdrl.trees import leaves_by_name
from spmdrl.types import EnvSpec, Rollout, TimeStep

__all__ = ["StateForm", "blank_state", "model_form", "named_model", "rollout_form", "trace_rollout"]

# Shape of one environment's part and dtype of each array of the actors' state, by name.
StateForm = Mapping[str, tuple[tuple[int, ...], str]]


def named_model(params: Any, obs_moments: Any) -> dict[str, Any]:
    return leaves_by_name({"params": params, "obs_moments": obs_moments})


def model_form(params: Any, obs_moments: Any) -> Form:
    """For a model of arrays, or of their shapes."""
    leaves = named_model(params, obs_moments)
    return Form({name: (x.shape, x.dtype) for name, x in leaves.items()}, ModelHeader.SIZE)


def blank_state(policy: Policy, spec: EnvSpec, envs: int) -> ActorState:
    """Environments that show nothing; as those of an actor in all but their contents."""
    return ActorState(
        obs=spec.zeros(envs),
        first=np.ones(envs, bool),
        resetting=np.zeros(envs, bool),
        carry=policy.initial_carry(envs),
        discounted_return=np.zeros(envs, np.float32),
        episode_return=np.zeros(envs, np.float32),
        episode_length=np.zeros(envs, np.int32),
    )


def trace_rollout(
    config: Config, policy: Policy, model: Any, state: ActorState
) -> tuple[Rollout, dict[str, Any]]:
    """The shapes of a rollout and of what ended in it; `model` is params and obs_moments."""
    envs = len(state.first)

    def collect(model: Any, before: ActorState, key: Any) -> Any:
        variables, ids = variables_of(*model), jnp.zeros(envs, jnp.int32)
        nothing = TimeStep(
            obs=before.obs,
            reward=jnp.zeros(envs, jnp.float32),
            terminated=jnp.zeros(envs, bool),
            truncated=jnp.zeros(envs, bool),
            episode_over=jnp.zeros(envs, bool),
        )

        def step(s: ActorState, noise_t: Any) -> tuple[ActorState, Steps]:
            carry, action, dist_params, value = act(
                policy, 1, variables, s.carry, s.obs, s.first, noise_t
            )
            row = make_row(s, action, dist_params, value, nothing)
            return next_state(s, carry, nothing), row

        noise = draw_noise(policy, key, jnp.int32(0), ids, config.algo.num_steps)
        after, steps = jax.lax.scan(step, before, noise)
        scores = score_rollout(policy, 1, variables, steps)
        return finish_rollout(config, ids, before, steps, scores, after)[1:]

    found: tuple[Rollout, dict[str, Any]] = jax.eval_shape(
        collect, model, state.replace(envs=()), jax.random.PRNGKey(0)
    )
    return found


def rollout_form(rollout: Rollout, ended: Mapping[str, Any], state: StateForm, envs: int) -> Form:
    """The message of an actor with so many environments, from traced shapes of any number."""
    arrays = {}
    for name, x in leaves_by_name(rollout).items():
        axis = env_axis(name.partition("/")[0])
        arrays[f"rollout/{name}"] = (_resized(x.shape, axis, envs), x.dtype)
    for name, x in leaves_by_name(dict(ended)).items():
        arrays[f"ended/{name}"] = (_resized(x.shape, 1, envs), x.dtype)
    for name, (shape, dtype) in sorted(state.items()):
        arrays[f"state/{name}"] = ((envs, *shape), np.dtype(dtype))
    return Form(arrays, RolloutHeader.SIZE)


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])

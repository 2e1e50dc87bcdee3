"""Actors tell the learners what their environments show and accept, once, before the training.

A learner never makes an environment: its machine may be unable to.
"""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import Any

import jax

from spmdrl.acting.collector import Collector
from spmdrl.acting.inbox import Introduction
from spmdrl.acting.messages import StateForm, model_form, rollout_form, trace_rollout
from spmdrl.config import Config
from spmdrl.learning.state import init_train_state
from spmdrl.nets import make_policy
from spmdrl.nets.policy import Policy
from spmdrl.parallel.roles import Layout
from spmdrl.parallel.topology import LaunchError
from spmdrl.parallel.wire import Form
from spmdrl.parallel.world import World
from spmdrl.runtime.spaces import from_plain, to_plain

__all__ = ["ActorForms", "hear_actors", "introduce", "trace_model"]


class ActorForms:
    """The messages of an actor."""

    def __init__(self, config: Config, collector: Collector):
        actor = collector.actors[0]
        policy = make_policy(config, collector.spec, "cpu")
        state = collector.named_state()
        self.state: StateForm = {
            name: (tuple(x.shape[1:]), x.dtype.str) for name, x in state.items()
        }
        self.model = trace_model(config, policy, collector)
        rollout, ended = trace_rollout(config, policy, self.model, actor.state)
        self.models: Form = model_form(*self.model)
        self.rollouts: Form = rollout_form(rollout, ended, self.state, len(collector.ids))


def trace_model(config: Config, policy: Policy, collector: Collector) -> tuple[Any, Any]:
    """The shapes of parameters and moments."""
    init = partial(init_train_state, config, policy, collector.spec)
    state = jax.eval_shape(init, jax.random.PRNGKey(0), collector.first_obs)
    return state.params, state.obs_moments


def introduce(world: World, collector: Collector, forms: ActorForms) -> None:
    """The part of an actor."""
    has_first = 0 in collector.ids
    world.meet()
    world.gather_json(
        {
            "host": socket.gethostname(),
            "spec": to_plain(collector.spec),
            "first_obs": to_plain(collector.first_obs) if has_first else None,
            "state": [[name, shape, dtype] for name, (shape, dtype) in forms.state.items()],
            "forms": [forms.models.fingerprint, forms.rollouts.fingerprint],
            "saves_envs": collector.saves_envs,
            "description": collector.description,
        }
    )


def hear_actors(world: World, layout: Layout) -> Introduction:
    """The part of a learner. Raises LaunchError that names an actor unlike the others."""
    world.meet()  # when all have made their environments
    told = world.gather_json({"host": socket.gethostname(), "forms": [0, 0]})
    first = layout.learners  # the rank of the actor with environment 0
    for rank in range(first, layout.size):
        for name, what in (("spec", "spaces"), ("state", "state"), ("saves_envs", "simulators")):
            if told[rank][name] != told[first][name]:
                raise LaunchError(
                    f"rank {rank}, an actor on {told[rank]['host']}, and rank {first}, an actor on "
                    f"{told[first]['host']}, have environments with different {what}: "
                    f"{_shortened(told[rank][name])} against {_shortened(told[first][name])}"
                )
    actor = told[first]
    return Introduction(
        spec=from_plain(actor["spec"]),
        first_obs=from_plain(actor["first_obs"]),
        state={name: (tuple(shape), dtype) for name, shape, dtype in actor["state"]},
        saves_envs=actor["saves_envs"],
        description=actor["description"],
        hosts=[one["host"] for one in told],
        forms=[tuple(one["forms"]) for one in told],
    )


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."

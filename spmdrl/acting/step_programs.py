"""What runs on the device while rollouts are stepped from Python.

The rows of a rollout are kept on the device from the start: an observation goes there once, for
inference and for learning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.acting.parcels import Parcel, parcel_for
from spmdrl.acting.steps import (
    ActorState,
    Steps,
    act,
    draw_noise,
    finish_rollout,
    score_rollout,
)
from spmdrl.config import Config
from spmdrl.nets.policy import Policy
from spmdrl.types import Array, Carry, Obs, Tree

__all__ = ["Programs", "blank_answers", "cuts_of", "make_programs"]


class Kept(Tree):
    """What a rollout takes over from its steps as it is: T rows of all environments."""

    obs: Obs
    first: Array
    action: Array


class Judged(Tree):
    """What is needed until the rollout is finished."""

    dist_params: Array
    value: Array | None


class Programs(NamedTuple):
    """What runs on the device of a stepped actor, which also keeps the rows of the rollout.

    `seen` is what a group's policy sees, `answers` what the simulation said in the whole rollout.
    """

    seen: Parcel  # (obs, first)
    answers: Parcel
    noise: Callable[..., Any]
    """`(key, update) -> [T, b, ...]` for each group."""
    room: Callable[..., Any]
    """`(variables, carry, seen, noise) -> (kept, judged)`, empty."""
    act: Callable[..., Any]
    """`(variables, carry, (kept, judged), seen, noise, t, start) -> (carry, (kept, judged),
    action)`; `start` is the first of the group's environments."""
    finish: Callable[..., Any]
    """`(variables, before, kept, judged, answers, seen of each group, their carries) ->
    (state, rollout, episodes)`; the state is without what the host knows."""


def make_programs(
    config: Config,
    policy: Policy,
    example: tuple[Obs, Any],
    ids: Array,
    shards: int,
    groups: int,
    device: Any,
) -> Programs:
    """Compiled when they are first called, or by `lower` for a device that is not here.

    `example` is `(obs, first)` of some environments.
    """
    seen = parcel_for(example, device.platform)
    answers = parcel_for(blank_answers(config.algo.num_steps, len(ids)), device.platform)
    steps = _Stepping(config, policy, ids, shards, groups, seen, answers)
    here = jax.sharding.SingleDeviceSharding(device)
    return Programs(
        seen,
        answers,
        jax.jit(steps.noise),
        jax.jit(steps.room, out_shardings=here),
        jax.jit(steps.act, donate_argnums=2),
        jax.jit(steps.finish, donate_argnums=2),
    )


@dataclass(frozen=True)
class _Stepping:
    """The programs before they are compiled."""

    config: Config
    policy: Policy
    ids: Array
    shards: int
    groups: int
    seen: Parcel
    answers: Parcel

    def noise(self, key: Array, update: Array) -> list[Array]:
        whole = draw_noise(self.policy, key, update, self.ids, self.config.algo.num_steps)
        return [whole[:, cut] for cut in cuts_of(len(self.ids), self.groups)]

    def decide(self, variables: Any, carry: Carry, packed: Any, noise: Array) -> tuple[Carry, Any]:
        obs, first = self.seen.unpack(packed)
        shards = max(1, self.shards // self.groups)
        carry, action, dist_params, value = act(
            self.policy, shards, variables, carry, obs, first, noise
        )
        kept = Kept(obs=obs, first=first, action=action)
        return carry, (kept, Judged(dist_params=dist_params, value=value))

    def room(self, variables: Any, carry: Carry, packed: Any, noise: Array) -> Any:
        _, row = jax.eval_shape(self.decide, variables, carry, packed, noise[0])
        shape = (self.config.algo.num_steps, len(self.ids))
        return jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape[1:]), x.dtype), row)

    def act(
        self, variables: Any, carry: Carry, room: Any, packed: Any, noise: Array, t: Array,
        start: Array,
    ) -> Any:  # fmt: skip
        carry, row = self.decide(variables, carry, packed, noise[t])
        return carry, jax.tree.map(partial(write_row, t, start), room, row), row[0].action

    def finish(
        self, variables: Any, before: ActorState, kept: Any, judged: Any, packed: Any, last: Any,
        carries: Any,
    ) -> Any:  # fmt: skip
        steps = Steps(**vars(kept), **vars(judged), **self.answers.unpack(packed))
        obs, first = _joined([self.seen.unpack(one) for one in last])
        scores = score_rollout(self.policy, self.shards, variables, steps)
        after = before.replace(obs=obs, first=first, carry=_joined(carries))
        after, rollout, episodes = finish_rollout(
            self.config, self.ids, before, steps, scores, after
        )
        return after.replace(obs=(), first=()), rollout, episodes


def _joined(parts: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def write_row(t: Array, start: Array, room: Array, row: Array) -> Array:
    """The row of a group's environments at step t."""
    rest = [jnp.zeros_like(t)] * (row.ndim - 1)
    return jax.lax.dynamic_update_slice(room, row[None], (t, start, *rest))


def blank_answers(num_steps: int, num_envs: int) -> dict[str, np.ndarray]:
    """What `Steps` has from the simulation."""
    shape = (num_steps, num_envs)
    flags = ("valid", "terminated", "truncated", "episode_over")
    return {"reward": np.zeros(shape, np.float32)} | {k: np.zeros(shape, bool) for k in flags}


def cuts_of(envs: int, groups: int) -> list[slice]:
    size = envs // groups
    return [slice(i * size, (i + 1) * size) for i in range(groups)]

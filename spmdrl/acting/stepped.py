"""Rollouts stepped from Python: inference on the device, simulation on the host, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdrl.acting.steps import (
    ActorState,
    Steps,
    act,
    draw_noise,
    finish_rollout,
    initial_state,
    make_row,
    next_state,
    score_rollout,
)
from spmdrl.config import Config
from spmdrl.envs.base import EnvBatch
from spmdrl.nets.policy import Policy
from spmdrl.parallel.placement import WHOLE_VECTORS
from spmdrl.types import Array, Carry, Obs, Rollout

__all__ = [
    "EnvGroup", "Programs", "SteppedActor", "Stopwatch", "collect_all", "groups_of",
    "make_programs",
]  # fmt: skip


class Stopwatch:
    """Seconds spent under each name since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class Programs(NamedTuple):
    """What runs on the device of a stepped actor."""

    noise: Callable[..., Any]
    """`(key, update) -> [T, b, ...]` for each group."""
    act: Callable[..., Any]
    """`(variables, carry, obs, first, noise, t) -> (carry, action, dist_params, value)`."""
    finish: Callable[..., Any]
    """`(variables, before, steps, after) -> (state, rollout, episodes)`."""


def make_programs(config: Config, policy: Policy, ids: Array, shards: int, groups: int) -> Programs:
    """Compiled when they are first called, or by `lower` for a device that is not here."""
    cuts = cuts_of(len(ids), groups)

    def noise(key: Array, update: Array) -> list[Array]:
        whole = draw_noise(policy, key, update, ids, config.algo.num_steps)
        return [whole[:, cut] for cut in cuts]

    def act_at(variables: Any, carry: Carry, obs: Obs, first: Array, noise: Array, t: Array) -> Any:
        return act(policy, max(1, shards // groups), variables, carry, obs, first, noise[t])

    def finish(variables: Any, before: ActorState, steps: Steps, after: ActorState) -> Any:
        scores = score_rollout(policy, shards, variables, steps)
        return finish_rollout(config, ids, before, steps, scores, after)

    return Programs(jax.jit(noise), jax.jit(act_at), jax.jit(finish))


def cuts_of(envs: int, groups: int) -> list[slice]:
    size = envs // groups
    return [slice(i * size, (i + 1) * size) for i in range(groups)]


class SteppedActor:
    """One device's environments, one step per call, in one or two groups.

    While one group is simulated, the device can infer for the other. What crosses between host and
    device does so by explicit calls, so that jax's transfer guard finds what should not.
    """

    saves_envs = False

    def __init__(
        self, config: Config, policy: Policy, envs: Sequence[EnvBatch], ids: Array, shards: int
    ):
        self.env_ids, self.num_envs = ids, len(ids)
        self._device = next(iter(ids.devices()))
        programs = make_programs(config, policy, ids, shards, len(envs))
        self._noise, self._finish = programs.noise, programs.finish
        num_steps = config.algo.num_steps
        times = jax.device_put(list(np.arange(num_steps, dtype=np.int32)), self._device)
        self.groups = [
            EnvGroup(env, cut, programs.act, times, self._device)
            for env, cut in zip(envs, cuts_of(len(ids), len(envs)), strict=True)
        ]
        self.place(_side_by_side([initial_state(env, policy) for env in envs]))
        self._rows_of = partial(empty_rows, num_steps, self.num_envs)

    @property
    def description(self) -> str:
        turns = ", in two groups that take turns" if len(self.groups) == 2 else ""
        return f"step by step from Python{turns}"

    def hint(self) -> str:
        """See `EnvBatch`."""
        return next(filter(None, (group.env.hint() for group in self.groups)), "")

    def place(self, state: ActorState) -> None:
        self.state = jax.tree.map(np.asarray, state)

    def step(self, action: np.ndarray) -> Obs:
        """Step the environments with given actions; the observations."""
        for group in self.groups:
            group.env.send(action[group.rows])
        return _side_by_side([group.env.recv().obs for group in self.groups])

    def start(self, variables: Any, key: Array, update: Array) -> None:
        self._variables = variables
        self._steps: Steps | None = None
        for group, noise in zip(self.groups, self._noise(key, update), strict=True):
            group.start(jax.tree.map(lambda x, g=group: x[g.rows], self.state), variables, noise)

    def receive(self, group: EnvGroup, t: int) -> None:
        """Wait for the group's simulation and keep the row."""
        row = group.receive()
        if self._steps is None:
            self._steps = self._rows_of(row)
        for room, x in zip(jax.tree.leaves(self._steps), jax.tree.leaves(row), strict=True):
            room[t, group.rows] = x

    def finish(self) -> tuple[Rollout, dict[str, Array]]:
        after = _side_by_side([jax.device_get(group.state) for group in self.groups])
        parts = jax.device_put((self.state, self._steps, after), self._device)
        state, rollout, episodes = self._finish(self._variables, *parts)
        self.place(jax.device_get(state))
        return rollout, episodes

    def close(self) -> None:
        for group in self.groups:
            group.env.close()


class EnvGroup:
    """Environments that are stepped together, and where they are."""

    def __init__(
        self, env: EnvBatch, rows: slice, act: Any, times: Sequence[Array], device: jax.Device
    ):
        self.env, self.rows, self._act, self._times, self._device = env, rows, act, times, device

    def start(self, state: ActorState, variables: Any, noise: Array) -> None:
        carry = jax.device_put(state.carry, self._device)
        self.state, self._variables, self._noise = state.replace(carry=carry), variables, noise

    def infer(self, t: int) -> None:
        """Dispatch inference for step t; returns before it is done."""
        s = self.state
        obs, first = jax.device_put((s.obs, s.first), self._device)
        self._pending = self._act(self._variables, s.carry, obs, first, self._noise, self._times[t])

    def step(self) -> None:
        """Wait for the inference and start the simulation."""
        self._carry, *answers = self._pending
        self._decision = jax.device_get(answers)
        self.env.send(self._decision[0])

    def receive(self) -> Steps:
        """Wait for the simulation."""
        answer = self.env.recv()
        action, dist_params, value = self._decision
        row = make_row(self.state, action, dist_params, value, answer)
        self.state = next_state(self.state, self._carry, answer)
        return row


def empty_rows(num_steps: int, num_envs: int, row: Steps) -> Steps:
    """Room for a rollout of rows like this one."""
    return jax.tree.map(
        lambda x: np.empty((num_steps, num_envs, *np.shape(x)[1:]), np.asarray(x).dtype), row
    )


def _side_by_side(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: np.concatenate(x), *trees)


def groups_of(envs: int, shards: int) -> int:
    """How many parts of a device's environments take turns: two, unless they would be tiny.

    Whole vectors and whole shards stay together, so that the bits do not depend on it.
    """
    even = envs % (2 * WHOLE_VECTORS) == 0 and (shards == 1 or shards % 2 == 0)
    return 2 if even else 1


def collect_all(
    actors: Sequence[SteppedActor], inputs: Sequence[Any], num_steps: int, watch: Stopwatch
) -> list[tuple[Rollout, dict[str, Array]]]:
    """A rollout of every actor; while one group is simulated, the devices infer for the other.

    A group's next step begins as soon as its own actions are there, whatever the other group does.
    """
    for actor, given in zip(actors, inputs, strict=True):
        actor.start(*given)
    turns = list(zip(*(actor.groups for actor in actors), strict=True))  # a group of each device
    watch.start()
    for groups in turns:
        _begin_step(groups, 0, watch)
    for t in range(num_steps):
        for groups in turns:
            for actor, group in zip(actors, groups, strict=True):
                actor.receive(group, t)
            watch.lap("env")
            if t + 1 < num_steps:
                _begin_step(groups, t + 1, watch)
    return [actor.finish() for actor in actors]


def _begin_step(groups: Sequence[EnvGroup], t: int, watch: Stopwatch) -> None:
    for group in groups:
        group.infer(t)  # on all devices at once
    for group in groups:
        group.step()
    watch.lap("inference")

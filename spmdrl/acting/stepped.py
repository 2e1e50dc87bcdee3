"""Rollouts stepped from Python: inference on the device, simulation on the host, in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmdrl.acting.step_programs import Programs, blank_answers, cuts_of, make_programs
from spmdrl.acting.steps import ActorState, initial_state, next_state
from spmdrl.config import Config
from spmdrl.envs.base import EnvBatch
from spmdrl.nets.policy import Policy
from spmdrl.parallel.ids import WHOLE_VECTORS
from spmdrl.types import Array, Obs, Rollout

__all__ = ["EnvGroup", "SteppedActor", "Stopwatch", "collect_all", "groups_of"]


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

    def add(self, seconds: Mapping[str, float]) -> None:
        """What was measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class SteppedActor:
    """One device's environments, one step per call, in one or two groups.

    While one group is simulated, the device can infer for the other. Of every step, what the policy
    sees goes to the device, once, and the actions come back. What crosses between host and device
    does so by explicit calls, so that jax's transfer guard finds what should not.
    """

    saves_envs = False

    def __init__(
        self, config: Config, policy: Policy, envs: Sequence[EnvBatch], ids: Array, shards: int
    ):
        self.env_ids, self.num_envs = ids, len(ids)
        self._device = next(iter(ids.devices()))
        self._num_steps = config.algo.num_steps
        states = [initial_state(env, policy) for env in envs]
        example = (states[0].obs, states[0].first)
        self._programs = make_programs(
            config, policy, example, ids, shards, len(envs), self._device
        )
        times = jax.device_put(list(np.arange(self._num_steps, dtype=np.int32)), self._device)
        self.groups = [
            EnvGroup(env, cut, self._programs, times, self._device)
            for env, cut in zip(envs, cuts_of(len(ids), len(envs)), strict=True)
        ]
        self.place(_side_by_side(states))

    @property
    def description(self) -> str:
        turns = ", in two groups that take turns" if len(self.groups) == 2 else ""
        return f"step by step from Python{turns}"

    def hint(self) -> str:
        """See `EnvBatch`."""
        return next(filter(None, (group.env.hint() for group in self.groups)), "")

    def place(self, state: ActorState) -> None:
        self.state = jax.tree.map(np.asarray, state)
        for group in self.groups:
            group.seen = None

    def step(self, action: np.ndarray) -> Obs:
        """Step the environments with given actions; the observations."""
        for group in self.groups:
            group.env.send(action[group.rows])
        return _side_by_side([group.env.recv().obs for group in self.groups])

    def start(self, variables: Any, key: Array, update: Array) -> None:
        self._variables = variables
        noises = self._programs.noise(key, update)
        for group, noise in zip(self.groups, noises, strict=True):
            group.start(jax.tree.map(lambda x, g=group: x[g.rows], self.state), variables, noise)
        first = self.groups[0]
        self._room = self._programs.room(variables, first.state.carry, first.seen, noises[0])
        self._answers = blank_answers(self._num_steps, self.num_envs)

    def infer(self, group: EnvGroup, t: int) -> None:
        """Dispatch inference for step t; returns before it is done."""
        self._room = group.infer(t, self._room)

    def receive(self, group: EnvGroup, t: int) -> None:
        """Wait for the group's simulation and keep its answer."""
        for name, x in group.receive().items():
            self._answers[name][t, group.rows] = x

    def finish(self) -> tuple[Rollout, dict[str, Array]]:
        for group in self.groups:
            group.show()
        known = self.state.replace(obs=(), first=(), resetting=())
        answers = self._programs.answers.pack(self._answers)
        before, answers = jax.device_put((known, answers), self._device)
        last = [group.seen for group in self.groups]
        carries = [group.state.carry for group in self.groups]
        numbers, rollout, episodes = self._programs.finish(
            self._variables, before, *self._room, answers, last, carries
        )
        here = _side_by_side([g.state.replace(carry=()) for g in self.groups])
        self.state = jax.device_get(numbers).replace(
            obs=here.obs, first=here.first, resetting=here.resetting
        )
        return rollout, episodes

    def close(self) -> None:
        for group in self.groups:
            group.env.close()


class EnvGroup:
    """Environments that are stepped together, and where they are."""

    def __init__(
        self,
        env: EnvBatch,
        rows: slice,
        programs: Programs,
        times: Sequence[Array],
        device: jax.Device,
    ):
        self.env, self.rows, self._programs = env, rows, programs
        self._times, self._device = times, device
        self._start = jax.device_put(np.int32(rows.start), device)
        self.seen: Any = None  # what the policy sees next, on the device if it is there already

    def start(self, state: ActorState, variables: Any, noise: Array) -> None:
        carry = jax.device_put(state.carry, self._device)
        self.state, self._variables, self._noise = state.replace(carry=carry), variables, noise
        self.show()

    def show(self) -> None:
        """Put what the policy sees next on the device; the only time it goes there."""
        if self.seen is None:
            packed = self._programs.seen.pack((self.state.obs, self.state.first))
            self.seen = jax.device_put(packed, self._device)

    def infer(self, t: int, room: Any) -> Any:
        """Dispatch inference for step t; the room with its row in it."""
        self.show()
        self._carry, room, self._action = self._programs.act(
            self._variables, self.state.carry, room, self.seen, self._noise, self._times[t],
            self._start,
        )  # fmt: skip
        return room

    def step(self) -> None:
        """Wait for the inference and start the simulation."""
        self.env.send(jax.device_get(self._action))

    def receive(self) -> dict[str, np.ndarray]:
        """Wait for the simulation."""
        answer, valid = self.env.recv(), ~self.state.resetting
        self.state = next_state(self.state, self._carry, answer)
        self.seen = None
        return {
            "valid": valid,
            "reward": answer.reward,
            "terminated": answer.terminated,
            "truncated": answer.truncated,
            "episode_over": answer.episode_over,
        }


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
        _begin_step(actors, groups, 0, watch)
    for t in range(num_steps):
        for groups in turns:
            for actor, group in zip(actors, groups, strict=True):
                actor.receive(group, t)
            watch.lap("env")
            if t + 1 < num_steps:
                _begin_step(actors, groups, t + 1, watch)
    return [actor.finish() for actor in actors]


def _begin_step(
    actors: Sequence[SteppedActor], groups: Sequence[EnvGroup], t: int, watch: Stopwatch
) -> None:
    for actor, group in zip(actors, groups, strict=True):
        actor.infer(group, t)  # on all devices at once
    for group in groups:
        group.step()
    watch.lap("inference")

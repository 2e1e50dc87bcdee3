"""Parameters in, a rollout out: all environments of this rank, spread over its devices.

Public names: `Collector`, `Episodes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmdrl.acting.actors import LoopActor, ScanActor
from spmdrl.config import Config
from spmdrl.envs import make_env
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.parallel.mesh import host_device, join, on_device
from spmdrl.parallel.placement import WHOLE_VECTORS, rollout_specs, split_ids
from spmdrl.runtime.checkpoint import CheckpointError, from_named, to_named
from spmdrl.types import Array, EnvSpec, Rollout, TrainState


@dataclass(frozen=True)
class Episodes:
    """Games that ended in one rollout, in order of time and then of environment id."""

    step: np.ndarray
    env_id: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Ahead:
    """A rollout that waits for its update, and the actors' state before it."""

    state: dict[str, np.ndarray]
    rollout: Rollout
    episodes: Episodes


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


# ---------------------------------------------------------------------------------------------
# All devices of this rank


class Collector:
    """The environments of this rank, spread over its devices."""

    def __init__(
        self,
        config: Config,
        make_policy: Callable[[EnvSpec, str], Policy],
        mesh: Mesh,
        ids: range,
        threads: int,
        shards: int,
    ):
        self._config, self._mesh, self._make_policy = config, mesh, make_policy
        self._learners = list(mesh.local_devices)
        self._devices = acting_devices(config, self._learners)
        self._threads = max(1, threads // len(self._devices))
        self._shards = shards
        self._blocks = [ids[p.start : p.stop] for p in split_ids(len(ids), len(self._devices))]
        self._actions: list[np.ndarray] = []
        self._ahead: Ahead | None = None
        self.watch = Stopwatch()
        self.actors: list[Any] = []  # all ScanActor or all LoopActor
        self.renew(generation=0)

    def renew(self, generation: int) -> None:
        """Make all environments anew; episodes under way are cut."""
        self.close()
        self._actions, self._ahead = [], None
        self.actors = [
            self._make_actor(device, ids, generation)
            for device, ids in zip(self._devices, self._blocks, strict=True)
        ]

    def _make_actor(self, device: jax.Device, ids: range, generation: int) -> ScanActor | LoopActor:
        compiled = compiles(self._config, device)
        parts = 1 if compiled else halves_of(len(ids), self._shards)
        envs = [
            make_env(self._config, ids[part.start : part.stop], self._threads, generation)
            for part in split_ids(len(ids), parts)
        ]
        self.spec = envs[0].spec
        self.policy = self._make_policy(self.spec, self._learners[0].platform)
        policy = self._make_policy(self.spec, device.platform)
        local_ids = jax.device_put(np.asarray(ids, np.int32), device)
        if compiled:
            return ScanActor(self._config, policy, envs[0], local_ids, self._shards)
        return LoopActor(self._config, policy, envs, local_ids, self._shards)

    @property
    def way(self) -> str:
        """How rollouts are made, for the log."""
        where = ", on the processor" if self._elsewhere else ""
        if isinstance(self.actors[0], ScanActor):
            return f"in one compiled program, simulator included{where}"
        turns = ", in two halves that take turns" if len(self.actors[0].halves) == 2 else ""
        return f"step by step from Python{turns}{where}"

    @property
    def _elsewhere(self) -> bool:
        return self._devices != self._learners

    def _moved(self, trees: Sequence[Any], devices: Sequence[jax.Device]) -> Sequence[Any]:
        if not self._elsewhere:
            return trees
        return [jax.device_put(t, device) for t, device in zip(trees, devices, strict=True)]

    # -- stepping

    def collect_ahead(self, state: TrainState, key: Array) -> None:
        """Let the next `collect` find its rollout done; checkpoints keep what was before it."""
        before = self.named_state()
        self._ahead = Ahead(before, *self.collect(state, key))

    def collect(self, state: TrainState, key: Array) -> tuple[Rollout, Episodes]:
        """T steps of every environment with the given parameters."""
        if self._ahead is not None:
            done, self._ahead = self._ahead, None
            return done.rollout, done.episodes
        inputs = (variables_of(state.params, state.obs_moments), key, state.step)
        copies = self._moved([on_device(inputs, x) for x in self._learners], self._devices)
        if isinstance(self.actors[0], ScanActor):
            parts = [a.collect(*copy) for a, copy in zip(self.actors, copies, strict=True)]
        else:
            parts = self._collect_in_turn(copies)
        rollout = self._join(self._moved([part for part, _ in parts], self._learners))
        episodes = self._episodes([jax.tree.map(np.asarray, e) for _, e in parts])
        self._remember([np.asarray(part.action) for part, _ in parts])
        return rollout, episodes

    def _collect_in_turn(self, copies: Sequence[Any]) -> list[tuple[Rollout, dict[str, Array]]]:
        for actor, copy in zip(self.actors, copies, strict=True):
            actor.start(*copy)
        halves = [(actor, half) for actor in self.actors for half in actor.halves]
        self.watch.start()
        for _, half in halves:
            half.think(0)
        for t in range(num_steps := self._config.algo.num_steps):
            for _, half in halves:
                half.send()
            self.watch.lap("inference")
            for actor, half in halves:
                actor.receive(half, t)
                if t + 1 < num_steps:
                    half.think(t + 1)  # while the halves after it are simulated
            self.watch.lap("env")
        return [actor.finish() for actor in self.actors]

    def _join(self, parts: Sequence[Rollout]) -> Rollout:
        def join_field(spec: Any, *xs: Any) -> Any:
            axis = len(spec) - 1
            return jax.tree.map(lambda *leaf: join(leaf, self._mesh, axis), *xs)

        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        return jax.tree.map(join_field, rollout_specs(), *parts, is_leaf=is_spec)

    def _episodes(self, parts: Sequence[dict[str, np.ndarray]]) -> Episodes:
        over, score, length = (
            np.concatenate([part[name] for part in parts], axis=1)
            for name in ("over", "score", "length")
        )
        t, b = np.nonzero(over)
        ids = np.concatenate([np.asarray(a.env_ids) for a in self.actors])
        return Episodes(t, ids[b], score[t, b], length[t, b].astype(np.int64))

    # -- what a checkpoint keeps; environments along the first axis

    def named_state(self) -> dict[str, np.ndarray]:
        """The actors' state by name, before what was collected ahead."""
        if self._ahead is not None:
            return self._ahead.state
        states = [jax.tree.map(np.asarray, actor.state) for actor in self.actors]
        return to_named(jax.tree.map(lambda *x: np.concatenate(x), *states))

    def take_actions(self) -> np.ndarray:
        """`[B, steps, ...]` actions since the last call, or since the environments were made."""
        count = len(self._actions) - (self._ahead is not None)  # one entry a rollout
        taken, self._actions = self._actions[:count], self._actions[count:]
        if not taken:
            return np.empty((sum(map(len, self._blocks)), 0), np.uint8)
        # In C order: safetensors writes the memory as it lies.
        return np.ascontiguousarray(np.concatenate(taken, axis=1))

    def _remember(self, parts: Sequence[np.ndarray]) -> None:
        if self._config.checkpoint.envs == "fresh":
            return
        actions = np.concatenate(parts, axis=1).swapaxes(0, 1)
        space = self.spec.action
        if space.kind != "box" and max(space.nvec) <= 256:
            actions = actions.astype(np.uint8)
        self._actions.append(actions)

    def replay(self, actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
        """Bring new environments to where the old ones were; `named` says where that was."""
        start = 0
        for actor in self.actors:
            rows = slice(start, start + actor.num_envs)
            start = rows.stop
            obs = actor.state.obs
            for t in range(actions.shape[1]):
                obs = actor.step(widen(actions[rows, t]))
            state = from_named(actor.state, {k: v[rows] for k, v in named.items()})
            if not np.array_equal(obs, state.obs):
                raise CheckpointError(
                    "the environments did not repeat themselves: their observation differs from "
                    "the saved one. Add --checkpoint.envs fresh to go on with new episodes"
                )
            actor.place(state)

    def close(self) -> None:
        for actor in self.actors:
            actor.close()


def acting_devices(config: Config, learners: list[jax.Device]) -> list[jax.Device]:
    """Where the policy of each learner's environments acts.

    A device computes one thing after the other: an accelerator that learns could not act
    meanwhile, so with `overlap` the processor does.
    """
    if config.overlap and learners[0].platform != "cpu":
        return [host_device()] * len(learners)
    return learners


def compiles(config: Config, device: jax.Device) -> bool:
    """Whether the simulator can be part of a program on this device."""
    return config.env.backend == "envpool" and device.platform == "cpu"


def halves_of(envs: int, shards: int) -> int:
    """How many parts of a device's environments take turns: two, unless they would be tiny.

    Whole vectors and whole shards stay together, so that the bits do not depend on it.
    """
    even = envs % (2 * WHOLE_VECTORS) == 0 and (shards == 1 or shards % 2 == 0)
    return 2 if even else 1


def widen(actions: np.ndarray) -> np.ndarray:
    """Stored actions as a policy gives them."""
    return actions.astype(np.int32) if actions.dtype == np.uint8 else actions

"""Parameters in, a rollout out: all environments of this rank, spread over its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from spmdrl.acting import compiled, stepped
from spmdrl.acting.action_log import ActionLog, replay, saved_states
from spmdrl.acting.compiled import CompiledActor
from spmdrl.acting.source import Episodes, Source, episodes_of
from spmdrl.acting.stepped import SteppedActor, Stopwatch
from spmdrl.config import Config
from spmdrl.envs import make_env
from spmdrl.nets.policy import make_policy, variables_of
from spmdrl.parallel.ids import split_ids
from spmdrl.parallel.mesh import host_device, join, on_device
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.platforms import likes
from spmdrl.trees import to_named
from spmdrl.types import Array, Obs, Rollout, TrainState

__all__ = ["Collector", "Episodes"]


@dataclass(frozen=True)
class Ahead:
    """A rollout that waits for its update, and the actors' state before it."""

    state: dict[str, np.ndarray]
    rollout: Rollout
    episodes: Episodes


class Collector(Source):
    """The environments of this rank, spread over its devices."""

    phase: ClassVar[str] = "collect"

    def __init__(self, config: Config, mesh: Mesh, ids: range, threads: int, shards: int):
        self._config, self._mesh = config, mesh
        self._learners = list(mesh.local_devices)
        self._devices = acting_devices(config, self._learners)
        self._threads = max(1, threads // len(self._devices))
        self._shards = shards
        self.ids = ids
        self._blocks = [ids[p.start : p.stop] for p in split_ids(len(ids), len(self._devices))]
        self.watch = Stopwatch()
        self.actors: list[Any] = []  # all of one kind
        self.renew(generation=0)

    def renew(self, generation: int) -> None:
        """Make all environments anew; episodes under way are cut."""
        self.close()
        self._ahead: Ahead | None = None
        self.actors = [
            self._make_actor(device, ids, generation)
            for device, ids in zip(self._devices, self._blocks, strict=True)
        ]
        replays = self._config.checkpoint.envs == "replay" and not self.saves_envs
        self._log = ActionLog(len(self.ids), wanted=replays)

    def _make_actor(
        self, device: jax.Device, ids: range, generation: int
    ) -> CompiledActor | SteppedActor:
        inside = simulates_inside(self._config, device)
        parts = 1 if inside else stepped.groups_of(len(ids), self._shards)
        envs = [
            make_env(self._config, ids[part.start : part.stop], self._threads, generation, parts)
            for part in split_ids(len(ids), parts)
        ]
        self.spec = envs[0].spec
        policy = make_policy(self._config, self.spec, device.platform)
        local_ids = jax.device_put(np.asarray(ids, np.int32), device)
        if inside:
            return CompiledActor(self._config, policy, envs[0], local_ids, self._shards)
        return SteppedActor(self._config, policy, envs, local_ids, self._shards)

    @property
    def description(self) -> str:
        """How rollouts are made, for the log."""
        where = ", on the processor" if self._acts_elsewhere else ""
        return f"{self.actors[0].description}{where}"

    def hint(self) -> str:
        """What would make rollouts faster, or nothing."""
        return next(filter(None, (actor.hint() for actor in self.actors)), "")

    @property
    def saves_envs(self) -> bool:
        """Whether `named_state` holds the environments too, so that nothing has to be replayed."""
        return bool(self.actors[0].saves_envs)

    @property
    def first_obs(self) -> Obs:
        """An observation of one environment."""
        return jax.tree.map(lambda x: np.asarray(x)[0], self.actors[0].state.obs)

    @property
    def _acts_elsewhere(self) -> bool:
        return self._devices != self._learners

    def _moved(self, trees: Sequence[Any], devices: Sequence[jax.Device]) -> Sequence[Any]:
        if not self._acts_elsewhere:
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
        rollout, ended = self.collect_ended(state, key)
        return rollout, episodes_of(self.ids, ended)

    def collect_ended(self, state: TrainState, key: Array) -> tuple[Rollout, dict[str, np.ndarray]]:
        """The same with what ended as `[T, B]` arrays."""
        inputs = (variables_of(state.params, state.obs_moments), key, state.step)
        copies = self._moved([on_device(inputs, x) for x in self._learners], self._devices)
        parts = self._collect_parts(copies)
        rollout = self._join(self._moved([part for part, _ in parts], self._learners))
        ended = [jax.tree.map(np.asarray, e) for _, e in parts]
        self._log.add(self.spec.action, [np.asarray(part.action) for part, _ in parts])
        return rollout, jax.tree.map(lambda *x: np.concatenate(x, axis=1), *ended)

    def _collect_parts(self, inputs: Sequence[Any]) -> list[tuple[Rollout, dict[str, Array]]]:
        if isinstance(self.actors[0], CompiledActor):
            return compiled.collect_all(self.actors, inputs)
        return stepped.collect_all(self.actors, inputs, self._config.algo.num_steps, self.watch)

    def _join(self, parts: Sequence[Rollout]) -> Rollout:
        def join_field(spec: Any, *xs: Any) -> Any:
            axis = len(spec) - 1
            return jax.tree.map(lambda *leaf: join(leaf, self._mesh, axis), *xs)

        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        return jax.tree.map(join_field, rollout_specs(), *parts, is_leaf=is_spec)

    # -- what a checkpoint keeps; environments along the first axis

    def named_state(self) -> dict[str, np.ndarray]:
        """The actors' state by name, before what was collected ahead."""
        if self._ahead is not None:
            return self._ahead.state
        states = [jax.tree.map(np.asarray, actor.state) for actor in self.actors]
        return to_named(jax.tree.map(lambda *x: np.concatenate(x), *states))

    def take_actions(self) -> np.ndarray:
        """`[B, steps, ...]` actions since the last call, or since the environments were made."""
        return self._log.take(keep_last=self._ahead is not None)

    def replay(self, actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
        """Bring new environments to where the old ones were; `named` says where that was."""
        replay(self.actors, actions, named)

    def place(self, named: dict[str, np.ndarray]) -> None:
        """Take up what `named_state` gave, the environments included."""
        for actor, _, state in saved_states(self.actors, named):
            actor.place(state)

    def close(self) -> None:
        for actor in self.actors:
            actor.close()


def acting_devices(config: Config, learners: list[jax.Device]) -> list[jax.Device]:
    """Where the policy of each learner's environments acts.

    A device computes one thing after the other: an accelerator that learns could not act
    meanwhile, so the processor does if rollouts are collected ahead.
    """
    if config.collects_ahead and not likes(learners[0].platform).acts_beside_learning:
        return [host_device()] * len(learners)
    return learners


def simulates_inside(config: Config, device: jax.Device) -> bool:
    """Whether the simulator can be part of a program on this device."""
    if config.env.backend == "jax":
        return True  # it is nothing but a program
    return config.env.backend == "envpool" and likes(device.platform).runs_simulators

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

from spmdrl.actors import LoopActor, ScanActor
from spmdrl.checkpoint import CheckpointError, from_named, to_named
from spmdrl.config import Config
from spmdrl.envs import make_env
from spmdrl.mesh import join, on_device
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.shards import rollout_specs, split_ids
from spmdrl.types import Array, EnvSpec, Rollout, TrainState


@dataclass(frozen=True)
class Episodes:
    """Games that ended in one rollout, in order of time and then of environment id."""

    step: np.ndarray
    env_id: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


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
        make_policy: Callable[[EnvSpec], Policy],
        mesh: Mesh,
        ids: range,
        threads: int,
        shards: int,
    ):
        self._config, self._mesh, self._make_policy = config, mesh, make_policy
        self._devices = list(mesh.local_devices)
        self._threads = max(1, threads // len(self._devices))
        self._shards = shards
        self._blocks = [ids[p.start : p.stop] for p in split_ids(len(ids), len(self._devices))]
        self._actions: list[np.ndarray] = []
        self.watch = Stopwatch()
        self.actors: list[Any] = []  # all ScanActor or all LoopActor
        self.renew(generation=0)

    def renew(self, generation: int) -> None:
        """Make all environments anew; episodes under way are cut."""
        self.close()
        self._actions = []
        self.actors = [
            self._make_actor(device, ids, generation)
            for device, ids in zip(self._devices, self._blocks, strict=True)
        ]

    def _make_actor(self, device: jax.Device, ids: range, generation: int) -> ScanActor | LoopActor:
        env = make_env(self._config, ids, self._threads, generation)
        self.spec = env.spec
        self.policy = self._make_policy(env.spec)
        local_ids = jax.device_put(np.asarray(ids, np.int32), device)
        if env.xla() is not None and device.platform == "cpu":
            return ScanActor(self._config, self.policy, env, local_ids, self._shards)
        return LoopActor(self._config, self.policy, env, local_ids, self._shards)

    @property
    def way(self) -> str:
        """How rollouts are made, for the log."""
        if isinstance(self.actors[0], ScanActor):
            return "in one compiled program, simulator included"
        return "step by step from Python"

    # -- stepping

    def collect(self, state: TrainState, key: Array) -> tuple[Rollout, Episodes]:
        """T steps of every environment with the given parameters."""
        variables = variables_of(state.params, state.obs_moments)
        copies = [on_device((variables, key), device) for device in self._devices]
        if isinstance(self.actors[0], ScanActor):
            parts = [a.collect(v, k) for a, (v, k) in zip(self.actors, copies, strict=True)]
        else:
            parts = self._collect_in_turn(copies)
        rollout = self._join([part for part, _ in parts])
        episodes = self._episodes([jax.tree.map(np.asarray, e) for _, e in parts])
        self._remember([np.asarray(part.action) for part, _ in parts])
        return rollout, episodes

    def _collect_in_turn(self, copies: Sequence[Any]) -> list[tuple[Rollout, dict[str, Array]]]:
        num_steps = self._config.algo.num_steps
        for actor, (variables, key) in zip(self.actors, copies, strict=True):
            actor.start(variables, key)
        self.watch.start()
        for t in range(num_steps):
            for actor in self.actors:
                actor.think(t)
            for actor in self.actors:
                actor.send()
            self.watch.lap("inference")
            for actor in self.actors:
                actor.receive(t, num_steps)
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
        """The actors' state by name."""
        states = [jax.tree.map(np.asarray, actor.state) for actor in self.actors]
        return to_named(jax.tree.map(lambda *x: np.concatenate(x), *states))

    def take_actions(self) -> np.ndarray:
        """`[B, steps, ...]` actions since the last call, or since the environments were made."""
        taken, self._actions = self._actions, []
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
            rows = slice(start, start + actor.env.num_envs)
            start = rows.stop
            obs = actor.state.obs
            for t in range(actions.shape[1]):
                actor.env.send(widen(actions[rows, t]))
                obs = actor.env.recv().obs
            state = from_named(actor.state, {k: v[rows] for k, v in named.items()})
            if not np.array_equal(obs, state.obs):
                raise CheckpointError(
                    "the environments did not repeat themselves: their observation differs from "
                    "the saved one. Add --checkpoint.envs fresh to go on with new episodes"
                )
            actor.place(state)

    def close(self) -> None:
        for actor in self.actors:
            actor.env.close()


def widen(actions: np.ndarray) -> np.ndarray:
    """Stored actions as a policy gives them."""
    return actions.astype(np.int32) if actions.dtype == np.uint8 else actions

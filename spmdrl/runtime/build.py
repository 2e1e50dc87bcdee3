"""The assembly: from a config to everything that an update needs, once, for all who train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from spmdrl.acting.collector import Collector
from spmdrl.acting.inbox import Inbox
from spmdrl.acting.source import Episodes, Source
from spmdrl.config import Config
from spmdrl.learning.stages import Learner, make_learner
from spmdrl.learning.state import init_train_state
from spmdrl.learning.update import Update, make_update
from spmdrl.nets import make_policy
from spmdrl.parallel.gather import broadcast_tree, gathered
from spmdrl.parallel.ids import ids_of_ranks, shards_in
from spmdrl.parallel.mesh import commit, global_devices, local_devices, make_mesh, replicate
from spmdrl.parallel.roles import Layout
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.runtime.checkpoint import Snapshot
from spmdrl.runtime.introductions import hear_actors
from spmdrl.runtime.warm_start import initial_model
from spmdrl.types import Array, Report, Rollout, TrainState

__all__ = ["Trainer", "build_learner", "build_trainer", "run_keys", "run_mesh"]


@dataclass
class Trainer:
    """One rank's actors and learner, and the state that goes from update to update."""

    config: Config
    world: World
    mesh: Mesh
    collector: Source
    learner: Learner
    update: Update
    state: TrainState
    act_key: Array
    update_key: Array
    everyone: World | None = None  # where some ranks only act: all of them

    @property
    def devices(self) -> int:
        """Of this rank."""
        return len(self.mesh.local_devices)

    def collect(self) -> tuple[Rollout, Episodes]:
        return self.collector.collect(self.state.acting(), self.act_key)

    def learn(self, rollout: Rollout, ahead: bool = False) -> Report:
        """Update the state; `ahead` collects the next rollout meanwhile."""
        before = self.state
        self.state, report = self.update(before, rollout, self.update_key)
        if ahead:
            self.collector.collect_ahead(next_step(before), self.act_key)
        return jax.device_get(report)


@jax.jit
def next_step(state: TrainState) -> TrainState:
    """The model that collects the rollout of the next update, known before this one is done."""
    later = state.replace(step=state.step + 1, opt_state=(), behind=state.next_behind())
    return later.acting().replace(behind=())


def build_trainer(
    config: Config,
    world: World | None = None,
    threads: int = 1,
    mesh: Mesh | None = None,
    source: Snapshot | None = None,
    remote: Callable[[Mesh], Source] | None = None,
) -> Trainer:
    """A trainer before its first update; the same state on every rank.

    `source` is what it begins with instead of random parameters; only rank 0 needs it. `remote`
    makes what stands for environments that other ranks have; `world` are then the learners.
    """
    world, mesh = world or World(), mesh or run_mesh(config)
    devices = len(mesh.local_devices)
    collector = remote(mesh) if remote else own_collector(config, world, mesh, threads)
    platform, spec = mesh.local_devices[0].platform, collector.spec
    policy = make_policy(config, spec, platform)
    sync = make_grad_sync(config.sync, world, devices)
    learner = make_learner(config, policy, sync, platform, spec.has_image)
    update = make_update(learner, mesh)
    if config.sync.strategy == "gather":
        update = gathered(update, world, mesh)
    init_key, *keys = run_keys(config)
    init = jax.jit(partial(init_train_state, config, policy, spec))
    model = None if source is None else initial_model(config, policy, spec, source)
    state = broadcast_tree(world, init(init_key, collector.first_obs, model))
    state = commit(replicate(state, mesh), mesh)
    return Trainer(config, world, mesh, collector, learner, update, state, *replicate(keys, mesh))


def build_learner(
    config: Config, everyone: World, layout: Layout, run: int, source: Snapshot | None = None
) -> Trainer:
    """A learner whose rollouts come from other ranks; `run` tells its messages from others'."""
    peers = everyone.split(range(layout.learners))
    told = hear_actors(everyone, layout)

    def inbox(mesh: Mesh) -> Inbox:
        policy = make_policy(config, told.spec, mesh.local_devices[0].platform)
        return Inbox(config, mesh, policy, everyone, layout, told, run)

    trainer = build_trainer(config, peers, source=source, remote=inbox)
    trainer.everyone = everyone
    return trainer


def own_collector(config: Config, world: World, mesh: Mesh, threads: int) -> Collector:
    """This rank's environments, where every rank has some."""
    ids = ids_of_ranks(config, world.size)[world.rank]
    shards = shards_in(config, len(ids) // len(mesh.local_devices))
    return Collector(config, mesh, ids, threads, shards)


def run_keys(config: Config) -> Any:
    """For the first parameters, for acting and for learning."""
    return jax.random.split(jax.random.PRNGKey(config.seed), 3)


def run_mesh(config: Config) -> Mesh:
    """This rank's devices; with strategy jax, those of all ranks."""
    if config.sync.strategy == "jax":
        return make_mesh(global_devices(config.devices))
    return make_mesh(local_devices(config.devices))

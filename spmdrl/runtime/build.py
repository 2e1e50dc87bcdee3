"""The assembly: from a config to everything that an update needs, once, for all who train."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh

from spmdrl.acting.collector import Collector, Episodes
from spmdrl.config import Config
from spmdrl.learning.stages import Learner, make_learner
from spmdrl.learning.state import init_train_state
from spmdrl.learning.update import Update, make_update
from spmdrl.nets import make_policy
from spmdrl.parallel.gather import broadcast_tree, gathered
from spmdrl.parallel.mesh import commit, global_devices, local_devices, make_mesh, replicate
from spmdrl.parallel.placement import ids_of_ranks, shards_in
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.runtime.checkpoint import Snapshot
from spmdrl.runtime.warm_start import initial_model
from spmdrl.types import Array, Report, Rollout, TrainState

__all__ = ["Trainer", "build_trainer", "run_mesh"]


@dataclass
class Trainer:
    """One rank's actors and learner, and the state that goes from update to update."""

    config: Config
    world: World
    mesh: Mesh
    collector: Collector
    learner: Learner
    update: Update
    state: TrainState
    act_key: Array
    update_key: Array

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
) -> Trainer:
    """A trainer before its first update; the same state on every rank.

    `source` is what it begins with instead of random parameters; only rank 0 needs it.
    """
    world, mesh = world or World(), mesh or run_mesh(config)
    devices = len(mesh.local_devices)
    ids = ids_of_ranks(config, world.size)[world.rank]
    collector = Collector(config, mesh, ids, threads, shards_in(config, len(ids) // devices))
    platform, spec = mesh.local_devices[0].platform, collector.spec
    policy = make_policy(config, spec, platform)
    sync = make_grad_sync(config.sync, world, devices)
    learner = make_learner(config, policy, sync, platform, spec.has_image)
    update = make_update(learner, mesh)
    if config.sync.strategy == "gather":
        update = gathered(update, world, mesh)
    init_key, *keys = jax.random.split(jax.random.PRNGKey(config.seed), 3)
    init = jax.jit(partial(init_train_state, config, policy, spec))
    model = None if source is None else initial_model(config, policy, spec, source)
    state = broadcast_tree(world, init(init_key, collector.first_obs, model))
    state = commit(replicate(state, mesh), mesh)
    return Trainer(config, world, mesh, collector, learner, update, state, *replicate(keys, mesh))


def run_mesh(config: Config) -> Mesh:
    """This rank's devices; with strategy jax, those of all ranks."""
    if config.sync.strategy == "jax":
        return make_mesh(global_devices(config.devices))
    return make_mesh(local_devices(config.devices))

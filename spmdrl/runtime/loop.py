"""The only training loop: collect, update, report, save.

Public names: `train`, `Stopped`.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from spmdrl.acting.collector import Collector, Episodes
from spmdrl.config import Config
from spmdrl.learning.update import init_train_state, make_update, params_sha256
from spmdrl.nets import make_policy
from spmdrl.parallel.comm_meter import CommMeter
from spmdrl.parallel.compile_cache import publish
from spmdrl.parallel.gather import gathered
from spmdrl.parallel.guards import NotFinite, assert_in_sync
from spmdrl.parallel.mesh import global_devices, local_devices, make_mesh, replicate, settle
from spmdrl.parallel.placement import ids_of_ranks, shards_in
from spmdrl.parallel.process import settings
from spmdrl.parallel.sync import broadcast_tree, make_grad_sync
from spmdrl.parallel.topology import Topology, threads_per_rank
from spmdrl.parallel.world import World
from spmdrl.runtime.logger import EpisodeStats, Every, NullLogger, Row, Timer
from spmdrl.runtime.rundir import RunDir
from spmdrl.runtime.saver import Saver
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog
from spmdrl.types import TrainState


class Stopped(Exception):
    """The run was asked to stop, and did so after a checkpoint."""


def train(
    config: Config,
    topology: Topology,
    world: World,
    run: RunDir,
    logger: NullLogger,
    stop: StopRequest,
    watchdog: Watchdog,
) -> dict[str, Any]:
    """Train to the end; the summary of the run."""
    started, limits = time.perf_counter(), config.sync
    watchdog.enter("start", 0, limits.start_timeout_s)
    mesh = run_mesh(config)
    devices = len(mesh.local_devices)
    sync = make_grad_sync(config.sync, world, devices)
    ids = ids_of_ranks(config, world.size)[world.rank]
    shards = shards_in(config, len(ids) // devices)
    collector = Collector(
        config, partial(make_policy, config), mesh, ids, threads_of(config, topology), shards
    )
    update = make_update(config, collector.policy, sync, mesh)
    if config.sync.strategy == "gather":
        update = gathered(update, world, mesh)
    init_key, *keys = jax.random.split(jax.random.PRNGKey(config.seed), 3)
    act_key, update_key = replicate(keys, mesh)
    first_obs = np.asarray(collector.actors[0].state.obs)[0]
    init = jax.jit(partial(init_train_state, config, collector.policy, collector.spec))
    state = init(init_key, first_obs)
    state = broadcast_tree(world, state)
    stats = EpisodeStats(config.log.window)
    saver = Saver(config, world, mesh, run.path, logger)
    state = settle(saver.restore(replicate(state, mesh), collector, stats), mesh)
    guard = NotFinite(config.sync, devices)

    logger.info(header(config, world, devices, collector))
    logger.info(f"rank {world.rank}: {settings(threads_of(config, topology))}")
    first, last = int(state.step), config.num_updates
    should_log, should_save = Every(config.log.every, last), Every(config.checkpoint.every, last)
    should_check, should_renew = (
        Every(n, 0) for n in (limits.check_every, config.checkpoint.renew_every)
    )
    timer, rate, comm = (
        Timer(),
        Rate(config, first),
        CommMeter(config.sync, world, state.params, config.algo.epochs * config.algo.minibatches),
    )
    for step in range(first, last):
        limit = limits.start_timeout_s if step == first else limits.phase_timeout_s
        watchdog.enter("collect", step, limit)
        with timer("collect"):
            rollout, episodes = collector.collect(state.acting(), act_key)
        watchdog.enter("wait", step, limit)
        with timer("wait"):
            world.barrier()
        watchdog.enter("update", step, limit)
        with timer("update"):
            before = state
            state, metrics = update(state, rollout, update_key)
            if config.overlap and step + 1 < last and not should_renew(step):
                collector.collect_ahead(next_step(before), act_key)
            metrics = jax.device_get(metrics)
        if step == first:
            settle_process(topology)
        bad = metrics.pop("bad_places")
        guard.check(np.stack([0 * bad, 0 * bad, 0 * bad, bad]), step)
        stats.add(*gather_episodes(world, episodes))
        comm.tick(step)
        if should_log(step):
            timer.add(collector.watch.read())
            seconds, total = timer.read()
            row = rate.row(step + 1, total) | stats.row() | plain(metrics)
            row |= time_row(seconds, total)
            row.update(comm.row(seconds))
            logger.write(row)
        if should_check(step):
            watchdog.enter("check", step, limit)
            assert_in_sync(limits, state, world, mesh)
        if should_renew(step):
            collector.renew(generation=(step + 1) // config.checkpoint.renew_every)
            saver.forget_actions()
        stopping = world.any(stop.signal is not None)
        if should_save(step) or stopping or step + 1 == last:
            watchdog.enter("save", step, limit)
            with timer("save"):
                saver.save(state, collector, stats, must=stopping or step + 1 == last)
        if stopping and step + 1 < last:
            raise Stopped(f"stopped on request after update {step + 1} of {last}")
    collector.close()
    speed = Speed(updates=last - first, seconds=time.perf_counter() - started)
    return summarize(config, world, devices, state, stats, speed)


@jax.jit
def next_step(state: TrainState) -> TrainState:
    """The same model, for the rollout of the next update."""
    return state.replace(step=state.step + 1, opt_state=(), behind=())


def settle_process(topology: Topology) -> None:
    """Once everything is compiled: keep the programs, and their traces out of every collection.

    Python's collector would walk the hundred thousands of objects of jax's tracing again and
    again, on one rank while the others wait.
    """
    if topology.local_rank == 0:
        publish()
    gc.collect()
    gc.freeze()


def header(config: Config, world: World, devices: int, collector: Collector) -> str:
    """What is about to happen, in one line."""
    return (
        f"{config.env.id}: {config.env.num_envs} environments on {world.size} rank(s) x {devices} "
        f"device(s), {config.num_updates:,} updates of {config.batch_size:,} steps; rollouts "
        f"{collector.way}"
    )


def run_mesh(config: Config) -> Mesh:
    """This rank's devices; with strategy jax, those of all ranks."""
    if config.sync.strategy == "jax":
        return make_mesh(global_devices(config.devices))
    return make_mesh(local_devices(config.devices))


def threads_of(config: Config, topology: Topology) -> int:
    return config.env.threads or threads_per_rank(topology)


def gather_episodes(world: World, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of all ranks' episodes on rank 0, in order of time and id."""
    if world.size == 1:
        return episodes.returns, episodes.lengths
    columns = (episodes.step, episodes.env_id, episodes.returns, episodes.lengths)
    rows = world.gather_rows(np.stack([np.asarray(c, np.float64) for c in columns], axis=1))
    if rows is None:
        rows = np.empty((0, 4))
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    return rows[:, 2], rows[:, 3]


class Rate:
    """Steps per second of the last interval, and what is left at that speed."""

    def __init__(self, config: Config, first: int):
        self._config, self._update = config, first
        self._smooth = 0.0
        self._intervals = 0

    def row(self, update: int, seconds: float) -> Row:
        steps = (update - self._update) * self._config.batch_size
        self._update = update
        sps = steps / max(seconds, 1e-9)
        self._intervals += 1
        # The first interval holds the compilation; it would spoil the estimate for long.
        self._smooth = sps if self._intervals <= 2 else 0.9 * self._smooth + 0.1 * sps
        left = (self._config.num_updates - update) * self._config.batch_size
        return {
            "progress/update": update,
            "progress/steps": update * self._config.batch_size,
            "progress/eta_s": left / self._smooth,
            "perf/sps": sps,
        }


def plain(metrics: dict[str, Any]) -> Row:
    return {name: float(value) for name, value in sorted(metrics.items())}


def time_row(seconds: dict[str, float], total: float) -> Row:
    """Seconds of each phase; env and inference are parts of collect."""
    phases = ("collect", "wait", "update", "save")
    other = max(0.0, total - sum(seconds.get(name, 0.0) for name in phases))
    row: Row = {f"time/{k}": v for k, v in sorted(seconds.items())}
    return row | {"time/other": other}


class Speed(NamedTuple):
    """Of this process's part of the run: a resumed run did not do the updates before."""

    updates: int
    seconds: float


def summarize(
    config: Config, world: World, devices: int, state: Any, stats: EpisodeStats, speed: Speed
) -> dict[str, Any]:
    return {
        "env_steps": config.num_updates * config.batch_size,
        "updates": config.num_updates,
        "wall_s": speed.seconds,
        "sps": speed.updates * config.batch_size / speed.seconds,
        "episode_return_mean": stats.row()["episode/return_mean"],
        "episode_count": stats.count,
        "params_sha256": params_sha256(jax.device_get(state.params)),
        "world_size": world.size,
        "devices": devices,
    }

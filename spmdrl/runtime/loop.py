"""The only training loop: collect, meet, update, then whatever is due."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import jax

from spmdrl.learning.state import params_sha256
from spmdrl.parallel.comm_meter import CommMeter
from spmdrl.parallel.compile_cache import publish
from spmdrl.parallel.guards import NotFinite, NotFiniteError, assert_in_sync
from spmdrl.parallel.mesh import commit
from spmdrl.runtime.build import Trainer
from spmdrl.runtime.clock import Every, Phases, Rate, Row
from spmdrl.runtime.evaluator import Evaluator
from spmdrl.runtime.logger import EpisodeStats, NullLogger
from spmdrl.runtime.meeting import Meeting
from spmdrl.runtime.saver import Saver
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog
from spmdrl.types import Report

__all__ = ["Stopped", "TrainingLoop"]

ADVISING = 10  # updates at the start


class Stopped(Exception):
    """The run was asked to stop, and did so after a checkpoint."""


class TrainingLoop:
    """What happens around the updates of a trainer; each task has a clock of its own."""

    def __init__(
        self,
        trainer: Trainer,
        run_dir: Path,
        logger: NullLogger,
        stop: StopRequest,
        watchdog: Watchdog,
        publishes: bool = False,
    ):
        """`publishes`: whether this process hands its compiled programs over to later runs."""
        self.trainer, self.config, self.world = trainer, trainer.config, trainer.world
        self.logger, self.stop, self.publishes = logger, stop, publishes
        self.phases = Phases(watchdog, self.config.sync)
        self.stats = EpisodeStats(self.config.log.window)
        everyone = trainer.everyone or self.world
        self.saver = Saver(self.config, self.world, trainer.mesh, run_dir, logger, everyone)
        self.guard = NotFinite(self.config.sync, trainer.devices)
        everyone.meet()  # they have built what will be restored
        restored = self.saver.restore(trainer.state, trainer.collector, self.stats)
        trainer.state = commit(restored, trainer.mesh)
        self.first, self.last = int(trainer.state.step), self.config.num_updates
        self.advising_until = self.first + ADVISING
        self.should_log = Every(self.config.log.every, self.last)
        self.should_save = Every(self.config.checkpoint.every, self.last)
        self.should_check = Every(self.config.sync.check_every)
        # Environments that are saved with the actors are never replayed, so they can go on.
        saved = trainer.collector.saves_envs
        self.should_renew = Every(0 if saved else self.config.checkpoint.renew_every)
        self.rate = Rate(self.config, self.first)
        rounds = trainer.learner.num_gradients
        self.comm = CommMeter(self.config.sync, self.world, trainer.state.params, rounds)
        self.meeting = Meeting(self.world)
        self.evaluator = Evaluator(self.config, self.world, stop, logger, self.saver)
        self.evaluator.resume(self.saver.restored, self.stats)
        watchdog.waits_for = trainer.collector.waits_for
        over = self.first >= self.last or bool(self.evaluator.reached)
        trainer.collector.begin(trainer.state, self.first, over)

    def train(self) -> dict[str, Any]:
        """Train to the end; the summary of the run."""
        started, phases, trainer = time.perf_counter(), self.phases, self.trainer
        source = trainer.collector
        for step in range(self.first, self.first if self.evaluator.reached else self.last):
            phases.begin(step, compiles=step == self.first)
            with phases(source.phase):
                rollout, episodes = trainer.collect()
            with phases("wait"):
                asked = self.stop.signal is not None or source.stop_asked
                stopping = self.meeting.hold(asked, episodes, phases)
            with phases("update"):
                more = step + 1 < self.last and not self.should_renew(step)
                report = trainer.learn(rollout, ahead=self.config.collects_ahead and more)
            if step == self.first:
                settle_process(self.publishes)
            self.guard_numbers(report, step)
            self.stats.add(*self.meeting.gather_episodes(episodes))
            self.comm.tick(step)
            self.evaluator.tick(step, trainer.state, self.stats, phases)
            self.publish(step, stopping)
            self.log(step, report)
            self.advise(step)
            self.check(step)
            self.renew(step)
            self.save(step, stopping)
            if self.evaluator.reached:
                break
            if stopping and step + 1 < self.last:
                self.leave()
                raise Stopped(f"stopped on request after update {step + 1} of {self.last}")
        self.leave()
        return self.summary(time.perf_counter() - started)

    def guard_numbers(self, report: Report, step: int) -> None:
        """End the run if numbers are not finite, and say which actor they came from."""
        try:
            self.guard.check(report.nonfinite, step)
        except NotFiniteError as error:
            if whose := self.trainer.collector.blame():
                error.add_note(f"They came from the environments of {whose}.")
            raise

    def publish(self, step: int, stopping: bool) -> None:
        """The new model, for ranks that only act; they must know whether it is the last."""
        last = step + 1 == self.last or bool(self.evaluator.reached)
        with self.phases("update"):
            self.trainer.collector.publish(self.trainer.state, stopping, last)

    def leave(self) -> None:
        """Environments are closed; ranks that only act have been told, and have answered."""
        with self.phases("wait"):
            self.trainer.collector.close()
        if advice := self.trainer.collector.advice():
            self.logger.info(advice)

    # -- tasks, each when it is due

    def log(self, step: int, report: Report) -> None:
        evaluator = self.evaluator
        if not (self.should_log(step) or evaluator.row or evaluator.reached):
            return
        self.phases.add(self.trainer.collector.watch.read())
        seconds, total = self.phases.read()
        row = self.rate.row(step + 1, total) | self.stats.row() | to_floats(report.metrics)
        row |= time_row(seconds, total)
        row |= self.comm.row(self.meeting.seconds(), seconds["update"]) | evaluator.row
        row |= self.trainer.collector.row(total)
        self.logger.write(row)

    def advise(self, step: int) -> None:
        """Once, as soon as there were enough steps to judge by."""
        hint = self.trainer.collector.hint() if step < self.advising_until else ""
        if hint:
            self.logger.info(hint)
            self.advising_until = 0

    def check(self, step: int) -> None:
        if self.should_check(step):
            with self.phases("check"):
                trainer = self.trainer
                assert_in_sync(self.config.sync, trainer.state, self.world, trainer.mesh)

    def renew(self, step: int) -> None:
        """New environments at fixed updates, so that a resumed run has little to replay."""
        if self.should_renew(step):
            every = self.config.checkpoint.renew_every
            self.trainer.collector.renew(generation=(step + 1) // every)
            self.saver.forget_actions()

    def save(self, step: int, stopping: bool) -> None:
        trainer, evaluator = self.trainer, self.evaluator
        must = stopping or step + 1 == self.last or evaluator.reached is not None
        if must or self.should_save(step) or evaluator.is_best:
            with self.phases("save"):
                saved = (trainer.state, trainer.collector, self.stats)
                self.saver.save(*saved, must, evaluator.score)

    def summary(self, seconds: float) -> dict[str, Any]:
        """Seconds and speed are this process's: a resumed run did not do the updates before."""
        batch, done = self.config.batch_size, int(self.trainer.state.step)
        return {
            "env_steps": done * batch,
            "updates": done,
            "wall_s": seconds,
            "sps": (done - self.first) * batch / seconds,
            "episode_return_mean": self.stats.row()["episode/return_mean"],
            "episode_count": self.stats.count,
            "params_sha256": params_sha256(jax.device_get(self.trainer.state.params)),
            "world_size": self.world.size,
            "devices": self.trainer.devices,
        } | self.evaluator.summary()


def settle_process(publishes: bool) -> None:
    """Once everything is compiled: keep the programs, and their traces out of every collection.

    Python's collector would walk the hundred thousands of objects of jax's tracing again and
    again, on one rank while the others wait.
    """
    if publishes:
        publish()
    gc.collect()
    gc.freeze()


def to_floats(metrics: dict[str, Any]) -> Row:
    return {name: float(value) for name, value in sorted(metrics.items())}


def time_row(seconds: dict[str, float], total: float) -> Row:
    """Seconds of each phase; env and inference are parts of collect."""
    phases = [value for name, value in seconds.items() if name not in ("env", "inference")]
    other = max(0.0, total - sum(phases))
    row: Row = {f"time/{k}": v for k, v in sorted(seconds.items())}
    return row | {"time/other": other}

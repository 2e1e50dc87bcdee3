"""The loop of a rank that only acts: wait for the model, collect, send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spmdrl.acting.collector import Collector
from spmdrl.acting.outbox import Outbox, placed
from spmdrl.config import Config
from spmdrl.parallel.courier import Courier
from spmdrl.parallel.ids import shards_in
from spmdrl.parallel.mesh import local_devices, make_mesh, replicate
from spmdrl.parallel.roles import Layout
from spmdrl.parallel.world import World
from spmdrl.runtime.build import run_keys
from spmdrl.runtime.clock import Phases
from spmdrl.runtime.introductions import ActorForms, introduce
from spmdrl.runtime.logger import NullLogger
from spmdrl.runtime.loop import Stopped, settle_process
from spmdrl.runtime.saver import Saver
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog
from spmdrl.trees import leaves_by_name
from spmdrl.types import TrainState

__all__ = ["ActingLoop"]


class ActingLoop:
    """The environments of one actor, and its line to the learner."""

    def __init__(
        self,
        config: Config,
        world: World,
        layout: Layout,
        run_dir: Path,
        run: int,
        threads: int,
        stop: StopRequest,
        watchdog: Watchdog,
        publishes: bool = False,
    ):
        """`run` tells this run's messages from others; see TrainingLoop for `publishes`."""
        self.config, self.world, self.stop, self.publishes = config, world, stop, publishes
        self.mesh, ids = make_mesh(local_devices(1)), layout.ids(world.rank)
        self.collector = Collector(config, self.mesh, ids, threads, shards_in(config, len(ids)))
        self.forms = forms = ActorForms(config, self.collector)
        introduce(world, self.collector, forms)
        world.meet()  # the learners are about to restore
        saver = Saver(config, world, self.mesh, run_dir, NullLogger())
        self.first, self.last = saver.restore_actor(self.collector), config.num_updates
        self.learner = layout.learner_of(world.rank)
        self.outbox = Outbox(
            Courier(world.program_comm), self.learner, run, ids, config.lag, forms.models,
            forms.rollouts,
        )  # fmt: skip
        self.phases = Phases(watchdog, config.sync)
        watchdog.waits_for = lambda: self.waiting
        self.waiting, self.patience = "", 2.0 * config.sync.start_timeout_s
        _, act_key, _ = run_keys(config)
        self.act_key = replicate(act_key, self.mesh)

    def act(self) -> None:
        """Collect until the run is over; raises Stopped if that is before its end."""
        self.outbox.begin(self.first)
        self.world.meet()  # the learners have posted their receives too
        number = self.first
        while number < self.last and self.collect(number):
            number += 1
        with self.wait(f"the last model of rank {self.learner}, its learner"):
            self.outbox.farewell(number)
        self.collector.close()
        if self.outbox.stopped:
            raise Stopped(f"stopped on request before update {number + 1} of {self.last}")

    def collect(self, number: int) -> bool:
        """One rollout; False if no more are wanted."""
        phases, outbox = self.phases, self.outbox
        # The learner compiles in its first update, whose model is wanted so much later.
        compiles = number <= self.first + self.config.lag + 1
        phases.begin(number, compiles)
        self.patience = 2.0 * phases.limit
        before = dict(phases.totals)
        with self.wait(f"model {outbox.version(number)} of rank {self.learner}, its learner"):
            model = outbox.model(number)
        if model is None:
            return False
        with phases("collect"):
            self.renew(number)
            rollout, ended = self.collector.collect_ended(self.state(model, number), self.act_key)
            state = self.collector.named_state()
        outbox.release(number)
        if number == self.first:
            settle_process(self.publishes)
        if outbox.ended:
            return False
        seconds = {k: v - before.get(k, 0.0) for k, v in phases.totals.items()}
        seconds |= self.collector.watch.read()
        with phases("send"):
            asked = self.stop.signal is not None
            outbox.send(number, leaves_by_name(rollout), ended, state, asked, seconds)
        return True

    def renew(self, number: int) -> None:
        """As the learners do after update `number`; a resumed run has done it already."""
        every = self.config.checkpoint.renew_every
        due = number % every == 0 and number > self.first
        if due and not self.collector.saves_envs:
            self.collector.renew(generation=number // every)
        self.collector.take_actions()  # the learners keep them

    def state(self, model: dict[str, np.ndarray], number: int) -> TrainState:
        """What a collector is given; random numbers go by the rollout, not by the model."""
        template = {"params": self.forms.model[0], "obs_moments": self.forms.model[1]}
        found = placed(model, template, self.mesh.local_devices[0])
        step = replicate(np.int32(number), self.mesh)
        return TrainState(
            step=step,
            params=found["params"],
            opt_state=(),
            obs_moments=found["obs_moments"],
            reward_moments=(),  # type: ignore[arg-type]  # only learning reads them
        )

    @contextlib.contextmanager
    def wait(self, whom: str) -> Iterator[None]:
        """The learner may have an update and a checkpoint to finish first."""
        self.waiting = whom
        with self.phases("wait", limit=self.patience):
            yield
        self.waiting = ""

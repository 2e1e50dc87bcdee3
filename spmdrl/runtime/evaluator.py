"""Evaluations while a run trains, and the return at which it ends before its last update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmdrl.acting.player import make_choice
from spmdrl.config import Config
from spmdrl.nets import Policy, make_policy
from spmdrl.nets.policy import variables_of
from spmdrl.parallel.mesh import on_device
from spmdrl.parallel.topology import detect, threads_per_rank
from spmdrl.parallel.world import World
from spmdrl.runtime.clock import Every, Phases, Row
from spmdrl.runtime.evaluation import make_envs, play_in, statistics
from spmdrl.runtime.logger import EpisodeStats, NullLogger
from spmdrl.runtime.saver import Saver
from spmdrl.runtime.signals import StopRequest
from spmdrl.types import TrainState

__all__ = ["Evaluator", "whole_window"]


class Evaluator:
    """Plays on rank 0 when it is due, and tells all ranks what came out.

    Environments and seeds are its own and the model is only read, so a run has the same bits with
    it and without. The environments are new each time: every evaluation has the same starts.
    """

    def __init__(
        self, config: Config, world: World, stop: StopRequest, logger: NullLogger, saver: Saver
    ):
        """After `saver` has restored the run."""
        self._config, self._world, self._stop, self._logger = config, world, stop, logger
        self._should_evaluate = Every(config.eval.every, config.num_updates)
        self._highest = saver.best_evaluation if world.is_root else None
        self._players: tuple[Policy, Callable[..., Any]] | None = None
        self.row: Row = {}  # of this update, if it was evaluated
        self.is_best = False
        self.last: float | None = None
        self.reached: dict[str, Any] | None = None

    @property
    def score(self) -> float | None:
        """The mean return of this update's evaluation."""
        value = self.row.get("eval/return_mean")
        return None if value is None else float(value)

    def resume(self, meta: dict[str, Any], stats: EpisodeStats) -> None:
        """See whether the run was over when it was saved; `stats` are still those of all ranks."""
        if meta:
            self.last = meta.get("eval_return_mean")
            value = self.last if self._config.eval.every else whole_window(stats)
            self._judge(value, meta["step"])

    def tick(self, step: int, state: TrainState, stats: EpisodeStats, phases: Phases) -> None:
        """After update `step`; every rank calls it."""
        config, world = self._config, self._world
        self.row, self.is_best = {}, False
        if self._should_evaluate(step):
            with phases("eval", config.sync.start_timeout_s):
                self._share(self._evaluate(state) if world.is_root else None)
        if config.until_return is None:
            return
        value = self.score
        if not config.eval.every:  # only rank 0 has everybody's episodes
            value = world.broadcast_json(whole_window(stats) if world.is_root else None)
        self._judge(value, step + 1)

    def summary(self) -> dict[str, Any]:
        """What the summary of a run says about it, where there is anything to say."""
        found: dict[str, Any] = {}
        if self.last is not None:
            found["eval_return_mean"] = self.last
        return found | ({"reached": self.reached} if self.reached else {})

    # -- the evaluation

    def _share(self, mine: dict[str, Any] | None) -> None:
        is_best = False
        if mine:  # which checkpoints there are only rank 0 can see
            is_best = self._highest is None or mine["return_mean"] > self._highest
            self._highest = mine["return_mean"] if is_best else self._highest
        found, self.is_best = self._world.broadcast_json([mine, is_best])
        self.row = {f"eval/{name}": value for name, value in found.items()}
        if self.score is None:
            self._logger.warning(self._why_none())
        else:
            self.last = self.score

    def _why_none(self) -> str:
        if self._stop.signal is not None:
            return "evaluation left out: the run is about to stop"
        return f"evaluation: no episode ended within eval.max_steps {self._config.eval.max_steps}"

    def _evaluate(self, state: TrainState) -> dict[str, Any]:
        """Statistics of the episodes; empty if none ended, or the run is about to stop."""
        config = self._config
        env = make_envs(config, threads=config.env.threads or threads_per_rank(detect()))
        try:
            if self._players is None:
                policy = make_policy(config, env.spec)
                choice = make_choice(policy, config.eval.deterministic, config.eval.seed)
                self._players = policy, choice
            policy, choice = self._players
            variables = _own_copy(state)

            def stopping() -> bool:
                return self._stop.signal is not None

            def choose(*now: Any) -> Any:
                return choice(variables, *now)

            episodes = play_in(env, policy, choose, config.eval, enough=stopping)
            was_cut = stopping() and len(episodes) < config.eval.episodes
            return {} if was_cut or not episodes else statistics(episodes)
        finally:
            env.close()

    # -- the target

    def _judge(self, value: float | None, update: int) -> None:
        target = self._config.until_return
        if target is None or value is None or value < target:
            return
        by = "evaluation" if self._config.eval.every else "training"
        self.reached = {"until_return": target, "return_mean": value, "by": by, "update": update}
        self._logger.info(
            f"the mean return of {value:.1f} (by {by}) has reached --until-return {target:g} after "
            f"update {update} of {self._config.num_updates}: finished"
        )


def whole_window(stats: EpisodeStats) -> float | None:
    """The mean return in training, once there are enough episodes to go by."""
    if len(stats.returns) < (stats.returns.maxlen or 0):
        return None
    value = stats.row()["episode/return_mean"]
    return None if value is None else float(value)


def _own_copy(state: TrainState) -> Any:
    """The model on this process's first device, whoever else holds it."""
    model = (state.params, state.obs_moments)
    host = jax.device_get(on_device(model, jax.local_devices()[0]))
    return variables_of(*jax.tree.map(jnp.asarray, host))

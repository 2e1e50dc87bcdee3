"""How long learner and actors wait for each other, and what to do about it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from spmdrl.parallel.wire import RolloutHeader

__all__ = ["Traffic", "advice"]


class Traffic:
    """How long learner and actors have waited for each other."""

    def __init__(self, actors: int, lag: int):
        self._lag = lag
        self.started = time.perf_counter()
        self.ready: list[int] = []  # rollouts that were here already when one was asked for
        self._waits: list[float] = []
        self._lags: list[int] = []
        self._idle = np.zeros(actors)  # seconds of each actor since the last row
        self._busy = np.zeros(actors)
        self._sends: list[float] = []
        self._bytes = 0
        self._all_waits, self._all_idle, self._all_busy = 0.0, 0.0, 0.0
        self._rollouts = 0

    def waited(self, seconds: float) -> None:
        self._waits.append(seconds)
        self._rollouts += 1
        if self._counts:
            self._all_waits += seconds
        else:
            self.started = time.perf_counter()

    @property
    def _counts(self) -> bool:
        """Not the first rollouts, which wait for programs to be compiled on both sides."""
        return self._rollouts > self._lag + 2

    def note(self, headers: Sequence[RolloutHeader], sizes: Sequence[int]) -> None:
        self._lags += [header.number - header.version for header in headers]
        self._sends += [header.send_s for header in headers]
        idle = np.array([header.idle_s for header in headers])
        busy = np.array([header.collect_s + header.send_s for header in headers])
        self._idle, self._busy = self._idle + idle, self._busy + busy
        if self._counts:
            self._all_idle += float(idle.sum())
            self._all_busy += float(busy.sum())
        self._bytes = sum(sizes)

    def row(self, seconds: float, ranks: Sequence[int]) -> dict[str, float]:
        if not self._waits:
            return {}
        idle = self._idle / np.maximum(self._idle + self._busy, 1e-9)
        waits = sorted(self._waits)
        row = {
            "roles/lag_mean": statistics.fmean(self._lags),
            "roles/lag_max": float(max(self._lags)),
            "roles/learner_idle": min(1.0, sum(waits) / max(seconds, 1e-9)),
            "roles/actor_idle_mean": float(idle.mean()),
            "roles/actor_idle_max": float(idle.max()),
            "roles/slowest": float(ranks[int(self._busy.argmax())]),
            "roles/ready": statistics.fmean(self.ready),
            "roles/wait_ms_p50": 1e3 * waits[len(waits) // 2],
            "roles/wait_ms_p95": 1e3 * waits[int(0.95 * len(waits))],
            "roles/send_ms_p50": 1e3 * statistics.median(self._sends),
            "roles/rollout_bytes": float(self._bytes),
        }
        self._idle, self._busy = np.zeros_like(self._idle), np.zeros_like(self._busy)
        self.ready, self._waits, self._lags, self._sends = [], [], [], []
        return row

    def advice(self) -> str:
        """One line, where one side has waited for much of the run; none after a short one."""
        if self._rollouts < FEWEST:
            return ""
        total = time.perf_counter() - self.started
        actors = self._all_idle / max(self._all_idle + self._all_busy, 1e-9)
        return advice(self._all_waits / max(total, 1e-9), actors, self._lag)


MUCH = 0.3  # of the time
FEWEST = 50  # rollouts to judge by


def advice(learner_idle: float, actor_idle: float, lag: int) -> str:
    """From the shares of the time that the learner and the actors have waited."""
    waited = f"the learner waited {learner_idle:.0%} of the time, the actors {actor_idle:.0%}"
    if lag == 0 and min(learner_idle, actor_idle) >= MUCH:
        return f"{waited}: they took turns, and with --lag 1 they would work at once"
    if learner_idle >= max(MUCH, actor_idle):
        more = 1.0 / max(1.0 - learner_idle, 0.01)
        return f"{waited}: about {more:.1f} times as many actors, on cores of their own, would do"
    if actor_idle >= MUCH:
        return f"{waited}: about {1.0 - actor_idle:.0%} of the actors would do, or more learners"
    return ""

"""Time: when something is due, how long each phase took, how fast the run is."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping

from spmdrl.config import Config, SyncConfig
from spmdrl.runtime.watchdog import Watchdog

__all__ = ["Every", "Phases", "Rate", "Row"]

Row = dict[str, float | int | None]


class Every:
    """True at every n-th step, and at the last one unless told otherwise; never for n = 0."""

    def __init__(self, n: int, last: int | None = None):
        self._n, self._last = n, last

    def __call__(self, step: int) -> bool:
        return self._n > 0 and ((step + 1) % self._n == 0 or step + 1 == self._last)


class Phases:
    """`with phases("collect"):` times the phase and tells the watchdog how long it may last."""

    def __init__(self, watchdog: Watchdog, limits: SyncConfig):
        self._watchdog, self._limits = watchdog, limits
        self._step, self.limit = 0, limits.start_timeout_s
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self.totals: dict[str, float] = collections.defaultdict(float)  # since the start

    def begin(self, step: int, compiles: bool) -> None:
        """The update that the next phases belong to; one that compiles may take longer."""
        self._step = step
        self.limit = self._limits.start_timeout_s if compiles else self._limits.phase_timeout_s

    @contextlib.contextmanager
    def __call__(self, name: str, limit: float | None = None) -> Iterator[None]:
        """`limit`: the seconds it may last, where that is not what every phase may."""
        self._watchdog.enter(name, self._step, limit or self.limit)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Also time that was measured elsewhere."""
        for name, value in seconds.items():
            self._seconds[name] += value
            self.totals[name] += value

    def read(self) -> tuple[dict[str, float], float]:
        """`({name: seconds}, seconds in all)` since the last reading."""
        now = time.perf_counter()
        seconds, total = dict(self._seconds), now - self._since
        self._seconds.clear()
        self._since = now
        return seconds, total


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
        if self._intervals == 2:
            self._smooth = sps
        elif self._intervals > 2:
            self._smooth = 0.9 * self._smooth + 0.1 * sps
        left = (self._config.num_updates - update) * self._config.batch_size
        return {
            "progress/update": update,
            "progress/steps": update * self._config.batch_size,
            "progress/eta_s": self._eta(left),
            "perf/sps": sps,
        }

    def _eta(self, left: int) -> float | None:
        """Seconds; unknown after the first interval, which holds the compilation."""
        if left and not self._smooth:
            return None
        return left / self._smooth if left else 0.0

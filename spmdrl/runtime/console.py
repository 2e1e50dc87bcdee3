"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config import Config
from spmdrl.parallel.topology import TERMINAL_MARK, detect
from spmdrl.runtime.consent import trust_words
from spmdrl.runtime.hints import suggested

__all__ = [
    "PARTS", "Console", "closing_words", "duration", "make_console", "number", "speed_words",
    "time_shares",
]  # fmt: skip

PARTS = ("env", "inference", "collect", "update", "comm", "wait", "eval", "other")


class Console(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, row: Mapping[str, Any]) -> None: ...
    def close(self, summary: Mapping[str, Any] | None) -> None: ...


def make_console(config: Config, run_dir: Path) -> Console:
    wanted = config.log.panel
    if wanted == "on" or (wanted == "auto" and on_terminal()):
        from spmdrl.runtime.panel import Panel

        return Panel(config, run_dir)
    return Lines(config)


def on_terminal() -> bool:
    """Whether a person watches; mpirun gives its ranks a terminal even when nobody does."""
    told = os.environ.get(TERMINAL_MARK)
    if told is not None:
        return told == "1"
    return sys.stdout.isatty() and detect().size == 1


def closing_words(run_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """Where the results are and what can be done with them, as commands to copy."""
    result = summary["episode_return_mean"]
    shown = "no episode has ended"
    if result is not None:
        shown = f"mean return {result:.1f} over the last episodes"
    if "eval_return_mean" in summary:
        shown += f", {summary['eval_return_mean']:.1f} in the last evaluation"
    return [
        f"{summary['env_steps']:,} steps in {summary['wall_s']:.1f} s "
        f"({summary['sps']:,.0f} steps/s), {shown}",
        f"results   {run_dir}",
        f"evaluate  {suggested('evaluate', run_dir, *trust_words(run_dir))}",
        f"plot      {suggested('plot', run_dir)}",
        f"resume    {summary['command']}",
    ]


def time_shares(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Where the time went, largest parts of the whole; env and inference are parts of collect."""
    seconds = {name: float(row.get(f"time/{name}") or 0.0) for name in PARTS}
    if seconds["env"] + seconds["inference"] > 0:
        seconds["collect"] = max(0.0, seconds["collect"] - seconds["env"] - seconds["inference"])
    total = sum(seconds.values()) or 1.0
    return [(name, value / total) for name, value in seconds.items() if value / total >= 0.005]


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def speed_words(row: Mapping[str, Any]) -> str:
    """The first update compiles, so its speed says nothing about the rest."""
    if row["progress/eta_s"] is None:
        return "first update, with its compilation"
    return f"{row['perf/sps']:,.0f} steps/s, {duration(row['progress/eta_s'])} left"


def number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


class Lines:
    """A line every few seconds, for log files and batch systems."""

    INTERVAL = 5.0

    def __init__(self, config: Config):
        self._total = config.num_updates
        self._next = 0.0
        self._evaluated = ""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, row: Mapping[str, Any]) -> None:
        update = row["progress/update"]
        now = time.monotonic()
        if row.get("eval/return_mean") is not None:
            self._evaluated = f"evaluated {number(row['eval/return_mean'])}  "
        if now < self._next and update < self._total:
            return
        self._next = now + self.INTERVAL
        shares = " ".join(f"{name} {share:.0%}" for name, share in time_shares(row))
        print(
            f"update {update}/{self._total}  steps {row['progress/steps']:,}  "
            f"return {number(row['episode/return_mean'])}  {self._evaluated}"
            f"{speed_words(row)}  [{shares}]",
            flush=True,
        )

    def close(self, summary: Mapping[str, Any] | None) -> None:
        for line in closing_words(Path(summary["run_dir"]), summary) if summary else []:
            print(line, flush=True)

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

__all__ = ["Console", "make_console"]

SPARK = "▁▂▃▄▅▆▇█"
PARTS = ("env", "inference", "collect", "update", "comm", "wait", "other")


class Console(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, row: Mapping[str, Any]) -> None: ...
    def close(self, summary: Mapping[str, Any] | None) -> None: ...


def make_console(config: Config, run_dir: Path) -> Console:
    wanted = config.log.panel
    if wanted == "on" or (wanted == "auto" and on_terminal()):
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


def number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


class Lines:
    """A line every few seconds, for log files and batch systems."""

    INTERVAL = 5.0

    def __init__(self, config: Config):
        self._total = config.num_updates
        self._next = 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, row: Mapping[str, Any]) -> None:
        update = row["progress/update"]
        now = time.monotonic()
        if now < self._next and update < self._total:
            return
        self._next = now + self.INTERVAL
        shares = " ".join(f"{name} {share:.0%}" for name, share in time_shares(row))
        print(
            f"update {update}/{self._total}  steps {row['progress/steps']:,}  "
            f"return {number(row['episode/return_mean'])}  "
            f"{row['perf/sps']:,.0f} steps/s  left {duration(row['progress/eta_s'])}  [{shares}]",
            flush=True,
        )

    def close(self, summary: Mapping[str, Any] | None) -> None:
        for line in closing_words(Path(summary["run_dir"]), summary) if summary else []:
            print(line, flush=True)


class Panel:
    """A live panel that redraws itself in place."""

    def __init__(self, config: Config, run_dir: Path):
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._config, self._dir = config, run_dir
        self._returns: list[float] = []
        self._console = RichConsole()
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def show(self, row: Mapping[str, Any]) -> None:
        value = row["episode/return_mean"]
        if value is not None:
            self._returns.append(value)
        self._live.update(self.render(row))

    def render(self, row: Mapping[str, Any]) -> Any:
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done, total = row["progress/update"], self._config.num_updates
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        grid.add_row("progress", ProgressBar(total=total, completed=done, width=40))
        grid.add_row(
            "",
            f"{row['progress/steps']:,} steps, update {done}/{total}, "
            f"{duration(row['progress/eta_s'])} left",
        )
        best = f"  (best {max(self._returns):.1f})" if self._returns else ""
        grid.add_row(
            "return", f"[bold green]{number(row['episode/return_mean'])}[/]{best}  {self._spark()}"
        )
        grid.add_row(
            "episodes",
            f"{row['episode/count']:,}, length {number(row['episode/length_mean'], '.0f')}",
        )
        grid.add_row("speed", f"{row['perf/sps']:,.0f} steps/s")
        bar, words = _time_bar(row)
        grid.add_row("time", bar)
        grid.add_row("", words)
        shown = [*self._config.algo.panel, ("optim/lr", "learning rate", ".1e")]
        words = [f"{label} {number(row.get(name), form)}" for name, label, form in shown]
        for start in range(0, len(words), 3):
            grid.add_row("" if start else "learning", "  ".join(words[start : start + 3]))
        title = f"[bold]spmdrl[/] {self._config.env.id}  seed {self._config.seed}"
        return Box(grid, title=title, subtitle=str(self._dir), expand=False, padding=(1, 2))

    def _spark(self, width: int = 32) -> str:
        """The return so far, drawn in one line."""
        values = self._returns
        if len(values) < 2:
            return ""
        picks = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
        low, high = min(picks), max(picks)
        span = (high - low) or 1.0
        return "".join(SPARK[int((v - low) / span * (len(SPARK) - 1))] for v in picks)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        self._live.stop()
        for line in closing_words(Path(summary["run_dir"]), summary) if summary else []:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


COLORS = ("cyan", "blue", "magenta", "yellow", "red", "green", "white")


def _time_bar(row: Mapping[str, Any], width: int = 40) -> tuple[Any, Any]:
    """A bar of the parts and their names; apart, so that both fit a terminal of 80 columns."""
    from rich.text import Text

    bar, words = Text(), Text()
    for name, share in time_shares(row):
        color = COLORS[PARTS.index(name)]
        bar.append("█" * max(1, round(share * width)), style=color)
        words.append(f"{name} {share:.0%}  ", style=color)
    return bar, words

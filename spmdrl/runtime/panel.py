"""The live panel of a run, as wide as the terminal and, where there is room, with a chart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmdrl.config import Config
from spmdrl.runtime.console import PARTS, closing_words, number, speed_words, time_shares
from spmdrl.runtime.signals import StopRequest

__all__ = ["Panel"]

BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = ("cyan", "blue", "magenta", "yellow", "red", "green", "bright_magenta", "white")
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 18  # columns for the border, the space inside it and the names
LOWEST_CHART, HIGHEST_CHART = 8, 16  # lines


class Starting:
    """What is seen until the first update is done. It moves, so that nobody takes it for a hang."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def __rich__(self) -> Text:
        waited = time.monotonic() - self._since
        mark = SPINNER[int(8 * waited) % len(SPINNER)]
        return Text(f"{mark} making environments, compiling the first update ({waited:.0f} s)")


class Panel:
    """A live panel that redraws itself in place."""

    def __init__(self, config: Config, run_dir: Path):
        self._config, self._dir = config, run_dir
        self._returns: list[float] = []
        self._evaluated = ""
        self._console = RichConsole()
        self._live = Live(
            _whole(Starting()), console=self._console, refresh_per_second=8, transient=False
        )
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, row: Mapping[str, Any]) -> None:
        value = row["episode/return_mean"]
        if value is not None:
            self._returns.append(value)
        if row.get("eval/return_mean") is not None:
            self._evaluated = evaluated_words(row)
        self._live.update(_whole(self.render(row)))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        self._live.stop()
        for line in closing_words(Path(summary["run_dir"]), summary) if summary else []:
            self.say(line)

    # -- drawing

    def render(self, row: Mapping[str, Any]) -> Box:
        width, height = self._console.size
        inner = max(20, width - FRAME)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, width=10)
        grid.add_column(width=inner)
        lines = self._lines(row, inner)
        for name, shown in lines:
            grid.add_row(name, shown)
        room = height - len(lines) - 8  # for the border, space, and what was said above
        if room >= LOWEST_CHART and len(self._returns) > 1:
            grid.add_row("", "")
            grid.add_row("", chart(self._returns, inner, min(room, HIGHEST_CHART)))
        title = f"[bold]spmdrl[/] {self._config.env.id}  seed {self._config.seed}"
        return Box(grid, title=title, subtitle=str(self._dir), width=width, padding=(1, 2))

    def _lines(self, row: Mapping[str, Any], inner: int) -> list[tuple[str, Any]]:
        done, total = row["progress/update"], self._config.num_updates
        bar, parts = _time_bar(row, inner)
        lines: list[tuple[str, Any]] = [
            ("progress", ProgressBar(total=total, completed=done, width=inner)),
            ("", f"{row['progress/steps']:,} steps, update {done}/{total}"),
            ("speed", speed_words(row)),
            ("return", self._return_line(row, inner)),
        ]
        if self._config.eval.every:
            lines.append(("evaluation", self._evaluated or "–"))
        length = number(row["episode/length_mean"], ".0f")
        lines.append(("episodes", f"{row['episode/count']:,}, length {length}"))
        lines += [("time", bar), *(("", words) for words in parts)]
        metrics = [*self._config.algo.panel, ("optim/lr", "learning rate", ".1e")]
        words = [f"{label} {number(row.get(name), form)}" for name, label, form in metrics]
        packed = pack([Text(word) for word in words], inner)
        return lines + [("" if i else "learning", text) for i, text in enumerate(packed)]

    def _return_line(self, row: Mapping[str, Any], inner: int) -> Text:
        """The newest, the best, and all of them so far in the rest of the line."""
        text = Text(number(row["episode/return_mean"]), style="bold green")
        if self._returns:
            text.append(f"  (best {max(self._returns):.1f})  ", style="not bold default")
            text.append(spark(self._returns, inner - len(text)), style="not bold default")
        return text


class Footer:
    """Whether somebody has asked the run to stop; the update under way may take a while."""

    def __rich__(self) -> Text:
        heard = StopRequest.heard
        if heard is None or heard.signal is None:
            return Text()
        return Text(f"{heard.signal}: stopping after this update, with a checkpoint", "bold yellow")


def _whole(shown: Any) -> Group:
    """With an empty last line: mpirun holds back a line of its ranks until it is complete."""
    return Group(shown, Footer(), Text())


def evaluated_words(row: Mapping[str, Any]) -> str:
    std = row.get("eval/return_std")
    deviation = "" if std is None else f" ± {std:.1f}"
    return f"{row['eval/return_mean']:.1f}{deviation} at update {row['progress/update']}"


def pack(words: Sequence[Text], width: int) -> list[Text]:
    """As many in each line as there is room for."""
    lines: list[Text] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1].append("  ").append_text(word)
        else:
            lines.append(word.copy())
    return lines


def stretched(values: Sequence[float], width: int) -> list[float]:
    """As many values as there are columns, from the first to the last."""
    if width < 2 or len(values) < 2:
        return []
    return [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]


def spark(values: Sequence[float], width: int) -> str:
    """All values in one line."""
    picks = stretched(values, width)
    if not picks:
        return ""
    low, span = min(picks), (max(picks) - min(picks)) or 1.0
    return "".join(BLOCKS[int((v - low) / span * (len(BLOCKS) - 1))] for v in picks)


def chart(values: Sequence[float], width: int, height: int) -> Text:
    """The same over several lines, with the highest and the lowest value beside them."""
    low, high = min(values), max(values)
    names = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, names)) + 1
    span = (high - low) or 1.0
    levels = [round((v - low) / span * (8 * height - 1)) for v in stretched(values, width - margin)]
    text = Text(no_wrap=True)
    for line in range(height):
        floor = 8 * (height - 1 - line)
        cells = [" " if n < floor else BLOCKS[min(n - floor, 7)] for n in levels]
        text.append(f"{names[line]:>{margin - 1}} ", style="dim")
        text.append("".join(cells) + ("\n" if line < height - 1 else ""), style="green")
    return text


def _time_bar(row: Mapping[str, Any], width: int) -> tuple[Text, list[Text]]:
    """A bar of the parts, and their names."""
    bar, words = Text(no_wrap=True), []
    for name, share in time_shares(row):
        color = COLORS[PARTS.index(name)]
        bar.append("█" * max(1, round(share * width)), style=color)
        words.append(Text(f"{name} {share:.0%}", style=color))
    bar.truncate(width)
    return bar, pack(words, width)

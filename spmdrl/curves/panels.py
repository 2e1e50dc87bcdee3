"""Which metrics are shown, and their curves put together: what picture and page both draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from spmdrl.config import Config, ConfigError, suggest
from spmdrl.curves.groups import Group, Run
from spmdrl.curves.statistics import Center, Curve, Interval, Series, combine, interval, smoothed

__all__ = [
    "RETURN", "SPEED", "XAXIS", "Panel", "PanelData", "Style", "elapsed", "final", "final_values",
    "make_panels", "named_panels", "panels_of",
]  # fmt: skip

Panel = tuple[str, str]  # a metric, and the title above its curve

RETURN, SPEED = "episode/return_mean", "perf/sps"
# Of every run; a panel without a number in any run is left out.
FIRST: tuple[Panel, ...] = (
    (RETURN, "return (mean of the last episodes)"),
    ("eval/return_mean", "return in evaluation"),
    ("loss/value", "value loss"),
    ("loss/policy", "policy loss"),
    ("loss/nll", "negative log likelihood"),
)
LAST: tuple[Panel, ...] = (("loss/entropy", "entropy"), (SPEED, "steps per second"))
TITLES = dict((*FIRST, *LAST))
XAXIS = {"steps": "environment steps", "time": "seconds of training"}
END = 0.1  # share of a run over which its final value is taken


class Style(NamedTuple):
    """How curves are put together."""

    x: Literal["steps", "time"] = "steps"
    smooth: int = 1
    center: Center = "mean"


class PanelData(NamedTuple):
    metric: str
    title: str
    series: list[tuple[str, int, Series]]
    """Label, number of the group (which is its colour) and curve."""


# ---------------------------------------------------------------------------------------------
# Which


def panels_of(*configs: Config) -> list[Panel]:
    """What all algorithms report, and between it what those of these runs want to be shown."""
    own = [panel for config in configs for panel in getattr(type(config.algo), "plots", ())]
    return [*FIRST, *own, *LAST]


def named_panels(names: Sequence[str], runs: Sequence[Run]) -> list[Panel]:
    """The panels that the user asked for by the metrics' names."""
    known = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    titles = TITLES | dict(panels_of(*(run.config for run in runs)))
    for name in names:
        if name not in known:
            hint = suggest(name, known) or f"; there are: {', '.join(known)}"
            raise ConfigError(f"--metrics: none of these runs has {name}{hint}")
    return [(name, titles.get(name, name)) for name in names]


# ---------------------------------------------------------------------------------------------
# Curves


def make_panels(groups: Sequence[Group], panels: Iterable[Panel], style: Style) -> list[PanelData]:
    """Each panel once, in their order, without those for which no run has a number."""
    made = [_panel(groups, panel, style) for panel in dict.fromkeys(panels)]
    found = [panel for panel in made if panel.series]
    if not found:
        raise ConfigError("none of these runs has a number to plot yet")
    return found


def _panel(groups: Sequence[Group], panel: Panel, style: Style) -> PanelData:
    metric, title = panel
    series = []
    for number, group in enumerate(groups):
        curves = [curve_of(run, metric, style) for run in group.runs]
        curves = [smoothed(curve, style.smooth) for curve in curves if len(curve.x)]
        if curves:
            series.append((group.label, number, combine(curves, style.center)))
    return PanelData(metric, title, series)


def curve_of(run: Run, metric: str, style: Style) -> Curve:
    """Without the rows that have no number for it."""
    x = elapsed(run) if style.x == "time" else np.array([_steps(row) for row in run.rows])
    y = np.array([_number(row.get(metric)) for row in run.rows])
    there = np.isfinite(y)
    return Curve(x[there], y[there])


def elapsed(run: Run) -> np.ndarray:
    """Seconds of training at each row; the time between a stop and its resumption is not in it."""
    steps = np.array([_steps(row) for row in run.rows])
    rates = np.array([_number(row.get(SPEED)) for row in run.rows])
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.diff(steps, prepend=0.0) / rates
    return np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0))


def final(group: Group, metric: str, center: Center = "mean") -> Interval | None:
    """The value over the last tenth of each run's steps, put together over the runs."""
    ends = final_values(group, metric)
    return interval(ends, center) if ends else None


def final_values(group: Group, metric: str) -> list[float]:
    """Of each run that has any."""
    curves = [curve_of(run, metric, Style()) for run in group.runs]
    return [float(c.y[c.x >= (1 - END) * c.x[-1]].mean()) for c in curves if len(c.x)]


def _steps(row: dict[str, float | int | None]) -> float:
    return float(row.get("progress/steps") or 0)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")

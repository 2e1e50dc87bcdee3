"""A panel as SVG: axes, bands and lines. It is whole without a script; `page.js` adds the hover."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spmdrl.curves.panels import SPEED, XAXIS, PanelData, Style

__all__ = ["draw_panel", "legend", "number", "ticks"]

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 40


class Scale(NamedTuple):
    """From values to the place on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def draw_panel(panel: PanelData, style: Style) -> str:
    """A figure of HTML with its numbers beside it, for the hover."""
    x, y = _scales(panel)
    parts = [_axes(x, y, XAXIS[style.x])]
    parts += [_series(series, color, x, y) for _, color, series in panel.series]
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(panel.title)}">'
        f"{''.join(parts)}</svg>"
    )
    return (
        f'<figure class="panel"><figcaption>{html.escape(panel.title)}</figcaption>{drawing}'
        f'<script type="application/json">{_data(panel, x, y)}</script></figure>'
    )


def _scales(panel: PanelData) -> tuple[Scale, Scale]:
    xs = np.concatenate([s.x for _, _, s in panel.series])
    bands = [v for _, _, s in panel.series for v in (s.center, s.low, s.high) if v is not None]
    ys = np.concatenate(bands)
    low, high = float(ys.min()), float(ys.max())
    low = min(low, 0.0) if panel.metric == SPEED else low
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    bottom = low if panel.metric == SPEED and low == 0 else low - margin
    end = float(xs.max()) if xs.max() > xs.min() else float(xs.min()) + 1.0
    return (
        Scale(min(0.0, float(xs.min())), end, LEFT, WIDTH - RIGHT),
        Scale(bottom, high + margin, HEIGHT - BOTTOM, TOP),
    )


def _axes(x: Scale, y: Scale, name: str) -> str:
    parts = []
    for value in ticks(y.low, y.high):
        at = f"{y(value):.1f}"
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{at}" dy="0.32em" text-anchor="end">'
            f"{number(value)}</text>"
        )
    for value in ticks(x.low, x.high):
        at = f"{x(value):.1f}"
        parts.append(
            f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="tick" x="{at}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{number(value)}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{name}</text>'
    )
    return "".join(parts)


def _series(series: Any, color: int, x: Scale, y: Scale) -> str:
    drawn = ""
    if series.low is not None:
        there = _points(series.x, series.low, x, y)
        back = _points(series.x[::-1], series.high[::-1], x, y)
        drawn = f'<polygon class="band c{color % 7}" points="{there} {back}"/>'
    line = _points(series.x, series.center, x, y)
    if len(series.x) == 1:
        return f'{drawn}<polyline class="line dot c{color % 7}" points="{line} {line}"/>'
    return f'{drawn}<polyline class="line c{color % 7}" points="{line}"/>'


def _points(xs: np.ndarray, ys: np.ndarray, x: Scale, y: Scale) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))


def _data(panel: PanelData, x: Scale, y: Scale) -> str:
    """What the script needs to find the values under the pointer."""
    series = [
        {
            "label": label,
            "color": color % 7,
            "x": _rounded(s.x),
            "y": _rounded(s.center),
            "low": None if s.low is None else _rounded(s.low),
            "high": None if s.high is None else _rounded(s.high),
        }
        for label, color, s in panel.series
    ]
    data = {"x": list(x), "y": list(y), "top": TOP, "bottom": HEIGHT - BOTTOM, "series": series}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between the two, about as many as wanted."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(f for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 1.5M, 20k, 0.05."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{0.0 if abs(value) < 1e-12 else value:.3g}"


def legend(labels: Sequence[str]) -> str:
    """Each group with its colour."""
    items = (
        f'<li><span class="key c{n % 7}"></span>{html.escape(label)}</li>'
        for n, label in enumerate(labels)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'

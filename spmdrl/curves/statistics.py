"""From the curves of several seeds to one curve with a band.

The band is the 95 % percentile interval of the centre under resampling of the seeds (bootstrap). It
says how well these seeds determine the centre, not how far single runs lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

__all__ = [
    "CENTERS", "Center", "Curve", "Interval", "Series", "combine", "difference", "interval",
    "smoothed",
]  # fmt: skip

Center = Literal["mean", "iqm", "median"]

MAX_POINTS = 500  # more than a picture can show
RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)


class Curve(NamedTuple):
    """A metric of one run; x rises."""

    x: np.ndarray
    y: np.ndarray


class Series(NamedTuple):
    """A metric of a group; no band for a single run."""

    x: np.ndarray
    center: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


class Interval(NamedTuple):
    center: float
    low: float | None
    high: float | None


def _iqm(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half: the lowest and the highest quarter, rounded down, are left out."""
    cut = len(values) // 4
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


CENTERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda values: values.mean(axis=0),
    "iqm": _iqm,
    "median": lambda values: np.median(values, axis=0),
}


def smoothed(curve: Curve, rows: int) -> Curve:
    """Mean over about `rows` neighbours, as many before as after; fewer at the ends."""
    half = (rows - 1) // 2
    if half < 1 or len(curve.y) < 2:
        return curve
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    index = np.arange(len(curve.y))
    # The same reach on both sides: a longer one to one side would move the ends of a slope.
    reach = np.minimum(np.minimum(index, index[::-1]), half)
    first, last = index - reach, index + reach + 1
    return Curve(curve.x, (sums[last] - sums[first]) / (last - first))


def combine(curves: Sequence[Curve], center: Center = "mean") -> Series:
    """The centre of the curves over the span that all of them cover, with its band."""
    if len(curves) == 1:
        return Series(*_thinned(curves[0]), None, None)
    x = _common_x(curves)
    values = np.stack([np.interp(x, *curve) for curve in curves])
    low, high = _bootstrap(values, center)
    return Series(x, CENTERS[center](values), low, high)


def interval(values: Sequence[float], center: Center = "mean") -> Interval:
    """One number of each run put together."""
    column = np.asarray(values, float)[:, None]
    middle = float(CENTERS[center](column)[0])
    if len(values) == 1:
        return Interval(middle, None, None)
    low, high = _bootstrap(column, center)
    return Interval(middle, float(low[0]), float(high[0]))


def difference(
    values: Sequence[float], others: Sequence[float], center: Center = "mean"
) -> Interval:
    """How much more `values` are than `others`, which are resampled apart from them."""
    groups = [np.asarray(group, float)[:, None] for group in (values, others)]
    middles = [float(CENTERS[center](group)[0]) for group in groups]
    if min(map(len, groups)) == 1:
        return Interval(middles[0] - middles[1], None, None)
    rng = np.random.default_rng(0)
    drawn = [_resampled(group, center, rng)[:, 0] for group in groups]
    low, high = np.percentile(drawn[0] - drawn[1], PERCENTILES)
    return Interval(middles[0] - middles[1], float(low), float(high))


def _bootstrap(values: np.ndarray, center: Center) -> tuple[np.ndarray, np.ndarray]:
    """Interval of the centre over the first axis; the same numbers at every call."""
    centers = _resampled(values, center, np.random.default_rng(0))
    low, high = np.percentile(centers, PERCENTILES, axis=0)
    return low, high


def _resampled(values: np.ndarray, center: Center, rng: np.random.Generator) -> np.ndarray:
    """The centre of each of many samples of as many runs, with replacement."""
    draws = rng.integers(len(values), size=(RESAMPLES, len(values)))
    return np.stack([CENTERS[center](values[draw]) for draw in draws])


def _common_x(curves: Sequence[Curve]) -> np.ndarray:
    """The curves' own points where they agree on them, else evenly spaced ones."""
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    if last < first:  # no two of them meet: the end of the earliest is all there is
        return np.array([last])
    inside = [c.x[(c.x >= first) & (c.x <= last)] for c in curves]
    if all(np.array_equal(inside[0], other) for other in inside[1:]):
        return inside[0][_few(len(inside[0]))]
    return np.linspace(first, last, min(MAX_POINTS, max(map(len, inside))))


def _thinned(curve: Curve) -> Curve:
    kept = _few(len(curve.x))
    return Curve(curve.x[kept], curve.y[kept])


def _few(count: int) -> np.ndarray:
    """Indices of at most MAX_POINTS of so many points, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).round().astype(int))

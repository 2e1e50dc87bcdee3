"""Results of groups in words, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmdrl.curves.groups import Group
from spmdrl.curves.panels import final, final_values
from spmdrl.curves.statistics import Center, Interval, difference

__all__ = ["shown", "told"]


def told(groups: Sequence[Group], metric: str, center: Center = "mean") -> Iterator[str]:
    """Each group's value at the end, and the difference if there are two."""
    ends = [(group, final(group, metric, center)) for group in groups]
    width = max(len(group.label) for group in groups)
    yield f"{metric} over the last tenth of the steps"
    for group, end in ends:
        yield f"  {group.label:<{width}}  {'–' if end is None else shown(end)}"
    if len(groups) == 2 and all(end for _, end in ends):
        first, second = (final_values(group, metric) for group in groups)
        less = shown(difference(second, first, center))
        yield f"  {'second less first':<{width}}  {less}"


def shown(value: Interval) -> str:
    if value.low is None:
        return f"{value.center:.4g}"
    return f"{value.center:.4g}, 95 % interval {value.low:.4g} to {value.high:.4g}"

"""Panels as a picture file, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.curves.panels import SPEED, XAXIS, PanelData, Style

__all__ = ["COLORS", "write_picture"]

COLUMNS = 3
# Wong's palette, which people who see few colours can tell apart, without its yellow.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")


def write_picture(panels: Sequence[PanelData], style: Style, out: str) -> None:
    """The ending of `out` chooses the format."""
    import matplotlib  # slow to load: not before there is something to draw

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    fig, axes = plt.subplots(
        rows, columns, figsize=(max(7.0, 4.7 * columns), 3.5 * rows + 0.3), squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, style)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    handles = _handles(axes.flat)
    fig.legend(
        list(handles.values()), list(handles), loc="outside lower center",
        ncols=2 if max(map(len, handles)) > 40 else 3, fontsize=9,
    )  # fmt: skip
    try:
        fig.savefig(out, dpi=110)
    except ValueError as error:  # an ending that is no format
        raise ConfigError(f"--out {out}: {error}, html") from error
    finally:
        plt.close(fig)


def _handles(axes: Iterable[Any]) -> dict[str, Any]:
    """Each group once: not all of them need to be in the first panel."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def _draw_panel(axis: Any, panel: PanelData, style: Style) -> None:
    for label, number, series in panel.series:
        color = COLORS[number % len(COLORS)]
        dash = ("-", "--", ":")[number // len(COLORS) % 3]
        axis.plot(series.x, series.center, dash, color=color, linewidth=1.3, label=label)
        if series.low is not None:
            axis.fill_between(series.x, series.low, series.high, color=color, alpha=0.2, lw=0)
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel(XAXIS[style.x])
    axis.grid(alpha=0.3)
    if panel.metric == SPEED:
        axis.set_ylim(bottom=0)

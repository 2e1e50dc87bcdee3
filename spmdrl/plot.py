"""Learning curves of runs as a picture or a page: `python -m spmdrl.plot RUN_DIR ...`.

Runs that differ by nothing but their seed are one curve with a band.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import ConfigError
from spmdrl.curves.groups import Group, group_runs, notes, read_runs
from spmdrl.curves.output import place_for
from spmdrl.curves.page import curves_section, document
from spmdrl.curves.panels import (
    Panel,
    PanelData,
    Style,
    make_panels,
    named_panels,
    panels_of,
)
from spmdrl.curves.picture import write_picture
from spmdrl.curves.words import told
from spmdrl.options import check_positive, parse
from spmdrl.runtime.files import replace_text
from spmdrl.runtime.hints import suggested

__all__ = ["draw", "main", "panels_of"]

DEFAULT_OUT = "curves.png"
PAGES = (".html", ".htm")


@dataclass(frozen=True)
class Options:
    """Plot return, losses and speed over environment steps.

    Runs that differ only by their seed are drawn as one line, their mean, with a band: the 95 %
    bootstrap interval of that mean. Different configs get different colours, and the legend says
    in which fields they differ. Also prints the value of each group over the last tenth of its
    steps, and the difference between two groups.
    """

    run_dirs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")
    ]
    """Run directories; a folder that holds runs stands for all of them."""
    out: str | None = None
    """Where it goes; the ending chooses the format (png, svg, pdf, or html with values under the
    pointer). By default curves.png, or the next free number."""
    overwrite: bool = False
    """Replace a file that is there."""
    metrics: tuple[str, ...] = ()
    """Metrics to show instead of the usual ones, for example episode/return_mean optim/lr."""
    x: Literal["steps", "time"] = "steps"
    """What is to the right: environment steps, or seconds of training."""
    smooth: int = 1
    """Rows of metrics over which each run is averaged before runs are put together."""
    center: Literal["mean", "iqm", "median"] = "mean"
    """How seeds are put together; iqm is the mean of the middle half."""
    each: bool = False
    """Draw every run by itself, without bands."""


def draw(
    run_dirs: Sequence[str],
    out: str,
    panels: Sequence[Panel] | None = None,
    style: Style | None = None,
    each: bool = False,
) -> None:
    """Write the picture or page; `panels` are by default those of the runs' algorithms."""
    style, groups = style or Style(), group_runs(read_runs(run_dirs), each)
    write(made(groups, panels, style), groups, style, out)


def made(groups: Sequence[Group], panels: Sequence[Panel] | None, style: Style) -> list[PanelData]:
    configs = [run.config for group in groups for run in group.runs]
    return make_panels(groups, panels_of(*configs) if panels is None else panels, style)


def write(panels: Sequence[PanelData], groups: Sequence[Group], style: Style, out: str) -> None:
    if Path(out).suffix.lower() in PAGES:
        labels = [group.label for group in groups]
        title = ", ".join(dict.fromkeys(g.runs[0].config.env.id for g in groups))
        content = curves_section(panels, labels, style)
        replace_text(Path(out), document(title, explained(groups, style), [content]))
    else:
        write_picture(panels, style, out)


def explained(groups: Sequence[Group], style: Style) -> str:
    """What lines and bands are."""
    words = []
    if any(len(group.runs) > 1 for group in groups):
        words.append(f"lines: {style.center} of the seeds; bands: its 95 % bootstrap interval")
    if style.smooth > 1:
        words.append(f"each run smoothed over {style.smooth} rows")
    return "; ".join(words)


@answer_errors(os_errors=True)
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, "plot", argv)
    check_positive(options, "smooth")
    if not options.run_dirs:
        raise ConfigError(f"no run directory given; for example: {suggested('plot', 'runs/NAME')}")
    runs = read_runs(options.run_dirs)
    wanted = named_panels(options.metrics, runs) if options.metrics else None
    style, groups = Style(options.x, options.smooth, options.center), group_runs(runs, options.each)
    panels = made(groups, wanted, style)
    out = place_for(options.out, DEFAULT_OUT, options.overwrite)
    write(panels, groups, style, out)
    for line in (*told(groups, panels[0].metric, style.center), *notes(groups)):
        print(line)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

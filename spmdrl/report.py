"""All about a run, or a group of them, on one page: `python -m spmdrl.report RUN_DIR ...`.

The page needs no other file and no network: it can be mailed, or kept beside the run.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import ConfigError
from spmdrl.curves.groups import group_runs, notes, read_runs
from spmdrl.curves.output import place_for
from spmdrl.curves.page import curves_section, document, section
from spmdrl.curves.panels import Style, make_panels, panels_of
from spmdrl.curves.sections import (
    config_section,
    evaluation_section,
    log_section,
    results_section,
    time_section,
    video_section,
)
from spmdrl.options import check_positive, parse
from spmdrl.runtime.files import replace_text
from spmdrl.runtime.hints import suggested

__all__ = ["main", "write_report"]

DEFAULT_OUT = "report.html"


@dataclass(frozen=True)
class Options:
    """Write one self-contained HTML page about one or more runs.

    Results, learning curves with the values under the pointer, where the time went, in which fields
    the configs differ, evaluations and videos. Runs that differ only by their seed are one curve
    with a band, as for `spmdrl.plot`.
    """

    run_dirs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")
    ]
    """Run directories; a folder that holds runs stands for all of them."""
    out: str | None = None
    """Where the page goes. By default report.html in the folder that was named, or in this one if
    there are several; then the next free number."""
    overwrite: bool = False
    """Replace a file that is there."""
    smooth: int = 1
    """Rows of metrics over which each run is averaged before runs are put together."""


def write_report(run_dirs: Sequence[str], out: str, style: Style | None = None) -> None:
    runs, style = read_runs(run_dirs), style or Style()
    groups = group_runs(runs)
    panels = make_panels(groups, panels_of(*(run.config for run in runs)), style)
    remarks = "".join(f"<p>{html.escape(note)}</p>" for note in notes(groups))
    curves = remarks + curves_section(panels, [group.label for group in groups], style)
    parts = [
        section("Results", results_section(groups)),
        section("Curves", curves),
        section("Where the time went", time_section(groups)),
        section("Config", config_section(groups)),
        section("Evaluation", evaluation_section(runs)),
        section("Video", video_section(runs)),
        section("Log", log_section(runs)),
    ]
    title = ", ".join(dict.fromkeys(run.config.env.id for run in runs))
    subtitle = f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {', '.join(run_dirs)}"
    replace_text(Path(out), document(title, subtitle, parts))


def default_place(run_dirs: Sequence[str]) -> str:
    return str(Path(run_dirs[0]) / DEFAULT_OUT) if len(run_dirs) == 1 else DEFAULT_OUT


@answer_errors(os_errors=True)
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, "report", argv)
    check_positive(options, "smooth")
    if not options.run_dirs:
        example = suggested("report", "runs/NAME")
        raise ConfigError(f"no run directory given; for example: {example}")
    read_runs(options.run_dirs[:1])  # before a place inside of it is looked for
    out = place_for(options.out, default_place(options.run_dirs), options.overwrite)
    write_report(options.run_dirs, out, Style(smooth=options.smooth))
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

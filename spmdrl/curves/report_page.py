"""The page of `spmdrl.report`, from the parts of `sections`."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from spmdrl.curves.groups import group_runs, notes, read_runs
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
from spmdrl.runtime.files import replace_text

__all__ = ["write_report"]


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

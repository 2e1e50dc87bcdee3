"""All about a run, or a group of them, on one page: `python -m spmdrl.report RUN_DIR ...`.

The page needs no other file and no network: it can be mailed, or kept beside the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import ConfigError
from spmdrl.curves.groups import read_runs
from spmdrl.curves.output import place_for
from spmdrl.curves.panels import Style
from spmdrl.curves.report_page import write_report
from spmdrl.options import check_positive, parse
from spmdrl.runtime.hints import suggested

__all__ = ["main"]

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

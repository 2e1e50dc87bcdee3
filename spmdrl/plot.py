"""Learning curves of one or more runs as a picture: `python -m spmdrl.plot RUN_DIR ...`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError
from spmdrl.options import parse
from spmdrl.runtime.files import Row, read_metrics
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.rundir import read_run

__all__ = ["draw", "main", "panels_of"]

Panel = tuple[str, str]  # a metric, and the title above its curve

SPEED = "perf/sps"
# Of every run; a panel without a number in any run is left out.
FIRST: tuple[Panel, ...] = (
    ("episode/return_mean", "return (mean of the last episodes)"),
    ("loss/value", "value loss"),
    ("loss/policy", "policy loss"),
    ("loss/nll", "negative log likelihood"),
)
LAST: tuple[Panel, ...] = (("loss/entropy", "entropy"), (SPEED, "steps per second"))
COLUMNS = 3


@dataclass(frozen=True)
class Options:
    """Plot return, losses and speed over environment steps."""

    run_dirs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]")
    ]
    """Run directories; the curves of several lie over each other in one picture."""
    out: str = "curves.png"
    """Where the picture goes; the ending chooses the format."""


class Run(NamedTuple):
    label: str
    config: Config
    rows: list[Row]


def read(run_dir: str) -> Run:
    config = read_run(run_dir)
    label = f"{config.env.id}, seed {config.seed} ({Path(run_dir).name})"
    return Run(label, config, read_metrics(run_dir))


def panels_of(*configs: Config) -> list[Panel]:
    """What all algorithms report, and between it what those of these runs want to be shown."""
    own = [panel for config in configs for panel in getattr(type(config.algo), "plots", ())]
    return [*FIRST, *own, *LAST]


def panels_with_numbers(runs: Sequence[Run], panels: Iterable[Panel]) -> list[Panel]:
    """Each once, in their order, without those for which no run has a number."""
    found = [
        (name, title)
        for name, title in dict.fromkeys(panels)
        if any(row.get(name) is not None for run in runs for row in run.rows)
    ]
    if not found:
        raise ConfigError("none of these runs has a number to plot yet")
    return found


def draw(run_dirs: Sequence[str], out: str, panels: Sequence[Panel] | None = None) -> None:
    """Write the picture; `panels` are by default those of the runs' algorithms."""
    runs = [read(run_dir) for run_dir in run_dirs]
    wanted = panels_of(*(run.config for run in runs)) if panels is None else panels
    shown = panels_with_numbers(runs, wanted)
    import matplotlib  # slow to load: not before the runs are known to be there

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(shown) // COLUMNS)
    fig, axes = plt.subplots(
        rows, COLUMNS, figsize=(14, 3.5 * rows), squeeze=False, constrained_layout=True
    )
    for axis, panel in zip(axes.flat, shown, strict=False):
        draw_panel(axis, panel, runs)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=9)
    try:
        fig.savefig(out, dpi=110)
    except ValueError as error:  # an ending that is no format
        raise ConfigError(f"--out {out}: {error}") from error
    finally:
        plt.close(fig)


def draw_panel(axis: Any, panel: Panel, runs: Sequence[Run]) -> None:
    name, title = panel
    for run in runs:
        steps = [row["progress/steps"] for row in run.rows]
        values = [float("nan") if row.get(name) is None else row[name] for row in run.rows]
        axis.plot(steps, values, linewidth=1.2, label=run.label)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("environment steps")
    axis.grid(alpha=0.3)
    if name == SPEED:
        axis.set_ylim(bottom=0)


@answer_errors(os_errors=True)
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, "plot", argv)
    if not options.run_dirs:
        raise ConfigError(f"no run directory given; for example: {suggested('plot', 'runs/NAME')}")
    draw(options.run_dirs, options.out)
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

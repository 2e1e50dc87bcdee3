"""Learning curves of one or more runs as a picture: `python -m spmdrl.plot RUN_DIR ...`.

Public names: `main`, `read_metrics`, `draw`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import EXIT_BAD_INPUT, ConfigError
from spmdrl.runtime.rundir import read_run

PANELS = [
    ("episode/return_mean", "return (mean of the last episodes)"),
    ("loss/value", "value loss"),
    ("loss/policy", "policy loss"),
    ("ppo/approx_kl", "approximate KL"),
    ("loss/entropy", "entropy"),
    ("perf/sps", "steps per second"),
]


@dataclass(frozen=True)
class Options:
    """Plot return, losses, KL and speed over environment steps."""

    run_dirs: tuple[str, ...]
    """Run directories; several are drawn side by side."""
    out: str = "curves.png"
    """Where the picture goes."""


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; an unfinished last line is left out."""
    file = Path(run_dir) / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no metrics.jsonl")
    rows = []
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    if not rows:
        raise ConfigError(f"{file} holds no rows yet")
    return rows


def draw(run_dirs: Sequence[str], out: str) -> None:
    runs = [(run_dir, read_run(run_dir), read_metrics(run_dir)) for run_dir in run_dirs]
    import matplotlib  # slow to load: not before the runs are known to be there

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(14, 7), constrained_layout=True)
    for run_dir, config, rows in runs:
        label = f"{config.env.id}, seed {config.seed} ({Path(run_dir).name})"
        steps = [row["progress/steps"] for row in rows]
        for axis, (name, title) in zip(axes.flat, PANELS, strict=True):
            values = [float("nan") if row.get(name) is None else row[name] for row in rows]
            axis.plot(steps, values, linewidth=1.2, label=label)
            axis.set_title(title, fontsize=11)
            axis.set_xlabel("environment steps")
            axis.grid(alpha=0.3)
    axes[1][2].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=9)
    fig.savefig(out, dpi=110)
    plt.close(fig)


def main(argv: Sequence[str] | None = None) -> int:
    import tyro

    options = tyro.cli(
        Options,
        args=argv,
        prog="python -m spmdrl.plot",
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    try:
        if not options.run_dirs:
            raise ConfigError("no run directory given; for example: python -m spmdrl.plot runs/*")
        draw(options.run_dirs, options.out)
    except (ConfigError, OSError) as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

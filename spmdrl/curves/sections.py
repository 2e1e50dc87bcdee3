"""What a report says about runs besides their curves, each part as HTML."""

from __future__ import annotations

import base64
import collections
import html
from collections.abc import Sequence
from pathlib import Path

from spmdrl.config import Config, flatten
from spmdrl.curves.groups import NAMES, Group, Run, varied_fields
from spmdrl.curves.page import Cell, table
from spmdrl.curves.panels import RETURN, elapsed, final
from spmdrl.curves.svg import legend
from spmdrl.runtime.console import time_shares
from spmdrl.runtime.files import read_json

__all__ = [
    "config_section", "evaluation_section", "log_section", "results_section", "time_section",
    "video_section",
]  # fmt: skip

VIDEOS = {".gif": "image/gif", ".mp4": "video/mp4", ".webm": "video/webm"}
LARGEST_VIDEO = 20_000_000  # bytes; a page that takes longer to open would not be looked at
LOG_LINES = 30


def results_section(groups: Sequence[Group]) -> str:
    """How each group ended, then each run."""
    rows: list[list[Cell]] = []
    for group in groups:
        end = final(group, RETURN)
        spread = "–" if end is None or end.low is None else f"{end.low:.4g} to {end.high:.4g}"
        rows.append([group.label, len(group.runs), end.center if end else None, spread])
    heads = ["config", "runs", "return over the last tenth", "95 % interval"]
    runs = [_result(run) for group in groups for run in group.runs]
    each = ["run", "seed", "state", "steps", "of", "last return", "seconds"]
    return f"{table(heads, rows)}<br>{table(each, runs)}"


def _result(run: Run) -> list[Cell]:
    status = read_json(run.path / "status.json")
    state = ": ".join(str(status[k]) for k in ("state", "reason") if status.get(k)) or "unknown"
    last = next((row[RETURN] for row in reversed(run.rows) if row.get(RETURN) is not None), None)
    whole = run.config.num_updates * run.config.batch_size
    seconds = float(elapsed(run)[-1])
    return [str(run.path), run.config.seed, state, run.steps, whole, last, seconds]


def time_section(groups: Sequence[Group]) -> str:
    """Shares of the phases, without the first row of each run, which holds the compilation."""
    shares = {group.label: dict(_shares(group)) for group in groups}
    names = list(dict.fromkeys(name for found in shares.values() for name in found))
    parts = [legend(names)]
    for label, found in shares.items():
        bars = "".join(
            f'<span class="c{names.index(name) % 7}" style="width:{100 * share:.1f}%" '
            f'title="{html.escape(name)}: {100 * share:.0f} %"></span>'
            for name, share in found.items()
        )
        words = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.items())
        parts.append(f'<p>{html.escape(label)}: {words}</p><div class="bar">{bars}</div>')
    return "\n".join(parts)


def _shares(group: Group) -> list[tuple[str, float]]:
    totals: dict[str, float] = collections.defaultdict(float)
    for run in group.runs:
        for row in run.rows[1:] or run.rows:
            for name, value in row.items():
                if name.startswith("time/") and value is not None:
                    totals[name] += value
    return time_shares(totals)


def config_section(groups: Sequence[Group]) -> str:
    """Fields in which the groups differ; then what the first one has changed from the defaults."""
    first = [group.runs[0] for group in groups]
    parts = []
    if len(groups) > 1:
        rows = [[n, *(str(run.settings.get(n)) for run in first)] for n in varied_fields(first)]
        parts.append(table(["differs", *(group.label for group in groups)], rows))
    usual = flatten(Config())
    changed = [
        [name, str(value), str(usual.get(name, "–"))]
        for name, value in flatten(first[0].config).items()
        if name not in NAMES and value != usual.get(name)
    ]
    parts.append(table([f"field ({groups[0].label})", "value", "default"], changed))
    return "<br>".join(parts)


def evaluation_section(runs: Sequence[Run]) -> str:
    """What `spmdrl.evaluate` has left in the runs."""
    rows: list[list[Cell]] = []
    for run in runs:
        found = read_json(run.path / "eval.json")
        if not found:
            continue
        ends = found.get("return_ci95")
        spread = f"{ends[0]:.4g} to {ends[1]:.4g}" if ends else "–"
        actions = "most likely" if found.get("deterministic") else "sampled"
        rows.append([str(run.path), found.get("checkpoint"), found.get("episodes"), actions,
                     found.get("return_mean"), spread])  # fmt: skip
    if not rows:
        return '<p class="faint">none yet: spmdrl evaluate RUN_DIR</p>'
    return table(["run", "checkpoint", "episodes", "actions", "return", "95 % interval"], rows)


def video_section(runs: Sequence[Run]) -> str:
    """Pictures that move, from the run directories; large ones are named only."""
    parts = [_video(file) for run in runs for file in videos_of(run.path)]
    hint = "none yet: spmdrl evaluate RUN_DIR --video RUN_DIR/play.gif"
    return "\n".join(parts) or f'<p class="faint">{hint}</p>'


def videos_of(run_dir: Path) -> list[Path]:
    return [file for file in sorted(run_dir.iterdir()) if file.suffix.lower() in VIDEOS]


def _video(file: Path) -> str:
    name, kind = html.escape(str(file)), VIDEOS[file.suffix.lower()]
    if file.stat().st_size > LARGEST_VIDEO:
        return f"<p>{name} is too large for this page</p>"
    data = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    if kind.startswith("image"):
        return f'<p>{name}</p><img class="video" alt="{name}" src="{data}">'
    return f'<p>{name}</p><video controls loop src="{data}"></video>'


def log_section(runs: Sequence[Run]) -> str:
    """The last lines of each run's log."""
    return "\n".join(_log(run.path) for run in runs)


def _log(run_dir: Path) -> str:
    try:
        lines = (run_dir / "log.txt").read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        lines = ["no log.txt"]
    text = html.escape("\n".join(lines))
    return f"<details><summary>{html.escape(str(run_dir))}</summary><pre>{text}</pre></details>"

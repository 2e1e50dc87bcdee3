"""The runs below a directory, as a table: `python -m spmdrl.runs [DIR]`.

Reads only what runs leave on the disk, so it can be asked while they train, from any machine that
sees their files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError
from spmdrl.options import parse
from spmdrl.runtime import lock
from spmdrl.runtime.files import last_rows, read_json
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.rundir import CLONE_MARK, read_run
from spmdrl.runtime.watchdog import is_running

__all__ = ["RunInfo", "describe", "find_runs", "main"]

SILENT_S = 10.0  # a living run beats twice a second
OURS = ("versions.json", "metrics.jsonl", "checkpoints")  # beside a config.json of spmdrl
COLORS = {"running": "cyan", "finished": "green", "stopped": "yellow"}


@dataclass(frozen=True)
class Options:
    """List the runs below a directory: how far they are, their return and how they ended."""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = "runs"
    """Directory that holds the runs, at any depth."""
    json: bool = False
    """Print JSON for scripts instead of a table."""


@dataclass(frozen=True)
class RunInfo:
    """One run, as far as its files tell."""

    run: str
    """Its directory, as the other commands take it."""
    env: str | None
    seed: int | None
    steps: int
    total_steps: int | None
    episode_return: float | None
    state: str
    """running, finished, stopped, failed, killed (gone without a status), damaged or unknown."""
    reason: str
    age_s: float
    """Seconds since it last wrote anything."""


# ---------------------------------------------------------------------------------------------
# One run


def newest(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The last value of a metric that is a number."""
    numbers = (row[name] for row in rows if isinstance(row.get(name), (int, float)))
    return next(numbers, None)


def last_write(run_dir: Path) -> float:
    """When the run last changed one of its files."""
    names = ("config.json", "metrics.jsonl", "log.txt", "status.json", "summary.json")
    times = []
    for file in (*(run_dir / name for name in names), run_dir / ".heartbeat" / "rank-0.json"):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def state_of(run_dir: Path, now: float) -> tuple[str, str]:
    """`(state, reason)`."""
    status = read_json(run_dir / "status.json")
    beat = read_json(run_dir / ".heartbeat" / "rank-0.json")
    alive = now - max(_time(status), _time(beat)) < SILENT_S
    state = status.get("state")
    if state == "running":
        if _has_owner(run_dir, status, alive):
            return "running", ""
        return "killed", "process gone, no exit status recorded"
    if isinstance(state, str):
        return state, str(status.get("reason", ""))
    # a run of a version that kept no status.json
    if alive:
        return "running", ""
    return ("finished" if read_json(run_dir / "summary.json") else "unknown"), ""


def _time(record: dict[str, Any]) -> float:
    value = record.get("time")
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, (int, float)) else 0.0
    return 0.0


def _has_owner(run_dir: Path, status: dict[str, Any], alive: bool) -> bool:
    """Whether a process still works on a run that says so.

    A lock that is held is the best of signs, whatever the clocks of two hosts say. One that is free
    is as good on the host of the run; elsewhere the file system may not have told of it.
    """
    taken = lock.is_taken(run_dir)
    if taken is None or (not taken and status.get("host") != socket.gethostname()):
        return alive and not _gone(status)
    return taken


def _gone(status: dict[str, Any]) -> bool:
    """Whether its process was on this machine and is there no more."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return not is_running(pid)


def describe(run_dir: Path, now: float) -> RunInfo | None:
    """What is known of a run; None for a directory that is none of ours."""
    try:
        config: Config | None = read_run(run_dir)
        problem = ""
    except (ConfigError, OSError) as error:
        if not any((run_dir / mark).exists() for mark in OURS):
            return None
        config, problem = None, str(error)
    state, reason = ("damaged", problem) if config is None else state_of(run_dir, now)
    rows, summary = last_rows(run_dir), read_json(run_dir / "summary.json")
    episode_return = newest(rows, "episode/return_mean")
    if episode_return is None:
        episode_return = newest([summary], "episode_return_mean")
    return RunInfo(
        run=str(run_dir),
        env=config.env.id if config else None,
        seed=config.seed if config else None,
        steps=int(newest(rows, "progress/steps") or 0),
        total_steps=total_steps(run_dir, config),
        episode_return=episode_return,
        state=state,
        reason=reason,
        age_s=max(0.0, now - last_write(run_dir)),
    )


def total_steps(run_dir: Path, config: Config | None) -> int | None:
    """Steps at its end; a clone's are those of its data, over all epochs."""
    cloned = read_json(run_dir / CLONE_MARK).get("total_steps")
    if isinstance(cloned, int):
        return cloned
    return config.num_updates * config.batch_size if config else None


def run_dirs(folder: Path) -> Iterator[Path]:
    """Directories with a config.json; what is inside a run is not looked at."""
    for place, folders, files in os.walk(folder):
        if "config.json" in files:
            folders.clear()
            yield Path(place)
        folders[:] = sorted(f for f in folders if not f.startswith("."))


def find_runs(folder: Path) -> list[RunInfo]:
    """Every run below the folder, the one that wrote last first."""
    now = time.time()
    found = [describe(place, now) for place in run_dirs(folder)]
    return sorted((info for info in found if info), key=lambda info: info.age_s)


# ---------------------------------------------------------------------------------------------
# The table


def short_age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def show(runs: Sequence[RunInfo]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "environment", "seed"):
        table.add_column(heading, no_wrap=True)
    for heading in ("steps", "of", "return"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    for info in runs:
        state = Text(_printable(info.state), style=COLORS.get(info.state, "red"))
        if info.reason:
            state.append(f": {_printable(info.reason)}", style="dim")
        cells = [info.run, _shown(info.env), _shown(info.seed), f"{info.steps:,}"]
        cells += [_shown(info.total_steps, ","), _shown(info.episode_return, ".1f")]
        table.add_row(*(Text(_printable(cell)) for cell in cells), state, short_age(info.age_s))
    # A pipe has no width; 80 columns would fold the names.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def _printable(text: str) -> str:
    """A stranger's file must not give orders to the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _shown(value: Any, form: str = "") -> str:
    return "–" if value is None else format(value, form)


@answer_errors(os_errors=True)
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, "runs", argv)
    folder = Path(options.dir)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a directory; name the one that holds the runs: "
            f"{suggested('runs', 'DIR')}"
        )
    runs = find_runs(folder)
    if options.json:
        print(json.dumps([dataclasses.asdict(info) for info in runs], indent=2))
    elif runs:
        show(runs)
    else:
        print(f"no runs below {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

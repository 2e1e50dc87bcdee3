"""Runs from their directories, and which of them differ by nothing but their seed."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import Config, flatten
from spmdrl.runtime.files import Row, read_metrics
from spmdrl.runtime.rundir import read_run

__all__ = ["Group", "Run", "group_runs", "notes", "read_runs", "run_folders", "varied_fields"]

# Names of a run, and fields that change what is written about it but not what it learns.
NAMES = {"seed", "name", "run_dir", "restart"}
BESIDE = ("log.", "checkpoint.", "eval.")


@dataclass(frozen=True)
class Run:
    path: Path
    config: Config
    rows: list[Row]

    @property
    def steps(self) -> int:
        """How far it has come."""
        return int(self.rows[-1].get("progress/steps") or 0)

    @property
    def settings(self) -> dict[str, Any]:
        """What runs of one group have in common."""
        fields = flatten(self.config).items()
        return {k: v for k, v in fields if k not in NAMES and not k.startswith(BESIDE)}


@dataclass(frozen=True)
class Group:
    """Runs of one config, each with a seed of its own; or a single run."""

    label: str
    runs: tuple[Run, ...]


# ---------------------------------------------------------------------------------------------
# Reading


def run_folders(path: str | Path) -> list[Path]:
    """The run itself, or the runs below a directory that holds some."""
    folder = Path(path)
    if (folder / "config.json").exists():
        return [folder]
    found = []
    for place, folders, files in os.walk(folder):
        if "config.json" in files:
            found.append(Path(place))
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith("."))
    return found or [folder]  # which then cannot be read, and that is said


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Every run that the paths name, once; a folder of runs stands for all of them."""
    folders = [folder for path in paths for folder in run_folders(path)]
    return [Run(f, read_run(f), read_metrics(f)) for f in dict.fromkeys(folders)]


# ---------------------------------------------------------------------------------------------
# Grouping


def group_runs(runs: Sequence[Run], each: bool = False) -> list[Group]:
    """Runs of the same config together, in the order of their first; with `each` all apart."""
    if each:
        return [Group(label_of_run(run), (run,)) for run in runs]
    found: dict[str, list[Run]] = collections.defaultdict(list)
    for run in runs:
        found[json.dumps(run.settings, sort_keys=True, default=str)].append(run)
    members = list(found.values())
    varied = varied_fields([group[0] for group in members])
    return [Group(label_of_group(group, varied), tuple(group)) for group in members]


def varied_fields(runs: Sequence[Run]) -> list[str]:
    """Fields that are not the same in all of these runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [n for n in names if len({repr(run.settings.get(n)) for run in runs}) > 1]


def label_of_run(run: Run) -> str:
    return f"{run.config.env.id}, seed {run.config.seed} ({run.path.name})"


def label_of_group(group: Sequence[Run], varied: Sequence[str]) -> str:
    """The environment and what sets these runs apart; a single one also by its name."""
    if len(group) == 1:
        return label_of_run(group[0])
    settings = group[0].settings
    words = [f"{n} {settings.get(n)}" for n in varied if n != "env.id"]
    return f"{', '.join([group[0].config.env.id, *words])} ({len(group)} seeds)"


def notes(groups: Sequence[Group]) -> list[str]:
    """What the reader of a band has to know: seeds that count twice, runs that are short."""
    found = []
    for group in groups:
        seeds = collections.Counter(run.config.seed for run in group.runs)
        twice = [seed for seed, count in seeds.items() if count > 1]
        if twice:
            found.append(
                f"{group.label}: several runs have seed {', '.join(map(str, twice))}, which makes "
                "the band look narrower than it is"
            )
        longest = max(run.steps for run in group.runs)
        short = [run for run in group.runs if run.steps < 0.95 * longest]
        if short:
            first = min(short, key=lambda run: run.steps)
            found.append(
                f"{group.label}: drawn up to step {first.steps:,}, where {first.path} is; "
                f"the longest is at {longest:,}"
            )
    return found

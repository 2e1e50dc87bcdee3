"""A training run with and without one of its flags: the benchmarks of a single option.

Public names: `compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common import (
    about_spread,
    in_turns,
    machine,
    made_by,
    number,
    progress,
    save,
    spread,
    table,
)
from trainer import Task

WAYS = ("plain", "with it")


def compare(
    name: str,
    flag: str,
    tasks: Sequence[Task],
    repeats: int,
    rate: Callable[[Task], float],
    text: str,
) -> None:
    """Writes benchmarks/results/NAME.json and .md; `rate` gives the steps/s of a task."""
    about = machine()
    rates: dict[str, dict[str, list[float]]] = {task.name: {w: [] for w in WAYS} for task in tasks}
    for task, way in progress(in_turns([(t, w) for t in tasks for w in WAYS], repeats), name):
        chosen = task.with_flags(flag) if way == "with it" else task
        rates[task.name][way].append(rate(chosen))
    found = {task.name: summarize(rates[task.name]) for task in tasks}
    rows = [
        [f"{t.name}, {t.envs} x {t.steps}", *(number(s[way].median) for way in WAYS),
         f"{s['ratio'].median:.2f} ({s['ratio'].low:.2f}–{s['ratio'].high:.2f})"]
        for t in tasks for s in [found[t.name]]
    ]  # fmt: skip
    header = ["task", "steps/s", f"with `{flag}`, steps/s", "ratio"]
    parts = [made_by(about), table(header, rows), f"{about_spread(repeats)} {text}"]
    save(name, {"machine": about, "tasks": found}, "\n\n".join(parts))


def summarize(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios are taken in each round and then their median: neighbours in time."""
    ratios = [b / a for a, b in zip(rates["plain"], rates["with it"], strict=True)]
    return {"ratio": spread(ratios), **{way: spread(found) for way, found in rates.items()}}

"""What `--sync.deterministic` costs: steps per second with and without it.

    python benchmarks/deterministic.py                # about 8 minutes on two cores

One rank on one core each time, in turns. Writes benchmarks/results/deterministic.json and .md.
"""

from __future__ import annotations

from typing import Any

from common import (
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    number,
    progress,
    save,
    spread,
    table,
)
from trainer import Task, Trainer

TASKS = [
    Task("CartPole", "cartpole", envs=64, steps=128, updates=60, skip=3),
    Task("HalfCheetah", "halfcheetah", envs=64, steps=64, updates=6, skip=2),
    Task("Pong", "pong", envs=16, steps=64, updates=3, skip=1),
]


def summarize(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios are taken in each round and then their median: neighbours in time."""
    ratios = [d / p for d, p in zip(rates["deterministic"], rates["plain"], strict=True)]
    return {"ratio": spread(ratios), **{way: spread(found) for way, found in rates.items()}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    about, trainer = machine(), Trainer()
    rates: dict[str, dict[str, list[float]]] = {
        task.name: {"plain": [], "deterministic": []} for task in TASKS
    }
    cases = [(task, way) for task in TASKS for way in ("plain", "deterministic")]
    for task, way in progress(in_turns(cases, repeats), "deterministic"):
        flags = ["--sync.deterministic"] if way == "deterministic" else []
        rates[task.name][way].append(trainer.alone(task.with_flags(*flags))[0].sps)
    found = {name: summarize(ways) for name, ways in rates.items()}
    rows = [
        [f"{t.name}, {t.envs} x {t.steps}", *(number(s[w].median) for w in s if w != "ratio"),
         f"{s['ratio'].median:.2f} ({s['ratio'].low:.2f}–{s['ratio'].high:.2f})"]
        for t in TASKS for s in [found[t.name]]
    ]  # fmt: skip
    header = ["task", "steps/s", "deterministic, steps/s", "ratio"]
    text = (
        f"{about_spread(repeats)} The cost is of two kinds: environments are computed in eight "
        "groups one after the other instead of all at once, and the processor's instructions "
        "that multiply and add in one rounding are not used."
    )
    save("deterministic", {"machine": about, "tasks": found},
         "\n\n".join([made_by(about), table(header, rows), text]))  # fmt: skip


if __name__ == "__main__":
    main()

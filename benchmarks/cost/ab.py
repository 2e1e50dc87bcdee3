"""What a feature costs: the same training run with it and without it, in turns.

    python -m benchmarks.ab --flag deterministic      # about 8 minutes on two cores
    python -m benchmarks.ab --flag overlap            # about 6 minutes
    python -m benchmarks.ab --flag checkpointing      # about 15 minutes

Writes benchmarks/results/FLAG.json and .md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.common import (
    Spread,
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
from benchmarks.lib.trainer import Task, Timing, Trainer
from spmdrl.config import CheckpointConfig

WAYS = ("without", "with")


@dataclass(frozen=True)
class Comparison:
    """The flags that switch a feature on, and the runs in which it is tried."""

    flags: tuple[str, ...]
    tasks: Sequence[Task]
    text: str
    one_core: bool = False  # or both, with everything as the trainer's launcher sets it
    repeats: int = 5

    def run(self, trainer: Trainer, task: Task) -> Timing:
        return trainer.alone(task)[0] if self.one_core else trainer.freely(task, 1)


COMPARISONS = {
    "deterministic": Comparison(
        flags=("--sync.deterministic",),
        tasks=[
            Task("CartPole", "cartpole", envs=64, steps=128, updates=60, skip=3),
            Task("HalfCheetah", "halfcheetah", envs=64, steps=64, updates=6, skip=2),
            Task("Pong", "pong", envs=16, steps=64, updates=3, skip=1),
        ],
        one_core=True,
        text="The cost is of three kinds: environments are computed in eight groups one after the "
        "other instead of all at once, the processor's instructions that multiply and add in one "
        "rounding are not used, and on one core, as here, two XLA threads take turns.",
    ),
    # Without the last update: with the flag, no rollout is collected beside it.
    "overlap": Comparison(
        flags=("--lag", "1"),
        tasks=[
            Task(f"{name}, {devices} device(s)", name.lower(), envs, steps, updates, skip=3,
                 flags=("--devices", str(devices)), tail=1)
            for name, envs, steps, updates in (("CartPole", 64, 128, 60), ("Ant", 16, 256, 5))
            for devices in (1, 2)
        ],
        text="The flag lets the next rollout be collected while this one is learned from. On CPUs "
        "both need the same cores, so there is little to gain; it is made for an accelerator that "
        "learns while the processor simulates, which was not measured here.",
    ),
    # As long as it takes for one checkpoint at least. The one at the end of the run is waited for
    # in full and not among the rows.
    "checkpointing": Comparison(
        flags=("--checkpoint.every", str(CheckpointConfig().every)),
        tasks=[
            Task("CartPole", "cartpole", envs=4, steps=128, updates=900, skip=2),
            Task("Pong", "pong", envs=8, steps=128, updates=52, skip=2),
        ],
        repeats=3,
        text="A checkpoint is copied from the devices, and a thread writes it to disk while "
        "training continues. *Blocked* is how long saves held training up, by the trainer's own "
        "clock: it resolves what the ratio of two runs cannot.",
    ),
}  # fmt: skip

Runs = dict[str, list[Timing]]  # by way, one a round


def measure(chosen: Comparison, repeats: int, trainer: Trainer, title: str) -> dict[str, Runs]:
    found: dict[str, Runs] = {task.name: {way: [] for way in WAYS} for task in chosen.tasks}
    cases = [(task, way) for task in chosen.tasks for way in WAYS]
    for task, way in progress(in_turns(cases, repeats), title):
        flags = chosen.flags if way == "with" else ()
        found[task.name][way].append(chosen.run(trainer, task.with_flags(*flags)))
    return found


def summarize(runs: Runs) -> dict[str, Any]:
    """Ratios are taken in each round and then their median: neighbours in time."""
    rates = {way: [timing.sps for timing in runs[way]] for way in WAYS}
    ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
    return {
        "ratio": spread(ratios),
        "blocked": spread([timing.saving for timing in runs["with"]]),
        **{way: spread(found) for way, found in rates.items()},
    }


def report(chosen: Comparison, found: dict[str, Any], repeats: int) -> str:
    header = ["task", "steps/s", f"with `{' '.join(chosen.flags)}`, steps/s", "ratio"]
    rows = []
    for task in chosen.tasks:
        s, ratio = found[task.name], found[task.name]["ratio"]
        rates = [number(s[way].median) for way in WAYS]
        shown = f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
        rows.append([f"{task.name}, {task.envs} x {task.steps}", *rates, shown])
    if any(s["blocked"].high > 0 for s in found.values()):
        header.append("blocked, of all time")
        for row, task in zip(rows, chosen.tasks, strict=True):
            row.append(_thousandths(found[task.name]["blocked"]))
    return "\n\n".join([table(header, rows), f"{about_spread(repeats)} {chosen.text}"])


def _thousandths(found: Spread) -> str:
    return f"{found.median:.3%} ({found.low:.3%}–{found.high:.3%})"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--flag", required=True, choices=list(COMPARISONS))
    parser.add_argument("--repeats", type=int, default=0, help="rounds; each flag has its own")
    args = parser.parse_args()
    chosen, about = COMPARISONS[args.flag], machine()
    repeats = args.repeats or chosen.repeats
    runs = measure(chosen, repeats, Trainer(), args.flag)
    found = {name: summarize(of_task) for name, of_task in runs.items()}
    text = "\n\n".join([made_by(about), report(chosen, found, repeats)])
    save(args.flag, {"machine": about, "tasks": found}, text)


if __name__ == "__main__":
    main()

"""What checkpoints cost at their default cadence, as a part of the training time.

    python benchmarks/checkpointing.py                # about 3 minutes on two cores

One run for each task with its own config; the trainer itself says how long each save held it up
(`time/save`), beside everything else it did. Writes benchmarks/results/checkpointing.json and .md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, arguments, machine, made_by, number, progress, save, table

from spmdrl.config import load
from spmdrl.runtime.files import read_metrics

TASKS = {"CartPole": ("cartpole", 900), "Pong": ("pong", 54)}  # updates: one checkpoint at least
SKIP = 2  # rows that hold the compilation
PHASES = ("collect", "wait", "update", "save", "other")


def run(config: str, updates: int, folder: Path) -> list[dict[str, Any]]:
    path = f"configs/{config}.py"
    steps = load([str(ROOT / path)]).batch_size * updates
    command = [
        sys.executable, "-m", "spmdrl.train", path, "--total-steps", str(steps),
        "--run-dir", str(folder), "--log.panel", "off",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(folder)


def cost(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the saves within the run; the one at its end is waited for in full and not among them."""
    kept = rows[SKIP:]
    total = sum(row.get(f"time/{phase}") or 0.0 for row in kept for phase in PHASES)
    saves = sorted(row["time/save"] for row in kept if row.get("time/save"))
    return {
        "updates": len(kept),
        "checkpoints": len(saves),
        "median_ms": 1e3 * saves[len(saves) // 2],
        "longest_ms": 1e3 * saves[-1],
        "share": sum(saves) / total,
    }


def main() -> None:
    arguments(__doc__).parse_args()
    about, found = machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, updates) in progress(list(TASKS.items()), "checkpointing"):
            found[name] = cost(run(config, updates, Path(folder) / name))
    rows = [
        [name, str(c["updates"]), str(c["checkpoints"]), number(c["median_ms"]),
         number(c["longest_ms"]), f"{c['share']:.3%}"]
        for name, c in found.items()
    ]  # fmt: skip
    header = ["task", "updates", "checkpoints", "held up, median ms", "longest ms", "of all time"]
    text = (
        "A checkpoint is copied from the devices, and a thread writes it to the disk while "
        "training goes on. What is counted here is how long training was held up, by the trainer's "
        "own clock."
    )
    save("checkpointing", {"machine": about, "tasks": found},
         "\n\n".join([made_by(about), table(header, rows), text]))  # fmt: skip


if __name__ == "__main__":
    main()

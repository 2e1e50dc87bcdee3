"""What `--overlap` gains: steps per second with and without it.

    python benchmarks/overlap.py                      # about 6 minutes on two cores

One rank on both cores each time, in turns: with one host device, and with two. Writes
benchmarks/results/overlap.json and .md.
"""

from __future__ import annotations

from common import arguments
from flags import compare
from trainer import Task, Trainer

# Without the last update: with the flag, no rollout is collected beside it.
TASKS = [
    Task(f"{name}, {devices} device(s)", name.lower(), envs, steps, updates, skip=3,
         flags=("--devices", str(devices)), tail=1)
    for name, envs, steps, updates in (("CartPole", 64, 128, 60), ("Ant", 16, 256, 5))
    for devices in (1, 2)
]  # fmt: skip
TEXT = (
    "The flag lets the next rollout be collected while this one is learned from. On CPUs both "
    "need the same cores, so there is little to gain; it is made for an accelerator that learns "
    "while the processor simulates, which was not measured here."
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats, trainer = parser.parse_args().repeats, Trainer()
    compare("overlap", "--overlap", TASKS, repeats,
            lambda task: trainer.freely(task, 1).sps, TEXT)  # fmt: skip


if __name__ == "__main__":
    main()

"""What `--overlap` gains: steps per second with and without it.

    python benchmarks/overlap.py                      # about 6 minutes on two cores

One rank on both cores each time, in turns: with one host device, and with two. Writes
benchmarks/results/overlap.json and .md.
"""

from __future__ import annotations

from common import arguments
from flags import compare
from trainer import Task, Trainer

TWO = ("--devices", "2")
TASKS = [
    Task("CartPole, 1 device", "cartpole", envs=64, steps=128, updates=60, skip=3),
    Task("CartPole, 2 devices", "cartpole", envs=64, steps=128, updates=60, skip=3, flags=TWO),
    Task("Ant, 1 device", "ant", envs=16, steps=256, updates=4, skip=2),
    Task("Ant, 2 devices", "ant", envs=16, steps=256, updates=4, skip=2, flags=TWO),
]
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

"""What `--sync.deterministic` costs: steps per second with and without it.

    python benchmarks/deterministic.py                # about 8 minutes on two cores

One rank on one core each time, in turns. Writes benchmarks/results/deterministic.json and .md.
"""

from __future__ import annotations

from common import arguments
from flags import compare
from trainer import Task, Trainer

TASKS = [
    Task("CartPole", "cartpole", envs=64, steps=128, updates=60, skip=3),
    Task("HalfCheetah", "halfcheetah", envs=64, steps=64, updates=6, skip=2),
    Task("Pong", "pong", envs=16, steps=64, updates=3, skip=1),
]
TEXT = (
    "The cost is of three kinds: environments are computed in eight groups one after the other "
    "instead of all at once, the processor's instructions that multiply and add in one rounding "
    "are not used, and on one core, as here, two XLA threads take turns."
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats, trainer = parser.parse_args().repeats, Trainer()
    compare("deterministic", "--sync.deterministic", TASKS, repeats,
            lambda task: trainer.alone(task)[0].sps, TEXT)  # fmt: skip


if __name__ == "__main__":
    main()

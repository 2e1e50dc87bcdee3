"""What every reference is asked to do, and the lines in which it reports.

Used by the scripts beside it, each of which runs in a virtual environment of its own: only the
standard library here. A script prints what it was set to, then one line of JSON for each update:

    {"settings": "2 threads"}
    {"update": 1, "steps": 1024, "seconds": 0.31}
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, fields

__all__ = ["ADAM_EPS", "GAE_LAMBDA", "GAMMA", "MAX_GRAD_NORM", "SEED", "VALUE_COEF", "Clock",
           "Work", "read_work"]  # fmt: skip

GAMMA, GAE_LAMBDA = 0.99, 0.95
VALUE_COEF, MAX_GRAD_NORM = 0.5, 0.5
ADAM_EPS = 1e-5
SEED = 1


@dataclass(frozen=True)
class Work:
    """A PPO run; the sizes are those of the whole run."""

    env: str = "CartPole-v1"
    envs: int = 8
    steps: int = 128  # of each environment in one rollout
    epochs: int = 4
    minibatches: int = 4  # in an epoch
    updates: int = 10  # that count
    skip: int = 2  # first updates, which hold imports and compilation
    lr: float = 2.5e-4
    clip: float = 0.2
    entropy: float = 0.01
    hidden: tuple[int, ...] = (64, 64)  # of the policy's and of the value's own network

    @property
    def batch(self) -> int:
        return self.envs * self.steps

    @property
    def minibatch(self) -> int:
        return self.batch // self.minibatches

    @property
    def all_updates(self) -> int:
        return self.skip + self.updates

    def flags(self) -> list[str]:
        """The command line that `read_work` turns into this again."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            words += [f"--{field.name}", *map(str, value if field.name == "hidden" else [value])]
        return words


def read_work(parser: argparse.ArgumentParser) -> tuple[Work, argparse.Namespace]:
    """The work by the command line, and whatever else the parser knows."""
    for field in fields(Work):
        if field.name == "hidden":
            parser.add_argument("--hidden", type=int, nargs="+", default=[*Work.hidden])
        else:
            kind = type(field.default)
            parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    args = parser.parse_args()
    values = {field.name: getattr(args, field.name) for field in fields(Work)}
    return Work(**values | {"hidden": tuple(args.hidden)}), args


class Clock:
    """Prints a line for each update; its seconds are all that passed since the line before."""

    def __init__(self, settings: str):
        print(json.dumps({"settings": settings}), flush=True)
        self._updates = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """The first update begins here."""
        self._last = time.perf_counter()

    def update(self, steps: int) -> None:
        now = time.perf_counter()
        self._updates += 1
        line = {"update": self._updates, "steps": steps, "seconds": now - self._last}
        print(json.dumps(line), flush=True)
        self._last = now

"""What stepping your own Python simulator costs, beside what the simulator itself takes.

    python -m benchmarks.simulators                   # about 5 minutes

Two questions. An environment that does nothing: how long does one step of 32 of them take with our
worker processes, and with Gymnasium's AsyncVectorEnv? An environment that sleeps for 10 ms: how
much of the ideal rate, 32 steps every 10 ms, do real training runs collect, with one worker for
each environment, on one and on two ranks? Writes benchmarks/results/simulators.json and .md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.lib.common import (
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    percent,
    pretty,
    progress,
    save,
    spread,
    table,
)
from benchmarks.lib.own_envs import Idle
from benchmarks.lib.trainer import Task, Trainer
from spmdrl.config import EnvConfig
from spmdrl.envs.gymnasium_backend import GymnasiumBatch

ENVS, STEPS = 32, 1000
SLEEP_S = 0.01
GOALS = {"idle_ms": 0.5, "ideal": 0.9}


def our_step_ms(workers: int) -> float:
    """The median of one step of all environments."""
    config = EnvConfig(backend="gymnasium", id="benchmarks.lib.own_envs:Idle", workers=workers)
    batch = GymnasiumBatch(config, range(ENVS), range(ENVS))
    actions = np.zeros(ENVS, np.int32)

    def step() -> None:
        batch.send(actions)
        batch.recv()

    try:
        batch.reset()
        return median_ms(step)
    finally:
        batch.close()


def gymnasium_step_ms() -> float:
    vector: Any = gym.vector.AsyncVectorEnv([Idle] * ENVS)
    actions = np.zeros(ENVS, np.int64)
    try:
        vector.reset(seed=1)
        return median_ms(lambda: vector.step(actions))
    finally:
        vector.close()


def median_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def share_of_ideal(trainer: Trainer, ranks: int) -> float:
    """What real runs collect, updates left out, of 32 steps every 10 ms."""
    flags = (
        "--env.backend", "gymnasium", "--env.id", "benchmarks.lib.own_envs:Sleepy",
        "--env.workers", str(ENVS // ranks),
    )  # fmt: skip
    task = Task("sleep", "cartpole", ENVS // ranks, 64, updates=8, skip=2, flags=flags)
    timing = trainer.freely(task, ranks)
    return task.steps * SLEEP_S / timing.phases["collect"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    trainer = Trainer()
    cases: dict[str, Callable[[], float]] = {
        "idle: ours, 2 workers": lambda: our_step_ms(2),
        "idle: Gymnasium's AsyncVectorEnv": gymnasium_step_ms,
        "sleep: 1 rank": lambda: share_of_ideal(trainer, 1),
        "sleep: 2 ranks": lambda: share_of_ideal(trainer, 2),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for name in progress(in_turns(list(cases), args.repeats), "simulators"):
        found[name].append(cases[name]())
    data = machine() | {"goals": GOALS, "values": found}
    save("simulators", data, f"{made_by(data)}\n\n{page(found)}\n\n{about_spread(args.repeats)}\n")


def page(found: dict[str, list[float]]) -> str:
    rows = []
    for name, values in found.items():
        idle = name.startswith("idle")
        goal = f"at most {GOALS['idle_ms']} ms" if idle else f"at least {GOALS['ideal']:.0%}"
        seen = f"{pretty(spread(values))} ms" if idle else percent(spread(values))
        rows.append([name, seen, "" if "Gymnasium" in name else goal])
    return table((f"{ENVS} environments", "found", "goal"), rows)


if __name__ == "__main__":
    main()

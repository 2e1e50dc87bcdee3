"""Short trainings of ranks and of learners with actors, in one start of four processes.

    mpirun -np 4 python -m tests.role_runs FOLDER TASK LAGS [LAYOUT...]

Rank 0 prints one line of JSON: the hash of the parameters of every layout and lag. Actors and
learners sleep for random times, which must not change anything.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from spmdrl.acting.collector import Collector
from spmdrl.acting.inbox import Inbox
from spmdrl.algos import Impala, Ppo
from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.parallel.roles import layout_of
from spmdrl.parallel.topology import detect
from spmdrl.parallel.wire import run_hash
from spmdrl.parallel.world import World, connect
from spmdrl.runtime.act import ActingLoop
from spmdrl.runtime.build import build_learner
from spmdrl.runtime.logger import make_logger
from spmdrl.runtime.loop import TrainingLoop
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog
from tests.spmd.runs import run, updates

__all__ = ["LAYOUTS", "TASKS", "run_roles"]

COUNT = 4  # updates
TASKS = {
    "cartpole": Config(
        env=EnvConfig(id="CartPole-v1", num_envs=32, normalize_obs=True),
        algo=Ppo(num_steps=16, minibatches=2, epochs=2),
        net=NetConfig(hidden=(16,)),
    ),
    "lstm": Config(
        env=EnvConfig(id="CartPole-v1", num_envs=32, observe=(0, 2)),
        algo=Impala(num_steps=16, minibatches=2),
        net=NetConfig(hidden=(16,), core="lstm", core_size=16, last_action=True),
    ),
    "jax": Config(
        env=EnvConfig(id="tests.jax_envs:CartPole", backend="jax", num_envs=32),
        algo=Ppo(num_steps=16, minibatches=2, epochs=2),
        net=NetConfig(hidden=(16,)),
    ),
}
# name: learners (0: plain ranks), other ranks, environments of each actor
LAYOUTS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "1 x 1": (0, 1, ()),
    "2 x 1": (0, 2, ()),
    "1 + 1": (1, 1, ()),
    "1 + 2": (1, 2, ()),
    "2 + 2": (2, 2, ()),
    "1 + 3, unequal": (1, 3, (8, 16, 8)),
}


def run_roles(config: Config, world: World, folder: Path) -> dict[str, Any]:
    """This rank's part of a training with roles; the summary on learners."""
    layout = layout_of(config, world.size)
    assert layout is not None
    folder.mkdir(parents=True, exist_ok=True)
    watchdog, stop = Watchdog(world.rank, world.size, None), StopRequest()
    mark = run_hash(str(folder), layout)
    if layout.role(world.rank) == "actor":
        ActingLoop(config, world, layout, folder, mark, 1, stop, watchdog).act()
        return {}
    logger = make_logger(config, folder, "test", world.rank)
    trainer = build_learner(config, world, layout, mark)
    summary = TrainingLoop(trainer, folder, logger, stop, watchdog).train()
    logger.close()
    return summary


def train(config: Config, name: str, world: World, folder: Path) -> str:
    """The hash, on rank 0; ranks that the layout has no use for do nothing."""
    learners, others, envs = LAYOUTS[name]
    size = learners + others
    if world.rank >= size:
        return ""
    if size == 1:
        return str(run(config, 1, World(), folder)["params_sha256"])
    part = world.split(range(size))
    if not learners:
        return str(run(config, 1, part, folder)["params_sha256"])
    config = dataclasses.replace(
        config, learners=learners, actors=others, actor_envs=envs, run_dir=str(folder)
    )
    return str(run_roles(config, part, folder).get("params_sha256", ""))


def sleepy(cls: Any, name: str, seed: int) -> None:
    """Let a method take longer by a random time."""
    original, rng = getattr(cls, name), random.Random(seed)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(rng.choice([0.0, 0.0, 0.03]))
        return original(*args, **kwargs)

    setattr(cls, name, slow)


def main(folder: str, task: str, lags: str, *names: str) -> None:
    world = connect(detect())
    for cls, name in ((Collector, "collect_ended"), (Inbox, "collect"), (Inbox, "publish")):
        sleepy(cls, name, world.rank)
    found: dict[str, dict[str, str]] = {}
    for lag in lags.split(","):
        config = updates(TASKS[task], COUNT, deterministic=True)
        config = dataclasses.replace(config, lag=int(lag))
        for name in names or LAYOUTS:
            place = Path(folder) / f"{task}-{lag}-{name.replace(' ', '')}"
            found.setdefault(lag, {})[name] = train(config, name, world, place)
            world.meet()
    if world.is_root:
        print("\nfound", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

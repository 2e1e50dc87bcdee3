"""Short in-process trainings, alone and together with the other ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer
from spmdrl.runtime.logger import make_logger
from spmdrl.runtime.loop import TrainingLoop
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog

CARTPOLE = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=64),
    algo=Ppo(num_steps=32, minibatches=4, epochs=2),
)
MUJOCO = Config(
    env=EnvConfig(id="HalfCheetah-v4", num_envs=64, normalize_obs=True, normalize_reward=True),
    algo=Ppo(num_steps=16, minibatches=4, epochs=2, entropy_coef=0.0),
)
JAX = Config(
    env=EnvConfig(id="tests.jax_envs:CartPole", backend="jax", num_envs=64),
    algo=Ppo(num_steps=32, minibatches=4, epochs=2),
)
PONG = Config(
    env=EnvConfig(id="Pong-v5", num_envs=8, reward="sign"),
    net=NetConfig(shared=True),
    algo=Ppo(num_steps=8, minibatches=2, epochs=1),
)


def updates(config: Config, count: int, **sync: Any) -> Config:
    return dataclasses.replace(
        config,
        total_steps=config.batch_size * count,
        sync=dataclasses.replace(config.sync, **sync),
        checkpoint=dataclasses.replace(config.checkpoint, every=1, keep=count + 1),
    )


def run(
    config: Config, devices: int, world: World, folder: Path, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Train into the folder; the summary."""
    config = dataclasses.replace(config, devices=devices, run_dir=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    logger = make_logger(config, folder, "test", world.rank)
    watchdog = Watchdog(world.rank, world.size, None)
    try:
        trainer = build_trainer(config, world, mesh=mesh)
        logger.info(trainer.collector.description)
        summary = TrainingLoop(trainer, folder, logger, StopRequest(), watchdog).train()
    finally:
        logger.close()
    (folder / f"summary-{world.rank}.json").write_text(json.dumps(summary))
    return summary


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on the clock or the topology."""
    timed = ("time/", "perf/", "comm/", "rank/", "roles/", "progress/eta")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(n).items() if not k.startswith(timed)} for n in lines]


__all__ = ["CARTPOLE", "JAX", "MUJOCO", "PONG", "rows", "run", "updates"]

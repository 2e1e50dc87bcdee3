"""Batches of these environments, and what tests ask about their processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from spmdrl.config import Config, EnvConfig
from spmdrl.envs import make_env
from spmdrl.envs.base import env_seeds
from spmdrl.envs.gymnasium_backend import GymnasiumBatch
from spmdrl.runtime.watchdog import is_running

__all__ = ["BAD", "GOOD", "SEED", "assert_gone", "batch", "broken", "pids", "step"]

GOOD, BAD = "tests.own_envs.good", "tests.own_envs.bad"
SEED = 5


def batch(env_id: str, num_envs: int = 8, **fields: Any) -> GymnasiumBatch:
    env = EnvConfig(id=env_id, backend="gymnasium", num_envs=num_envs, **fields)
    made = make_env(Config(seed=SEED, env=env), range(num_envs), threads=2)
    assert isinstance(made, GymnasiumBatch)
    return made


def broken(fault: str, env: int, **fields: Any) -> GymnasiumBatch:
    """Eight environments with two workers, of which this one has a fault in its third step."""
    options = {"fault": fault, "seed": env_seeds(SEED, [env])[0], **fields.pop("options", {})}
    return batch(f"{BAD}:Broken", options=options, **fields)


def pids(env: GymnasiumBatch) -> list[int]:
    steps: Any = env._steps
    return [worker.process.pid for worker in steps._workers]


def step(env: GymnasiumBatch, action: np.ndarray | None = None) -> Any:
    still = np.zeros((env.num_envs, *env.spec.action.shape), np.int32)
    env.send(still if action is None else action)
    return env.recv()


def assert_gone(processes: list[int], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while any(is_running(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in processes if is_running(pid)]

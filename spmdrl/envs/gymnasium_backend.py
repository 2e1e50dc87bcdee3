"""Any Gymnasium environment: registered, a class or function of a module, or a vector of its own.

`env.workers` processes step them; errors name the environment. See `making` for ids and `workers`
for the processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spmdrl.config import EnvConfig
from spmdrl.envs import actions
from spmdrl.envs.hosts import Task, make_host
from spmdrl.envs.leaves import nested
from spmdrl.envs.making import find_entry
from spmdrl.envs.observations import make_reader
from spmdrl.envs.origin import wrapper_names
from spmdrl.envs.shared_block import Arrays, Layout, batch_layout, obs_leaves, plain
from spmdrl.envs.workers import WorkerProcesses, advice
from spmdrl.parallel.topology import cores
from spmdrl.types import ActionSpace, Obs, TimeStep

__all__ = ["GymnasiumBatch", "split_evenly", "worker_count"]


class Stepper(Protocol):
    """Where a batch is stepped: in worker processes or in this one."""

    obs_space: Any
    action_space: Any

    @property
    def count(self) -> int: ...
    def attach(self, layout: Layout) -> Arrays: ...
    def reset(self) -> None: ...
    def start_step(self) -> None: ...
    def finish_step(self) -> None: ...
    def render(self) -> np.ndarray: ...
    def close(self) -> Any: ...


class GymnasiumBatch:
    """See `base.EnvBatch`. `batches` of a device share its workers."""

    def __init__(
        self,
        config: EnvConfig,
        env_ids: Sequence[int],
        seeds: Sequence[int],
        threads: int = 0,
        batches: int = 1,
    ):
        self.num_envs, self._batches = len(env_ids), batches
        self.needs_x64 = False
        self._steps = make_stepper(config, env_ids, seeds, threads, batches)
        try:
            self._obs_space = self._steps.obs_space
            self._reader = make_reader(self._obs_space, self._steps.action_space, config.id)
            self.spec, action = self._reader.spec, self._reader.spec.action
            example = actions.to_env_action(action, any_action(action, self.num_envs), np)
            layout = batch_layout(self._obs_space, example, self._steps.count)
            self._arrays = self._steps.attach(layout)
        except BaseException:
            self._steps.close()
            raise
        self._is_fresh = True  # the first reset has been made

    def reset(self) -> Obs:
        if not self._is_fresh:
            self._steps.reset()
        self._is_fresh = False
        return self._obs()

    def send(self, action: np.ndarray) -> None:
        action = actions.to_env_action(self.spec.action, action, np)
        actions.check_actions(self.spec.action, self.num_envs, action)
        self._is_fresh = False
        self._arrays["action"][...] = action
        self._steps.start_step()

    def recv(self) -> TimeStep:
        self._steps.finish_step()
        arrays = self._arrays
        return TimeStep(
            obs=self._obs(),
            reward=arrays["reward"].astype(np.float32),
            terminated=arrays["terminated"].copy(),
            truncated=arrays["truncated"].copy(),
            episode_over=arrays["terminated"] | arrays["truncated"],
        )

    def xla(self) -> None:
        return None

    def render(self) -> np.ndarray:
        return self._steps.render()

    def spaces(self) -> tuple[Any, Any]:
        return self._obs_space, self._steps.action_space

    def hint(self) -> str:
        return advice(self._arrays, self._steps.count, self.num_envs, self._batches)

    def close(self) -> None:
        self._steps.close()

    def _obs(self) -> Obs:
        """Copies: the next step writes into the same arrays."""
        leaves = {path: array.copy() for path, array in obs_leaves(self._arrays).items()}
        return self._reader.read(nested(self._obs_space, leaves), np)


def any_action(space: ActionSpace, num_envs: int) -> np.ndarray:
    """A batch of actions as a policy gives them."""
    if space.kind == "box":
        return np.zeros((num_envs, math.prod(space.shape)), np.float32)
    return np.zeros((num_envs, *space.shape), np.int32)


# ---------------------------------------------------------------------------------------------
# Who steps


def make_stepper(
    config: EnvConfig, env_ids: Sequence[int], seeds: Sequence[int], threads: int, batches: int
) -> Stepper:
    count = worker_count(config, len(env_ids), threads, batches)
    if count > 1 and find_entry(config.id).is_vector:
        count = 1  # it has its own way of stepping many
    if count == 0:
        return Inline(make_task(config, env_ids, seeds, 0, None))
    tasks, row = [], 0
    for number, size in enumerate(split_evenly(len(env_ids), count)):
        part = slice(row, row + size)
        tasks.append(make_task(config, env_ids[part], seeds[part], row, number))
        row += size
    return WorkerProcesses(tasks, config.timeout_s)


def worker_count(config: EnvConfig, num_envs: int, threads: int, batches: int) -> int:
    """Of this batch, 0 without processes; at most one for each environment."""
    if config.workers == "inline":
        return 0
    wanted = config.workers or threads or cores()
    return min(num_envs, math.ceil(wanted / batches))


def split_evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def make_task(
    config: EnvConfig, ids: Sequence[int], seeds: Sequence[int], row: int, worker: int | None
) -> Task:
    wrap = list(wrapper_names(config.wrap))
    numbers = [int(i) for i in ids]
    return Task(config.id, dict(config.options), wrap, numbers, list(seeds), row, worker)


class Inline:
    """Steps in this process, where a debugger can follow them."""

    count = 1

    def __init__(self, task: Task):
        self._host = make_host(task)
        self.obs_space, self.action_space = self._host.obs_space, self._host.action_space

    def attach(self, layout: Layout) -> Arrays:
        arrays = plain(layout)
        self._host.attach(arrays)
        return arrays

    def reset(self) -> None:
        self._host.reset()

    def start_step(self) -> None:
        """All of it is done when the answer is wanted."""

    def finish_step(self) -> None:
        self._host.step()

    def render(self) -> np.ndarray:
        return self._host.render()

    def close(self) -> None:
        self._host.close()

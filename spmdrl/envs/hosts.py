"""Environments with consecutive global ids, stepped one after the other into arrays of a batch.

A worker process has one host; without workers it stands in the trainer. The step after the end of
an episode resets that environment; only the first reset has a seed. Neither jax nor flax is loaded
here: workers start quickly and stay small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.envs import making
from spmdrl.envs.errors import EnvError, listed, raised
from spmdrl.envs.leaves import leaf_values
from spmdrl.envs.shared_block import Arrays, obs_leaves
from spmdrl.envs.space_json import space_to_json

__all__ = ["Host", "SingleHost", "Task", "VectorHost", "make_host", "whereabouts"]

MASK = "action_mask"  # which actions are allowed, in the observation or in info


@dataclass(frozen=True)
class Task:
    """Which environments a host has, as JSON: `Task(**json)` and `asdict`."""

    env_id: str
    options: dict[str, Any]
    wrap: list[str]
    ids: list[int]
    seeds: list[int]
    first_row: int  # of the batch's arrays; the others follow
    worker: int | None  # None: in the trainer's own process

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def whereabouts(task: Task, index: int, step: int) -> str:
    """environment 13 (seed 912, worker 1, episode step 7)."""
    worker = "" if task.worker is None else f"worker {task.worker}, "
    when = f"episode step {step}" if step else "at a reset"
    return f"environment {task.ids[index]} (seed {task.seeds[index]}, {worker}{when})"


class Host:
    """What both kinds have in common; subclasses step."""

    obs_space: Any  # with the mask, where info has one
    action_space: Any

    def __init__(self, task: Task, entry: making.Entry):
        self._task, self._entry = task, entry
        self._mask_in_info = False

    def describe(self) -> dict[str, Any]:
        return {"obs": space_to_json(self.obs_space), "action": space_to_json(self.action_space)}

    def attach(self, arrays: Arrays) -> None:
        """Make what is missing and write the first observations."""
        task = self._task
        rows = slice(task.first_row, task.first_row + len(task.ids))
        self._leaves = {path: array[rows] for path, array in obs_leaves(arrays).items()}
        self._action, self._reward = arrays["action"][rows], arrays["reward"][rows]
        self._terminated = arrays["terminated"][rows]
        self._truncated = arrays["truncated"][rows]
        self._episode_step = arrays["episode_step"][rows]
        number = task.worker or 0
        self._current, self._busy = arrays["current"][number : number + 1], arrays["busy"][number]

    def step(self) -> None:
        clock, computing = time.perf_counter(), time.process_time()
        self._step_all()
        self._current[0] = -1
        self._busy += (time.perf_counter() - clock, time.process_time() - computing, 1)

    def reset(self) -> None:
        """New episodes of all environments."""
        raise NotImplementedError

    def render(self) -> np.ndarray:
        """A picture of the first environment."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _step_all(self) -> None:
        raise NotImplementedError

    def _with_mask(self, space: Any, mask: Any) -> Any:
        """The observation's space, beside it the mask from info where there is one."""
        if mask is None or (isinstance(space, gym.spaces.Dict) and MASK in space.spaces):
            return space
        self._mask_in_info = True
        mask_space = gym.spaces.Box(0, 1, joined(mask).shape, np.int8)
        inside = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"obs": space}
        return gym.spaces.Dict(inside | {MASK: mask_space})

    def _seen(self, obs: Any, mask: Any, rows: tuple[int, ...]) -> dict[str, Any]:
        """Leaves of an observation by path, the mask from info among them."""
        space = self.obs_space
        if not self._mask_in_info:
            return leaf_values(space, obs) if self._is_nested else {"": obs}
        everything = np.ones((*rows, *space[MASK].shape), bool)  # many say nothing at the end
        inside = dict(obs) if isinstance(obs, dict) else {"obs": obs}
        allowed = everything if mask is None else joined(mask)
        return leaf_values(space, inside | {MASK: allowed})

    @property
    def _is_nested(self) -> bool:
        return "" not in self._leaves


class SingleHost(Host):
    """Environments that know nothing of each other."""

    def __init__(self, task: Task, entry: making.Entry):
        super().__init__(task, entry)
        self._envs = [self._make(0)]
        self._over = [False] * len(task.ids)
        with self._told(0, 0):
            self._first = self._envs[0].reset(seed=task.seeds[0])
        obs_space, self.action_space = self._envs[0].observation_space, self._envs[0].action_space
        self.obs_space = self._with_mask(obs_space, self._first[1].get(MASK))

    def _make(self, index: int) -> gym.Env[Any, Any]:
        # One is enough to be looked at by Gymnasium, whose warnings would be repeated else.
        checked = self._task.first_row + index == 0
        return making.make_one(self._entry, self._task.options, self._task.wrap, checked)

    def attach(self, arrays: Arrays) -> None:
        super().attach(arrays)
        self._begin(0, *self._first)
        for i in range(1, len(self._task.ids)):
            self._current[0] = i
            self._envs.append(self._make(i))
            self._check_spaces(i)
            with self._told(i, 0):
                first = self._envs[i].reset(seed=self._task.seeds[i])
            self._begin(i, *first)
        self._current[0] = -1

    def _check_spaces(self, index: int) -> None:
        first, other = self._envs[0], self._envs[index]
        for what in ("observation_space", "action_space"):
            if getattr(other, what) != getattr(first, what):
                ids = self._task.ids
                raise ConfigError(
                    f"env.id {self._task.env_id}: environment {ids[index]} has the {what} "
                    f"{getattr(other, what)}, but environment {ids[0]} {getattr(first, what)}"
                )

    def reset(self) -> None:
        for i, env in enumerate(self._envs):
            self._current[0] = i
            with self._told(i, 0):
                first = env.reset()
            self._begin(i, *first)
        self._current[0] = -1

    def _begin(self, index: int, obs: Any, info: dict[str, Any]) -> None:
        self._over[index] = False
        with self._told(index, 0):
            self._answer(index, obs, 0.0, False, False, info)
        self._episode_step[index] = 0

    def _step_all(self) -> None:
        for i, env in enumerate(self._envs):
            self._current[0] = i  # should the process die or hang in there
            step = 0 if self._over[i] else int(self._episode_step[i]) + 1
            self._episode_step[i] = step
            try:
                if step:  # a copy: environments keep actions, and the next ones come here
                    self._answer(i, *env.step(self._action[i].copy()))
                else:
                    obs, info = env.reset()
                    self._answer(i, obs, 0.0, False, False, info)
            except BaseException as error:  # SystemExit too: it must not end the worker unheard
                tell(whereabouts(self._task, i, step), error)

    def _answer(
        self, i: int, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> None:
        mask = info.get(MASK) if self._mask_in_info else None
        for path, value in self._seen(obs, mask, ()).items():
            if path in self._leaves:
                write_leaf(self._leaves[path][i, ...], value, path)
        self._reward[i] = reward
        self._terminated[i], self._truncated[i] = terminated, truncated
        self._over[i] = bool(terminated or truncated)

    def render(self) -> np.ndarray:
        with self._told(0, int(self._episode_step[0])):
            return picture(self._envs[0].render, self._task.env_id)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    @contextmanager
    def _told(self, index: int, step: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            tell(whereabouts(self._task, index, step), error)


class VectorHost(Host):
    """A vector environment, taken as it is."""

    def __init__(self, task: Task, entry: making.Entry):
        super().__init__(task, entry)
        self._steps = 0
        self._env = making.make_vector(entry, task.options, task.wrap, len(task.ids))
        with self._told():
            self._first = self._env.reset(seed=list(task.seeds))
        mask = self._first[1].get(MASK)
        self.obs_space = self._with_mask(
            self._env.single_observation_space, None if mask is None else np.asarray(mask)[0]
        )
        self.action_space = self._env.single_action_space

    def attach(self, arrays: Arrays) -> None:
        super().attach(arrays)
        obs, info = self._first
        with self._told():
            self._answer(obs, 0.0, False, False, info)
        self._current[0] = -1

    def reset(self) -> None:
        self._current[0] = 0
        with self._told():
            obs, info = self._env.reset()
            self._answer(obs, 0.0, False, False, info)
        self._current[0] = -1

    def _step_all(self) -> None:
        self._current[0] = 0
        self._steps += 1
        self._episode_step[:] = self._steps  # of the run: it does not say when episodes end
        with self._told():
            self._answer(*self._env.step(self._action.copy()))

    def _answer(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        mask = info.get(MASK) if self._mask_in_info else None
        for path, value in self._seen(obs, mask, (len(self._task.ids),)).items():
            if path in self._leaves:
                write_leaf(self._leaves[path], value, path)
        self._reward[:], self._terminated[:] = reward, terminated
        self._truncated[:] = truncated

    def render(self) -> np.ndarray:
        with self._told():
            return picture(self._first_frame, self._task.env_id)

    def _first_frame(self) -> Any:
        frames = self._env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self._env.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        worker = "" if self._task.worker is None else f", worker {self._task.worker}"
        who = f"vector environment of {listed(self._task.ids)} (step {self._steps}{worker})"
        try:
            yield
        except BaseException as error:
            tell(who, error)


def make_host(task: Task) -> Host:
    """With its first environment, or its vector environment, made and reset."""
    entry = making.find_entry(task.env_id)
    return VectorHost(task, entry) if entry.is_vector else SingleHost(task, entry)


def tell(who: str, error: BaseException) -> NoReturn:
    """Raise it as an EnvError; what is about bad input, or told already, stays as it is."""
    if isinstance(error, (ConfigError, EnvError, KeyboardInterrupt)):
        raise error
    raise raised(who, error) from None  # the traceback is in there


def joined(mask: Any) -> np.ndarray:
    """Several choices may have a mask each, in a tuple."""
    if isinstance(mask, (tuple, list)):
        mask = np.concatenate([np.ravel(part) for part in mask])
    return np.asarray(mask, bool)


def write_leaf(room: np.ndarray, value: Any, path: str) -> None:
    """Numpy alone would repeat one number over a whole row without a word."""
    if isinstance(value, str):
        write_text(room, value)
        return
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        for row, text in zip(room, value, strict=True):
            write_text(row, text)
        return
    value = np.asarray(value)
    name = f" {path!r}" if path else ""
    if value.shape != room.shape:
        raise ValueError(
            f"the observation{name} has shape {value.shape}, but its space says {room.shape}"
        )
    if not np.can_cast(value.dtype, room.dtype, "same_kind"):
        raise ValueError(f"the observation{name} is {value.dtype}, but its space says {room.dtype}")
    room[...] = value


def write_text(room: np.ndarray, text: str) -> None:
    data = np.frombuffer(text.encode()[: len(room)], np.uint8)
    room[:] = 0
    room[: len(data)] = data


def picture(render: Callable[[], Any], env_id: str) -> np.ndarray:
    try:
        frame = render()
    except NotImplementedError:
        frame = None
    if isinstance(frame, list) and frame:
        frame = frame[-1]  # render_mode rgb_array_list: all since the last call
    if not isinstance(frame, np.ndarray):
        raise ConfigError(
            f"env.id {env_id} draws no picture: its render() must return an array, as asked for by "
            'render_mode="rgb_array"'
        )
    return frame

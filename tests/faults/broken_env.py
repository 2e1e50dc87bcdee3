"""A Gymnasium environment that breaks: `--env.id tests.faults.broken_env:Broken-v0`.

CartPole until, on one rank, in a chosen step of a chosen update, it does what `fault` says. The
moment is written to `marks/fault`: a trial without that file has tried nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from spmdrl.parallel.topology import detect

__all__ = ["Broken", "write_mark"]


def write_mark(marks: str, update: int) -> None:
    """When, and in which update, the fault happens; the first time counts."""
    file = Path(marks, "fault")
    if not file.exists():
        file.write_text(json.dumps({"time": time.time(), "update": update}))


def _raise() -> None:
    raise RuntimeError("the environment broke")


def _take_memory() -> None:
    """More than there is, in a process that may not have it: as if the machine had no more."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
    held = []
    try:
        while True:
            held.append(bytearray(16 << 20))
    except MemoryError:
        held.clear()  # else none would be left for the report
        raise


def _sleep() -> None:
    while True:
        time.sleep(1.0)


# These give no answer any more.
ENDS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(0),
    "_exit": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "sleep": _sleep,
    "memory": _take_memory,
    "_exit 3": lambda: os._exit(3),
}
ANSWERS = ("nan-obs", "nan-reward")  # these do, a wrong one


class Broken(CartPoleEnv):
    """One of a rank's environments; steps count from 0, automatic resets included."""

    def __init__(self, fault: str, rank: int, update: int, step: int, num_steps: int, marks: str):
        super().__init__()
        if fault not in (*ENDS, *ANSWERS):
            raise ValueError(f"unknown fault {fault!r}")
        self._fault, self._marks, self._num_steps = fault, marks, num_steps
        self._moment = update * num_steps + step if detect().rank == rank else None
        self._count = -2  # the first reset is no step

    def reset(self, **kwargs: Any) -> Any:
        self._count += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._count += 1
        obs, reward, terminated, truncated, info = super().step(action)
        # What follows the end of an episode is thrown away, so take the next step instead.
        if self._moment is None or self._count < self._moment or terminated:
            return obs, reward, terminated, truncated, info
        self._moment = None
        self._break()
        if self._fault == "nan-obs":
            obs[0] = float("nan")
        elif self._fault == "nan-reward":
            reward = float("nan")
        return obs, reward, terminated, truncated, info

    def _break(self) -> None:
        write_mark(self._marks, self._count // self._num_steps)
        if self._fault in ENDS:
            ENDS[self._fault]()


gym.register("Broken-v0", entry_point=lambda **given: Broken(**given), max_episode_steps=500)

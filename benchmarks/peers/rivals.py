"""The programs that spmdrl is compared with: where they come from, how one run of them is read.

Each has a script in `references/` and a virtual environment of its own, with the versions pinned
here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.venvs import Venv, last_line
from benchmarks.peers.references.work import Work

__all__ = ["PEERS", "REFERENCES", "Peer", "RunFailed", "read_rate", "read_updates"]

REFERENCES = Path(__file__).resolve().parent / "references"
TIMEOUT_S = 600
TORCH = "torch==2.13.0"
JAX = ("jax==0.10.2", "flax==0.12.8", "optax==0.2.8")


Settings = dict[str, tuple[str, ...]]  # names, and the flags of the script


class RunFailed(RuntimeError):
    """The message is one line that says why."""


@dataclass(frozen=True)
class Peer:
    """A program, and the settings among which the faster is taken."""

    name: str
    venv: Venv
    script: str
    flags: tuple[str, ...] = ()
    settings: Settings = field(default_factory=lambda: {"": ()})

    def run(self, work: Work, setting: str, cores: Sequence[int]) -> float:
        """Steps per second of the updates after the first `skip`."""
        command = [
            "taskset", "-c", ",".join(str(core) for core in cores), str(self.venv.python),
            str(REFERENCES / self.script), *work.flags(), *self.flags, *self.settings[setting],
        ]  # fmt: skip
        return read_rate(_output(command), work)

    def versions(self) -> dict[str, str]:
        """Of the packages that were asked for, and of PyTorch or JAX."""
        names = {package.partition("==")[0].partition("[")[0] for package in self.venv.packages}
        return {k: v for k, v in sorted(self.venv.versions().items()) if k in names}


def _output(command: Sequence[str]) -> str:
    # PYTHONPATH would put this environment's packages before the peer's own.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"no end after {TIMEOUT_S} s") from error
    if answer.returncode != 0:
        raise RunFailed(last_line(answer.stderr) or f"exit code {answer.returncode}")
    return answer.stdout


def read_updates(text: str) -> list[dict[str, Any]]:
    """The lines about updates; libraries print other things as well."""
    found = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"update", "steps", "seconds"} <= row.keys():
            found.append(row)
    return found


def read_rate(text: str, work: Work) -> float:
    """All steps over all seconds; what an asynchronous trainer does after the end is left out."""
    rows = read_updates(text)
    if len(rows) < work.all_updates:
        raise RunFailed(f"reported {len(rows)} of {work.all_updates} updates")
    kept = rows[work.skip : work.all_updates]
    return _sum(kept, "steps") / _sum(kept, "seconds")


def _sum(rows: Iterable[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows)


VECTORS: Settings = {"DummyVecEnv": ("--vector", "dummy"), "SubprocVecEnv": ("--vector", "subproc")}

TORCH_VENV = Venv("torch", (TORCH, "envpool==1.2.5", "gymnasium==1.4.0", "numpy==2.4.6"))
PEERS = {
    peer.name: peer
    for peer in [
        Peer(
            "SB3",
            Venv("sb3", ("stable-baselines3==2.9.2", TORCH, "gymnasium==1.4.0", "numpy==2.4.6")),
            "sb3_ppo.py",
            settings=VECTORS,
        ),
        Peer(
            "SBX",
            Venv(
                "sbx",
                (
                    "sbx-rl==0.28.0", "stable-baselines3==2.9.2", *JAX, TORCH,
                    "gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "numpy==2.4.6",
                ),
            ),
            "sb3_ppo.py",
            flags=("--library", "sbx"),
            settings=VECTORS,
        ),
        Peer(
            "RLlib",
            Venv("rllib", ("ray[rllib]==2.60.0", TORCH, "gymnasium==1.2.2", "numpy==2.4.6")),
            "rllib_ppo.py",
            settings={"no runner process": ("--runners", "0"), "2 runners": ("--runners", "2")},
        ),
        Peer(
            "Sample Factory",
            Venv(
                "sample-factory",
                ("sample-factory==2.1.1", TORCH, "gymnasium==0.29.1", "numpy==1.26.4"),
            ),
            "sample_factory_ppo.py",
            settings={"parallel": ("--mode", "parallel"), "serial": ("--mode", "serial")},
        ),
        Peer(
            "torch reference",
            TORCH_VENV,
            "torch_ppo.py",
            settings={"1 thread": ("--threads", "1"), "2 threads": ("--threads", "2")},
        ),
        Peer(
            "torch, channels last",  # not plain any more, but PyTorch's advice for CPUs
            TORCH_VENV,
            "torch_ppo.py",
            flags=("--channels-last",),
            settings={"2 threads": ("--threads", "2")},
        ),
        Peer(
            "gymnax reference",
            Venv("gymnax", ("gymnax==1.0.1", *JAX, "six==1.17.0")),  # which it needs, unsaid
            "gymnax_ppo.py",
        ),
    ]
}  # fmt: skip

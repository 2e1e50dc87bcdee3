"""Where and how a rank is broken, and the command that starts such a job."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.parallel.spawn import mpirun_command
from tests.children import CARTPOLE, ROOT
from tests.faults.judge import PHASES

__all__ = ["PHASE_LIMIT", "PLACES", "Place", "command", "environment", "places_of"]

PHASE_LIMIT = 4.0
NUM_STEPS = 16
# Programs hold addresses of their process. Where these are the same each time, they need not be
# compiled again for every one of some hundred trials.
SAME_ADDRESSES = ["setarch", "-R"]
if not shutil.which("setarch") or subprocess.run(["setarch", "-R", "true"]).returncode != 0:
    SAME_ADDRESSES = []  # some containers do not allow it
SIZES = [
    "--env.num-envs", "8", "--env.threads", "1", "--algo.num-steps", str(NUM_STEPS),
    "--total-steps", "12800000", "--net.hidden", "16", "--checkpoint.every", "5",
    "--sync.check-every", "1", "--sync.phase-timeout-s", str(PHASE_LIMIT), "--log.panel", "off",
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """How a fault of this kind is made, and what the report about it must say."""

    name: str
    kind: str
    by: str  # environment | hook (faulty.py) | signal (from outside) | shell (around a rank)
    phases: tuple[str, ...]
    says: str = ""
    whom: str = "any rank"  # or: rank 0, not rank 0
    step: int | None = None  # of the rollout; else a random one
    turns: int = 1  # of each round of trials of this kind

    def choose_rank(self, ranks: int, rng: random.Random) -> int:
        first, last = {"any rank": (0, ranks), "rank 0": (0, 1), "not rank 0": (1, ranks)}[
            self.whom
        ]
        return rng.randrange(first, last)


PLACES = [
    Place("SIGKILL", "death", "signal", PHASES, turns=2),
    Place("segfault", "death", "environment", ("collect",)),
    Place("_exit", "death", "environment", ("collect",)),
    Place("raise", "exception", "environment", ("collect",), "RuntimeError: the environment broke"),
    Place("memory", "exception", "environment", ("collect",), "MemoryError"),
    Place("exit", "exception", "environment", ("collect",), "SystemExit: 0"),
    Place("learner", "exception", "hook", ("update",), "RuntimeError: the learner broke"),
    Place("logger", "exception", "hook", ("update", "log"), "OSError: the logger broke", "rank 0"),
    Place("SIGSTOP", "hang", "signal", PHASES[1:]),
    Place("sleep", "hang", "environment", ("collect",)),
    Place("nan-obs", "not finite", "environment", ("update",), "observation"),
    # What the last step returns is the first observation of the next rollout: a place of its own.
    Place(
        "nan-obs-last", "not finite", "environment", ("update",), "observation", step=NUM_STEPS - 1
    ),
    Place("nan-reward", "not finite", "environment", ("update",), "reward"),
    Place("nan-output", "not finite", "hook", ("update",), "network output"),
    Place("nan-gradient", "not finite", "hook", ("update",), "gradient"),
    Place("bit", "flipped bit", "hook", ("check",)),
    Place("config", "different config", "shell", ("start",), "command line", "not rank 0"),
    Place("version", "different jax", "shell", ("start",), "versions", "not rank 0"),
]


def places_of(kind: str) -> list[Place]:
    """In the order in which they take turns."""
    return [place for place in PLACES if place.kind == kind for _ in range(place.turns)]


def command(place: Place, ranks: int, rank: int, rng: random.Random, folder: Path) -> list[str]:
    """The job, its fault included where that is not a signal from outside."""
    update = rng.randrange(2, 12)
    step = rng.randrange(NUM_STEPS) if place.step is None else place.step
    arguments = [CARTPOLE, *SIZES, "--run-dir", str(folder / "run")]
    program = [sys.executable, "-m", "spmdrl.train"]
    if place.by == "hook":
        fault = [place.name, str(rank), str(update), str(folder)]
        program = [sys.executable, "-m", "tests.faults.faulty", *fault]
    elif place.by == "environment":
        arguments += _broken_env(place.name.removesuffix("-last"), rank, update, step, folder)
    elif place.by == "shell":
        program = [*_shell(place.name, rank, folder), *program]
    return [*SAME_ADDRESSES, *mpirun_command(ranks), *program, *arguments]


def _broken_env(fault: str, rank: int, update: int, step: int, folder: Path) -> Sequence[str]:
    options = {
        "fault": fault, "rank": rank, "update": update, "step": step, "num_steps": NUM_STEPS,
        "marks": folder,
    }  # fmt: skip
    pairs = [str(text) for pair in options.items() for text in pair]
    return [
        "--env.backend",
        "gymnasium",
        "--env.id",
        "tests.faults.broken_env:Broken-v0",
        "--env.workers",
        "inline",  # what breaks is the rank itself
        "--env.options",
        *pairs,
    ]


def _shell(fault: str, rank: int, folder: Path) -> Sequence[str]:
    """A shell around every rank that starts one of them in another way."""
    metadata = folder / "jax-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.0.1\n")
    otherwise = {
        "config": 'set -- "$@" --seed 77',
        "version": f'export PYTHONPATH="{folder}:$PYTHONPATH"',  # that jax is found first
    }[fault]
    mark = f"""date +'{{"time": %s.%N, "update": 0}}' > {folder}/fault"""
    script = f'if [ "$OMPI_COMM_WORLD_RANK" = {rank} ]; then {mark}; {otherwise}; fi; exec "$@"'
    return ["sh", "-c", script, "sh"]


def environment(base: dict[str, str]) -> dict[str, str]:
    """Every rank must find the broken environment."""
    return base | {"PYTHONPATH": f"{ROOT}:{base.get('PYTHONPATH', '')}"}

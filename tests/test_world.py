"""Ranks that talk to each other, under mpirun: sums, groups, what rank 0 decides, thread levels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmdrl.config import SyncConfig
from spmdrl.parallel.guards import KINDS, NotFinite, NotFiniteError, OutOfSync
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.parallel.world import World, abort_all

SUITE = Path(__file__).with_name("spmd")


def mpirun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*mpirun_command(ranks), sys.executable, *command],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "which", "least"),
    [
        (2, "not learns", 26),
        pytest.param(3, "not learns", 26, marks=pytest.mark.slow),
        pytest.param(2, "learns", 3, marks=pytest.mark.slow),
    ],
)
def test_suite_under_mpirun(ranks, which, least):
    options = ["-p", "no:cacheprovider", "-x", "--color=no", "-k", which]
    files = [str(SUITE / "test_mpi.py"), str(SUITE / "test_api.py")]
    done = mpirun(ranks, "-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    passed = [int(n) for n in re.findall(r"(\d+) passed", done.stdout)]
    assert len(passed) == ranks
    assert min(passed) >= least  # a suite that skips everything would pass too


# ---------------------------------------------------------------------------------------------
# What MPI provides

LEVELS = """
from spmdrl.parallel import world as w
from spmdrl.parallel.topology import detect
if "{level}" != "multiple":
    w._wanted_level = lambda MPI: MPI.THREAD_{level}
world = w.connect(detect())
print("level", world.rank, world.thread_level, world.has_threads, flush=True)
"""


def test_an_mpi_without_threads_is_said_once():
    done = mpirun(2, "-c", LEVELS.format(level="FUNNELED"))
    assert done.returncode == 0, done.stderr
    levels = re.findall(r"level \d (\w+) (\w+)", done.stdout)
    if levels[0][0] == "multiple":
        pytest.skip("this MPI provides more than it is asked for")
    assert levels == [("funneled", "False")] * 2
    assert done.stderr.count("provides MPI_THREAD_FUNNELED only") == 1


def test_an_mpi_with_threads_is_not_worth_a_word():
    done = mpirun(2, "-c", LEVELS.format(level="multiple"))
    assert re.findall(r"level \d (\w+) (\w+)", done.stdout) == [("multiple", "True")] * 2
    assert "MPI_THREAD" not in done.stderr


# ---------------------------------------------------------------------------------------------
# The end of everyone

ABORT = """
import time
from spmdrl.parallel.topology import detect
from spmdrl.parallel.world import abort_all, connect
world = connect(detect())
part = world.split([world.rank])
if world.rank == 1:
    abort_all(part, 7)  # the only one of its group, but not of the job
time.sleep(60)
"""


def test_a_rank_of_a_group_of_one_ends_the_whole_job():
    assert mpirun(2, "-c", ABORT).returncode == 7


def test_alone_the_exit_code_is_returned():
    assert abort_all(World(), 5, after_s=60.0) == 5


# ---------------------------------------------------------------------------------------------
# Numbers that are not finite: [kinds, devices] flags of 2 ranks x 2 devices


def flags(**devices: list[int]) -> np.ndarray:
    bad = np.zeros((len(KINDS), 4), np.float32)
    for kind, places in devices.items():
        bad[KINDS.index(kind.replace("_", " ")), places] = 1.0
    return bad


@pytest.mark.parametrize(
    ("bad", "said", "ranks"),
    [
        (flags(gradient=[3]), "non-finite gradient on rank 1 in update 7; ", [1]),
        (flags(gradient=[0, 2]), "non-finite gradient on ranks 0, 1 in update 7; ", [0, 1]),
        (flags(reward=[2, 3]), "non-finite reward on rank 1 in update 7; ", [1]),
        # One rank's observation spoils every rank's gradient.
        (
            flags(observation=[2], network_output=[2], gradient=[0, 1, 2, 3]),
            "non-finite observation on rank 1 in update 7; ",
            [1],
        ),
        (
            flags(network_output=[0], gradient=[0, 1, 2, 3]),
            "non-finite network output on rank 0 in update 7; ",
            [0],
        ),
    ],
)
def test_the_first_kind_decides_who_is_named(bad, said, ranks):
    with pytest.raises(NotFiniteError) as error:
        NotFinite(SyncConfig(), devices=2).check(bad, step=7)
    assert str(error.value).startswith(said)
    assert "--sync.on-nonfinite skip" in str(error.value)
    assert error.value.ranks == ranks


def test_skipped_updates_are_counted_in_a_row():
    guard = NotFinite(SyncConfig(on_nonfinite="skip", max_skips=2), devices=2)
    bad = flags(reward=[1])
    guard.check(bad, step=0)
    guard.check(flags(), step=1)
    guard.check(bad, step=2)
    with pytest.raises(NotFiniteError, match="non-finite reward on rank 0 in update 3, the last"):
        guard.check(bad, step=3)


def test_flags_without_kinds_are_a_mistake():
    with pytest.raises(AssertionError):
        NotFinite(SyncConfig(), devices=2).check(np.zeros(4), step=0)


def test_guilty_ranks_travel_with_the_error():
    assert OutOfSync("parameters differ", [2, 0]).ranks == [2, 0]

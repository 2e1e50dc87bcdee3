"""Who is named when something is wrong: the odd one, the killed one, the late one."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from spmdrl.parallel.guards import minority
from spmdrl.parallel.job_folder import start_folder
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.runtime import watchdog as watchdog_module
from spmdrl.runtime.watchdog import Watchdog


@pytest.mark.parametrize(
    ("found", "odd"),
    [
        ({"rank 0": 7}, []),
        ({"rank 0": 7, "rank 1": 7}, []),
        ({"rank 0": 7, "rank 1": 7, "rank 2": 8}, ["rank 2"]),
        ({"rank 0": 8, "rank 1": 7, "rank 2": 7}, ["rank 0"]),
        ({"rank 0": 7, "rank 1": 8}, ["rank 0", "rank 1"]),  # nobody can tell which
        ({"a": 7, "b": 7, "c": 8, "d": 8}, ["a", "b", "c", "d"]),
    ],
)
def test_the_minority_differs_and_everybody_where_there_is_none(found, odd):
    assert minority(found) == odd


# ---------------------------------------------------------------------------------------------
# Killed


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def beat(folder, rank: int, pid: int, host: str | None = None) -> None:
    sign = {
        "time": time.time(), "update": 12, "phase": "collect", "pid": pid,
        "host": host or socket.gethostname(),
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(sign))


def alive() -> int:
    return 1  # init is there on every machine


def test_a_killed_rank_is_named_with_its_phase(tmp_path, dead_pid, capsys):
    beat(tmp_path, 0, alive())
    beat(tmp_path, 1, dead_pid)
    Watchdog(0, 2, tmp_path)._report_killed()
    said = capsys.readouterr().err
    assert "rank 1 of 2" in said
    assert "update 12, phase collect" in said


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_only_the_first_survivor_speaks(dead, tmp_path, dead_pid, capsys):
    for rank in range(4):
        beat(tmp_path, rank, dead_pid if rank == dead else alive())
    survivors = [rank for rank in range(4) if rank != dead]
    for rank in survivors:
        Watchdog(rank, 4, tmp_path)._report_killed()
        said = capsys.readouterr().err
        assert said.count(f"rank {dead} of 4") == (rank == survivors[0])


def test_ranks_that_ended_with_a_reported_hang_were_not_killed(tmp_path, dead_pid, capsys):
    beat(tmp_path, 0, alive())
    beat(tmp_path, 1, dead_pid)
    watchdog = Watchdog(0, 2, tmp_path)
    assert watchdog._first_to_tell()
    watchdog._report_killed()
    assert capsys.readouterr().err == ""


def test_every_host_reports_a_hang_once(tmp_path, monkeypatch):
    """What the other host said is lost when the link between them is what broke."""
    told: list[bool] = []
    for host in ("n1", "n1", "n2", "n2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        told.append(Watchdog(len(told), 4, tmp_path)._first_to_tell())
    assert told == [True, False, True, False]


def test_a_rank_that_left_in_order_or_lives_elsewhere_was_not_killed(tmp_path, dead_pid, capsys):
    beat(tmp_path, 0, alive())
    beat(tmp_path, 2, dead_pid, host="another")
    watchdog = Watchdog(0, 3, tmp_path)
    watchdog.enter("collect", 12, 60.0)
    watchdog._report_killed()  # rank 1 has no file
    assert capsys.readouterr().err == ""


def test_a_rank_killed_before_its_first_sign_of_life_leaves_the_phase_at_least(tmp_path, capsys):
    beat(tmp_path, 1, alive())
    Watchdog(1, 2, tmp_path)._report_killed()  # the launcher names rank 0
    assert "phase start" in capsys.readouterr().err


def test_a_rank_killed_before_there_is_a_run_is_named_by_one_that_has_come_further(
    tmp_path, dead_pid, capsys
):
    start, run = tmp_path / "start", tmp_path / "run"
    watchdog = Watchdog(0, 2, start)
    start.mkdir()
    beat(start, 0, alive())
    beat(start, 1, dead_pid)
    watchdog.move(run)
    watchdog.stop()
    assert sorted(file.name for file in start.iterdir()) == ["rank-0.now", "rank-1.json"]
    watchdog._report_killed()
    assert "rank 1 of 2" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# Where the first heartbeats are kept

JOB = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


@pytest.fixture
def user(tmp_path, monkeypatch):
    """The environment of a user with a home and a place of his own for the session."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    return JOB | {
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_ranks_of_a_job_meet_in_a_folder_of_their_own(user, tmp_path):
    folder = start_folder(user)
    assert folder is not None
    assert folder.name == "job-17.0"
    assert folder.is_relative_to(tmp_path / "run")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert start_folder(user) == folder  # the next rank
    other = start_folder(user | {"PMIX_NAMESPACE": "prterun-a@1"})
    assert other is not None
    assert other.name == "job-prterun-a-1"


def test_without_a_job_there_is_no_folder(user):
    assert start_folder({k: v for k, v in user.items() if k not in JOB}) is None


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_the_cache_serves_where_the_runtime_directory_is_not_private(user, tmp_path, mode):
    (tmp_path / "run").chmod(mode)
    folder = start_folder(user)
    assert folder is not None
    assert folder.is_relative_to(tmp_path / "cache")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_nothing_is_put_into_the_shared_temporary_directory(user, tmp_path):
    for leave_out in ("XDG_RUNTIME_DIR", "none of them"):
        folder = start_folder({k: v for k, v in user.items() if k != leave_out})
        Watchdog(0, 2, folder).start().stop()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_planted_link_is_not_followed(user, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "planted").mkdir()
    (tmp_path / "run" / "spmdrl").symlink_to(tmp_path / "planted")
    assert start_folder(user) is None
    (tmp_path / "run" / "spmdrl").unlink()

    folder = start_folder(user)
    assert folder is not None
    for name in ("rank-0.tmp", "rank-0.json"):
        (folder / name).symlink_to(victim)
    Watchdog(0, 2, folder)._beat()
    assert victim.read_text() == "precious"
    assert json.loads((folder / "rank-0.json").read_text())["phase"] == "start"


def test_a_beat_behind_a_link_is_not_read(tmp_path):
    beat(tmp_path, 0, alive())
    (tmp_path / "rank-1.json").symlink_to(tmp_path / "rank-0.json")
    watchdog = Watchdog(0, 2, tmp_path)
    assert watchdog._read(0) is not None
    assert watchdog._read(1) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("whose", ["spmdrl", "spmdrl/jobs", "spmdrl/jobs/job-17.0"])
def test_a_folder_of_somebody_else_is_not_used(user, tmp_path, whose):
    start_folder(user)
    os.chown(tmp_path / "run" / whose, 65534, 65534)
    assert start_folder(user) is None


def test_folders_of_killed_jobs_are_dropped_after_a_day(user):
    old = start_folder(user)
    assert old is not None
    beat(old, 0, alive())
    yesterday = time.time() - 2 * 86400
    os.utime(old, (yesterday, yesterday))
    start_folder(user | {"SLURM_STEP_ID": "1"})
    assert old.exists()  # a rank of it has just been at work
    os.utime(old / "rank-0.json", (yesterday, yesterday))
    start_folder(user | {"SLURM_STEP_ID": "1"})
    assert not old.exists()


# ---------------------------------------------------------------------------------------------
# Late

MEETING = """
import sys, time
from spmdrl.parallel import world as w
from spmdrl.parallel.topology import LaunchError, detect
w.SAY_EVERY_S = 0.3
world = w.connect(detect())
if world.rank in (1, 2):
    time.sleep({late})
try:
    print(world.assemble({{"rank": world.rank}}, {limit}), flush=True)
except LaunchError as error:
    print(error, flush=True)
    world.abort(3)
"""


def meet(late: float, limit: float) -> subprocess.CompletedProcess[str]:
    script = MEETING.format(late=late, limit=limit)
    command = [*mpirun_command(3), sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


EARLY = """
import time
from spmdrl.parallel import world as w
from spmdrl.parallel.topology import detect
w.SAY_EVERY_S = 0.3
topology = detect()
time.sleep(2.0 * topology.rank)
w.connect(topology)
print("together", flush=True)
"""


def test_waiting_is_said_while_mpi_itself_waits_for_a_process():
    command = [*mpirun_command(2), sys.executable, "-c", EARLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    before, _, _ = done.stdout.partition("together")
    assert before.count("waiting for MPI: some ranks have not started") > 3, done.stdout


def test_late_ranks_are_named_while_the_others_wait():
    done = meet(late=1.0, limit=30.0)
    assert done.returncode == 0, done.stderr
    assert "waiting for ranks 1, 2 (" in done.stdout
    everyone = str([{"rank": r} for r in range(3)])
    assert done.stdout.count(everyone) == 3


def test_a_rank_that_never_comes_ends_the_job():
    done = meet(late=20.0, limit=0.5)
    assert done.returncode == 3
    assert "ranks 1, 2 (of 3) did not start within" in done.stdout
    assert "--sync.start-timeout-s" in done.stdout


def test_a_clock_that_is_off_does_not_make_a_rank_guilty(tmp_path, monkeypatch):
    """Rank 1's clock is ten minutes behind and it beats; rank 2's is right, and it is silent."""
    monkeypatch.setattr(watchdog_module, "LISTENING_S", 0.5)
    watchdog = Watchdog(0, 3, tmp_path)
    watchdog.INTERVAL = 0.1
    watchdog.enter("wait", 7, 60.0)
    watchdog._beat()
    over = threading.Event()

    def beat(rank: int, skew: float) -> None:
        record = {"time": time.time() + skew, "update": 7, "phase": "wait", "host": "x", "pid": 1}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(record))

    def keep_beating() -> None:
        while not over.wait(0.1):
            beat(1, -600.0)

    beat(1, -600.0)
    beat(2, 0.0)
    thread = threading.Thread(target=keep_beating)
    thread.start()
    try:
        said = watchdog._laggard()
    finally:
        over.set()
        thread.join()
    assert said.startswith("Rank 2 has been silent")

"""Two jobs never work in one run directory: real processes, at once and one after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.runtime import lock, rundir
from spmdrl.runtime.rundir import check_run_dir, close_run, open_run
from tests.children import ROOT, train_command

OWNER = """
import os, sys, time
from spmdrl.config import Config
from spmdrl.runtime.rundir import open_run
open_run(Config(run_dir=sys.argv[1]))
if len(sys.argv) > 3 and os.fork() == 0:  # a worker, as simulators start them
    time.sleep(60)
print("open", flush=True)
time.sleep(float(sys.argv[2]))
"""


def config_in(folder: Path, **changes: object) -> Config:
    return Config(run_dir=str(folder), **changes)  # type: ignore[arg-type]


def start_owner(folder: Path, seconds: float = 60.0, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(folder), str(seconds), *more]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "open\n"
    return owner


def is_refused(folder: Path) -> bool:
    """Another process that would open the directory, and give it back at once."""
    command = [sys.executable, "-c", OWNER, str(folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "is in use by pid" in done.stderr


def end(process: subprocess.Popen[str]) -> None:
    """With the workers that it may have started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def owned(tmp_path):
    """A run directory in which another process works."""
    folder = tmp_path / "run"
    owner = start_owner(folder)
    yield folder, owner
    end(owner)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in folder.parent.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.mark.parametrize("attempt", [check_run_dir, open_run])
@pytest.mark.parametrize("changes", [{}, {"restart": True}, {"env": EnvConfig(num_envs=16)}])
def test_the_second_is_refused_and_changes_nothing(owned, attempt, changes):
    folder, owner = owned
    before = content(folder)
    with pytest.raises(ConfigError) as refusal:
        attempt(config_in(folder, **changes))
    said = str(refusal.value)
    assert f"run_dir {folder} is in use by pid {owner.pid} on {socket.gethostname()}" in said
    assert "since 20" in said
    assert "choose another --run-dir" in said
    assert content(folder) == before


def test_the_slurm_job_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = start_owner(tmp_path / "run")
    try:
        with pytest.raises(ConfigError, match=r"\(Slurm job 4711\)"):
            check_run_dir(config_in(tmp_path / "run"))
    finally:
        end(owner)


def test_what_a_killed_owner_leaves_is_taken_over_without_a_word(tmp_path, capfd):
    folder = tmp_path / "run"
    owner = start_owner(folder, 60.0, "with a worker")
    owner.kill()
    owner.wait()
    run = open_run(config_in(folder))  # while the worker lives
    close_run(run)
    end(owner)
    assert run.resumed
    assert capfd.readouterr().err == ""


def test_a_directory_that_was_closed_can_be_opened_by_another_process(tmp_path):
    run = open_run(config_in(tmp_path / "run"))
    assert is_refused(run.path)
    close_run(run)
    assert not is_refused(run.path)


def test_looking_at_its_own_directory_does_not_give_it_up(tmp_path):
    """POSIX locks end as soon as any descriptor of the file is closed."""
    run = open_run(config_in(tmp_path / "run"))
    check_run_dir(config_in(run.path))
    open_run(config_in(run.path))
    assert is_refused(run.path)
    close_run(run)


def test_a_config_refused_after_the_lock_was_taken_does_not_keep_it(tmp_path, monkeypatch):
    close_run(open_run(config_in(tmp_path / "run")))
    monkeypatch.setattr(rundir, "check_run_dir", lambda config: None)  # which came too early
    with pytest.raises(ConfigError, match="another config"):
        open_run(config_in(tmp_path / "run", seed=7))
    assert not is_refused(tmp_path / "run")


def test_a_requeued_job_waits_for_the_one_before(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    owner = start_owner(tmp_path / "run", seconds=1.0)
    try:
        assert open_run(config_in(tmp_path / "run")).resumed
        assert f"waiting for pid {owner.pid}" in capsys.readouterr().err
        lock.release(tmp_path / "run")
    finally:
        end(owner)


def test_a_requeued_job_does_not_wait_for_ever(owned, monkeypatch):
    folder, _ = owned
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(lock, "REQUEUE_WAIT_S", 0.5)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="in use"):
        check_run_dir(config_in(folder))
    assert 0.5 <= time.monotonic() - started < 5.0


def test_a_restart_moves_the_old_run_aside_and_locks_the_new_one(tmp_path):
    close_run(open_run(config_in(tmp_path / "run")))
    run = open_run(config_in(tmp_path / "run", restart=True))
    assert not run.resumed
    assert len(list(tmp_path.glob("run.before-*"))) == 1
    assert is_refused(run.path)
    close_run(run)


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.LOCK_NAME).symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_run(config_in(tmp_path / "run"))
    assert victim.read_text() == "precious"


# ---------------------------------------------------------------------------------------------
# Whole trainings


def train(folder: Path) -> subprocess.Popen[str]:
    sizes = ["--env.num-envs", "8", "--algo.num-steps", "16", "--net.hidden", "16"]
    forever = ["--total-steps", "100000000", "--log.every", "1", "--checkpoint.every", "10"]
    return subprocess.Popen(
        train_command("--nprocs", 1, *sizes, *forever, "--run-dir", folder), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def updates(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(n)["progress/update"] for n in lines if n.endswith("\n")]


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def wait_for_updates(folder: Path, count: int) -> None:
    wait_for(lambda: len(updates(folder)) >= count)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("offset", [0.0, 0.4, 4.0])
def test_of_two_starts_one_trains(tmp_path, offset):
    folder = tmp_path / "run"
    both = [train(folder)]
    time.sleep(offset)
    both.append(train(folder))
    try:
        wait_for_updates(folder, 20)
        wait_for(lambda: any(process.poll() is not None for process in both))
        (loser,) = [process for process in both if process.poll() is not None]
        (winner,) = [process for process in both if process is not loser]
        assert loser.returncode == 2
        said = loser.communicate()[1]
        assert re.fullmatch(rf"spmdrl: run_dir \S+ is in use by pid {winner.pid} on .*\n", said)
        reached = updates(folder)
        assert reached == list(range(1, len(reached) + 1))
        os.killpg(winner.pid, signal.SIGKILL)
        winner.wait()
        again = train(folder)  # at once, over the lock file of the dead one
        both.append(again)
        wait_for_updates(folder, len(updates(folder)) + 20)
        assert again.poll() is None
    finally:
        for process in both:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

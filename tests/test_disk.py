"""A full disk: training continues and says so, and what was saved before stays whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from spmdrl.runtime.checkpoint import Checkpointer
from spmdrl.runtime.logger import AppendFile
from tests.children import ROOT, train_command
from tests.faults.kills import outcome

SIZES = [
    "--env.num-envs", "8", "--algo.num-steps", "16", "--net.hidden", "16", "--log.panel", "off",
    "--checkpoint.every", "40", "--total-steps", str(8 * 16 * 400),
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the same run gives where the disk is large enough."""
    run_dir = tmp_path_factory.mktemp("large") / "run"
    start(run_dir).communicate(timeout=100)
    return outcome(run_dir)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def start(run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        train_command(*SIZES, "--run-dir", run_dir), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
    )  # fmt: skip


def wait_for_rows(run_dir: Path, count: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        time.sleep(0.01)


def fill_while_it_trains(disk: Path) -> tuple[Path, subprocess.Popen[str], Path]:
    """`(run directory, training, what takes the room)`."""
    job = start(disk / "run")
    wait_for_rows(disk / "run", 90)
    return disk / "run", job, fill(disk)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as stream:
        try:
            while stream.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return filler


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_training_ends_after_three_failures_and_resumes_when_there_is_room(small_disk, undisturbed):
    run_dir, job, filler = fill_while_it_trains(small_disk)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 1
    assert "failure 1 of 3" in output
    assert "failure 2 of 3" in output
    assert "3 failures in a row" in output
    assert "No space left on device" in output
    assert "same command" in output

    checkpoints = Checkpointer(run_dir / "checkpoints", 3)
    before = checkpoints.restore(warn=pytest.fail)  # the newest one is whole
    assert before is not None
    assert before.step >= 80

    filler.unlink()
    job = start(run_dir)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert f"resumed at update {before.step}" in output
    assert outcome(run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_disk_that_is_full_for_a_while_costs_nothing(small_disk, undisturbed):
    run_dir, job, filler = fill_while_it_trains(small_disk)
    assert job.stdout is not None
    for line in job.stdout:
        if "failure 1 of 3" in line:
            filler.unlink()
            break
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert outcome(run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_directory_that_vanished_ends_the_run(tmp_path):
    run_dir = tmp_path / "run"
    job = start(run_dir)
    wait_for_rows(run_dir, 50)
    while not (run_dir / "checkpoints" / "update-00000040").exists():  # written in the background
        time.sleep(0.01)
    run_dir.rename(tmp_path / "elsewhere")
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 1
    assert "No such file or directory" in output
    assert not (run_dir / "checkpoints").exists()
    assert Checkpointer(tmp_path / "elsewhere" / "checkpoints", 3).restore(pytest.fail) is not None


def test_lines_refused_by_the_disk_are_written_later_and_never_in_part(small_disk):
    said = []
    file = AppendFile(small_disk / "rows", lambda path, error: said.append(error))
    file.append("first\n")
    filler = fill(small_disk)
    line = json.dumps({"n": "x" * 9000}) + "\n"
    file.append(line)
    file.append(line)
    assert len(said) == 1
    assert (small_disk / "rows").read_text() == "first\n"
    filler.unlink()
    file.append("last\n")
    assert (small_disk / "rows").read_text() == "first\n" + line + line + "last\n"
    file.close()

"""Side files of a run that are damaged, missing or something else: set aside and said, no more."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmdrl.config import CheckpointConfig, Config, ConfigError, LogConfig, to_json
from spmdrl.runtime import logger as logger_module
from spmdrl.runtime import rundir
from spmdrl.runtime.checkpoint import Checkpointer, CheckpointError, Snapshot, seal
from spmdrl.runtime.logger import Logger
from spmdrl.runtime.rundir import close_run, open_run
from spmdrl.runtime.saver import Saver
from tests.children import CARTPOLE, python


def restored_step(keeper: Checkpointer, say=lambda _: None) -> int:
    found = keeper.restore(say)
    assert found is not None
    return found.step


class Heard:
    """A console that keeps what it is told."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def show(self, row): ...
    def close(self, summary): ...


@pytest.fixture
def logger_in():
    """Makes loggers, and closes them."""
    made = []

    def make(folder: Path, **log) -> tuple[Logger, list[str]]:
        heard = Heard()
        made.append(Logger(Config(log=LogConfig(**log)), folder, "id", heard))
        return made[-1], heard.said

    yield make
    for logger in made:
        logger._metrics.close()
        logger._log.close()


def row(update: int) -> bytes:
    return json.dumps({"progress/update": update, "progress/steps": update}).encode() + b"\n"


def snapshot(step: int, **meta) -> Snapshot:
    arrays = {"params": {"w": np.full(3, step, np.float32)}}
    return Snapshot(step, arrays, {"step": step, "return_mean": float(step), "segments": []} | meta)


# ---------------------------------------------------------------------------------------------
# metrics.jsonl


@pytest.mark.parametrize(
    "line",
    [b"\0" * 40 + b"}\n", b'{"progress/update": "\xff"}\n', b"{}\n", b'{"progress/update": null}\n',
     b'{"a":' * 3000 + b"\n", b"[1]\n"],
)  # fmt: skip
def test_damaged_rows_are_left_out_and_the_old_file_is_kept(tmp_path, line, logger_in):
    content = row(1) + line + row(2) + row(3)
    (tmp_path / "metrics.jsonl").write_bytes(content)
    logger, said = logger_in(tmp_path)
    logger.rewind(2)
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row(1) + row(2)
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == content
    assert [text for text in said if "1 line(s)" in text and "damaged-metrics.jsonl" in text]


def test_a_line_that_a_kill_cut_is_nothing_to_speak_of(tmp_path, logger_in):
    (tmp_path / "metrics.jsonl").write_bytes(row(1) + row(2)[:-9])
    logger, said = logger_in(tmp_path)
    logger.rewind(2)
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == row(1)
    assert said == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_side_file_that_is_none_is_set_aside(tmp_path, name, kind, logger_in):
    victim, place = tmp_path / "victim", tmp_path / name
    victim.write_text("mine")
    make = {"fifo": os.mkfifo, "link": lambda p: p.symlink_to(victim), "folder": os.mkdir}
    make[kind](place)
    logger, said = logger_in(tmp_path)
    logger.info("hello")
    logger.rewind(0)
    logger.close()
    assert place.is_file()
    assert not place.is_symlink()
    assert os.path.lexists(tmp_path / f"damaged-{name}")
    assert victim.read_text() == "mine"
    assert f"damaged-{name}" in said[0]


# ---------------------------------------------------------------------------------------------
# The rows that a checkpoint assumes


def saver_of(run_dir: Path, logger) -> Saver:
    world: Any = SimpleNamespace(is_root=True)
    mesh: Any = None
    return Saver(Config(checkpoint=CheckpointConfig(keep=9)), world, mesh, run_dir, logger)


def job(step: int) -> Any:
    state = SimpleNamespace(step=step, params={"w": np.zeros(2, np.float32)}, obs_moments=None,
                            opt_state=None, reward_moments=None, behind=())  # fmt: skip
    return SimpleNamespace(state=state, actors={"a": np.zeros(1)}, episodes={}, return_mean=1.0,
                           evaluated=None)  # fmt: skip


def test_rows_are_on_the_disk_before_the_checkpoint(tmp_path, monkeypatch, logger_in):
    events = []
    logger, _ = logger_in(tmp_path)
    number, real = logger._metrics._file.fileno(), os.fsync

    def fsync(fd: int) -> None:
        events.append("rows" if fd == number else "other")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    saver_of(tmp_path, logger)._write(job(4))
    assert events[0] == "rows"
    assert "other" in events
    assert Checkpointer(tmp_path / "checkpoints", 1).steps() == [4]


def test_no_checkpoint_is_written_while_rows_wait_for_room(tmp_path, logger_in):
    logger, _ = logger_in(tmp_path)
    real, logger._metrics._file = (
        logger._metrics._file,
        SimpleNamespace(write=lambda data: 0, fileno=logger._metrics._file.fileno),
    )
    logger.write({"progress/update": 1, "progress/steps": 1})
    with pytest.raises(OSError, match="could not be written yet"):
        saver_of(tmp_path, logger)._write(job(4))
    assert Checkpointer(tmp_path / "checkpoints", 1).steps() == []
    logger._metrics._file = real
    logger.write({"progress/update": 2, "progress/steps": 2})
    saver_of(tmp_path, logger)._write(job(5))
    assert Checkpointer(tmp_path / "checkpoints", 1).steps() == [5]


# ---------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"segments": 3}'])
def test_damage_to_an_old_checkpoint_does_not_end_a_healthy_run(tmp_path, content, logger_in):
    logger, _ = logger_in(tmp_path)
    saver = saver_of(tmp_path, logger)
    saver._write(job(1))
    (tmp_path / "checkpoints" / "update-00000001" / "meta.json").write_bytes(content)
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "actions-00000001.safetensors").write_bytes(b"perhaps needed")
    saver._write(job(2))
    assert Checkpointer(tmp_path / "checkpoints", 1).steps() == [1, 2]
    assert (tmp_path / "replay" / "actions-00000001.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["update-50", "update-²", "update-", "update-٠٠٠٠٠٠٥٠", "update--1"]
)
def test_stray_names_among_checkpoints_are_said_and_left_alone(tmp_path, name):
    keeper = Checkpointer(tmp_path, 3)
    keeper.save(snapshot(5))
    (tmp_path / name).mkdir()
    said: list[str] = []
    assert keeper.steps() == [5]
    assert restored_step(keeper, said.append) == 5
    assert len(said) == 1
    assert name in said[0]
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("step", [9, -5, True, 5.0, "5", None])
def test_a_manifest_of_another_update_is_refused(tmp_path, step):
    keeper = Checkpointer(tmp_path, 3)
    keeper.save(snapshot(4))
    keeper.save(snapshot(5))
    manifest = json.loads((keeper.path(5) / "manifest.json").read_bytes())
    (keeper.path(5) / "manifest.json").write_text(json.dumps(seal(step, manifest["files"])))
    said: list[str] = []
    assert restored_step(keeper, said.append) == 4
    assert "update-00000005" in said[0]


@pytest.mark.parametrize("kind", ["fifo", "zero", "link", "deep", "large"])
def test_a_manifest_that_is_no_plain_file_is_refused_at_once(tmp_path, kind):
    keeper = Checkpointer(tmp_path, 3)
    keeper.save(snapshot(5))
    file = keeper.path(5) / "manifest.json"
    kept = tmp_path / "kept.json"
    file.rename(kept)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "deep":
        file.write_bytes(b"[" * 200_000)
    elif kind == "large":
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
    else:
        file.symlink_to("/dev/zero" if kind == "zero" else kept)
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        keeper.restore(lambda _: None)


def test_a_linked_folder_is_no_checkpoint(tmp_path):
    Checkpointer(tmp_path / "other", 3).folder.mkdir()
    Checkpointer(tmp_path / "other", 3).save(snapshot(5))
    mine = Checkpointer(tmp_path / "mine", 3)
    mine.save(snapshot(4))
    mine.path(5).symlink_to(tmp_path / "other" / "update-00000005")
    assert restored_step(mine) == 4


def test_something_in_the_place_of_the_next_checkpoint_is_moved(tmp_path):
    keeper = Checkpointer(tmp_path, 3)
    keeper.path(5).write_text("not ours")
    keeper.save(snapshot(5))
    assert restored_step(keeper) == 5
    assert (tmp_path / "damaged-update-00000005").read_text() == "not ours"


# ---------------------------------------------------------------------------------------------
# versions.json, the first write, TensorBoard and W&B


@pytest.mark.parametrize("content", [None, b"", b'{"run_id"', b"\xff", b'{"run_id": 3}', b"[]"])
def test_a_run_without_its_versions_goes_on_with_a_new_id(tmp_path, content):
    config = Config(run_dir=str(tmp_path / "run"))
    first = open_run(config)
    close_run(first)
    file = tmp_path / "run" / "versions.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    again = open_run(config)
    close_run(again)
    assert again.resumed
    assert again.run_id != first.run_id
    assert "versions.json" in again.notes[0]
    assert again.run_id in again.notes[0]
    assert json.loads(file.read_text())["run_id"] == again.run_id
    assert (tmp_path / "run" / "damaged-versions.json").exists() == (content is not None)


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(rundir, "write_json", full)
    config = Config(run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        open_run(config)
    monkeypatch.undo()
    close_run(open_run(config))  # it was given back, and what it left is no obstacle


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_full_at_the_start_is_one_line_of_the_command(tmp_path):
    import subprocess

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=True)
    try:
        filler = (tmp_path / "filler").open("wb", buffering=0)
        with filler, contextlib.suppress(OSError):  # until the disk is full
            while filler.write(b"x" * 4096):
                pass
        done = python("-m", "spmdrl.train", CARTPOLE, "--run-dir", tmp_path / "run")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 2, done.stderr
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


class Broken:
    """A destination that fails when it is told to."""

    def __init__(self, when):
        self.when = when
        self.fail("begin")

    def fail(self, now):
        if now == self.when:
            raise RuntimeError("the server is gone")

    def write(self, row):
        self.fail("write")

    def close(self):
        self.fail("close")


@pytest.mark.parametrize("when", ["begin", "write", "close"])
def test_a_destination_that_fails_costs_one_warning(tmp_path, monkeypatch, when, logger_in):
    monkeypatch.setattr(logger_module, "TensorBoardWriter", lambda *_: Broken(when))
    monkeypatch.setattr(logger_module, "WandbWriter", lambda *_: Broken(when))
    logger, said = logger_in(tmp_path, tensorboard=True, wandb="mine")
    logger.write({"progress/update": 1, "progress/steps": 1})
    logger.write({"progress/update": 2, "progress/steps": 2})
    logger.close()
    assert ["TensorBoard has failed" in said[0], "W&B has failed" in said[1]] == [True, True]
    assert len(said) == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


# ---------------------------------------------------------------------------------------------
# Writing through a link


def test_a_planted_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".eval.json.tmp").symlink_to(victim)
    (tmp_path / "eval.json").symlink_to(victim)
    rundir.write_json(tmp_path / "eval.json", {"a": 1})
    assert victim.read_text() == "mine"
    assert json.loads((tmp_path / "eval.json").read_text()) == {"a": 1}
    assert not (tmp_path / "eval.json").is_symlink()


def test_a_run_of_wrong_types_is_refused_when_it_is_read(tmp_path):
    values = json.loads(to_json(Config()))
    values["env"]["num_envs"] = "many"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"env\.num_envs is 'many'"):
        rundir.read_run(tmp_path)
    shutil.rmtree(tmp_path)

"""Workers that play the newest checkpoint while a run trains, and readers of what they write."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmdrl import record
from spmdrl.config import ConfigError, EnvConfig
from spmdrl.episodes import Batches, Recording, map_arrays, open_recording
from spmdrl.episodes.following import Follower
from spmdrl.parallel.topology import Topology
from spmdrl.parallel.world import World
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot, read_snapshot
from spmdrl.runtime.consent import Consent
from spmdrl.runtime.files import write_json
from tests.children import ROOT, clean_environment, succeed, train_command
from tests.test_record import make_run


@pytest.fixture(autouse=True)
def own_signals():
    """The command listens for the process that it has to itself."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("follow") / "run", EnvConfig(id="CartPole-v1"))


@pytest.fixture
def run_dir(untouched, tmp_path) -> Path:
    return shutil.copytree(untouched, tmp_path / "run")


def add_checkpoint(run_dir: Path, update: int) -> Path:
    """The same parameters under another number."""
    keeper = Checkpointer(run_dir / "checkpoints", keep=9)
    first = read_snapshot(keeper.path(1))
    keeper.save(Snapshot(update, first.arrays, first.meta))
    return keeper.path(update)


def follower(run_dir: Path, out: object, keep: int = 1000, **flags: Any) -> Follower:
    """One worker that has not begun."""
    options = record.Options(run_dir=str(run_dir), out=str(out), follow=True, keep=keep, **flags)
    plan = record.make_plan(options, Topology(), Consent(None, False, "record", False))
    plan.feed.open()
    stop: Any = SimpleNamespace(signal=None)
    made = Follower(plan, run_dir, keep, World(), Topology(), stop)
    made._about = plan.about | {"spaces": {}, "workers": 1}
    return made


def numbers(recording: Recording) -> list[tuple[int, int | None]]:
    return [(episode.id, episode.update) for episode in recording.episodes]


def test_the_newest_checkpoint_is_played_and_the_newest_episodes_are_kept(run_dir, tmp_path):
    worker = follower(run_dir, tmp_path / "out", keep=6)
    worker._round()
    recording = Recording(tmp_path / "out")
    assert recording.grows
    assert numbers(recording) == [(i, 1) for i in range(4)]
    worker._round()
    add_checkpoint(run_dir, 2)
    add_checkpoint(run_dir, 5)
    worker._round()
    recording.refresh()
    assert numbers(recording) == [(6, 1), (7, 1), *((i, 5) for i in range(8, 12))]
    assert len({episode.seed for episode in recording.episodes}) == 6
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert files == {episode.file for episode in recording.episodes}
    assert recording.index["checkpoint"]["update"] == 5


def test_a_damaged_checkpoint_is_left_out(run_dir, tmp_path, capsys):
    worker = follower(run_dir, tmp_path / "out")
    worker._round()
    damaged = add_checkpoint(run_dir, 3) / "params.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    worker._round()
    assert {update for _, update in numbers(Recording(tmp_path / "out"))} == {1}
    assert "update 3 is left out" in capsys.readouterr().out
    add_checkpoint(run_dir, 4)
    worker._round()
    assert numbers(Recording(tmp_path / "out"))[-1] == (11, 4)


@pytest.mark.parametrize("address", ["{}/out", "sqlite:///{}/games.db"])
def test_batches_of_the_next_epoch_have_the_newest_episodes(run_dir, tmp_path, address):
    out = address.format(tmp_path)
    worker = follower(run_dir, out, keep=4)
    worker._round()
    recording = open_recording(out)
    batches = Batches(recording, batch_size=7)
    first, before = recording.num_steps, batches.state()
    seen = [len(next(batches)["reward"])]
    worker._round()  # the episodes that are being read are deleted
    while batches.epoch == 0:
        seen.append(len(next(batches)["reward"]))
    assert sum(seen) == first
    assert [episode.id for episode in recording.episodes] == [4, 5, 6, 7]
    taken = 0
    while batches.epoch == 1:
        taken += len(next(batches)["reward"])
    assert taken == recording.num_steps
    resumed = Batches(open_recording(out), batch_size=7, state=before)
    assert resumed.epoch == 1, "its episodes are gone, so a new epoch begins"
    worker._publish(growing=False)
    done = open_recording(out)
    with pytest.raises(ConfigError, match="the saved state is of another reader"):
        Batches(done, batch_size=7, state=before)


def test_a_database_reads_like_a_folder(run_dir, tmp_path):
    options = [str(run_dir), "--episodes", "5"]
    address = f"sqlite:///{tmp_path}/games.db"
    assert record.main([*options, "--out", address]) == 0
    assert record.main([*options, "--out", str(tmp_path / "folder")]) == 0
    ours, theirs = open_recording(address), open_recording(tmp_path / "folder")
    assert ours.fingerprint == theirs.fingerprint
    assert ours.spec() == theirs.spec()
    for mine, other in zip(Batches(ours, 64, epochs=2), Batches(theirs, 64, epochs=2), strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], other[name])


def test_a_database_holds_many_runs_by_their_ids(run_dir, tmp_path, capsys):
    file = tmp_path / "games.db"
    other = shutil.copytree(run_dir, tmp_path / "other")
    write_json(other / "versions.json", {"run_id": "another"})
    address = f"sqlite:///{file}"
    for run in (run_dir, other):
        assert record.main([str(run), "--episodes", "2", "--out", address]) == 0
    ids = [json.loads((run / "versions.json").read_text())["run_id"] for run in (run_dir, other)]
    with pytest.raises(ConfigError, match="holds several runs; name one"):
        open_recording(address)
    with pytest.raises(ConfigError, match="has no run x; there are: "):
        open_recording(f"{address}#x")
    assert len(open_recording(f"{address}#{ids[1]}").episodes) == 2
    capsys.readouterr()
    assert record.main([str(run_dir), "--episodes", "2", "--out", address]) == 2
    assert f"holds a recording of run {ids[0]} already" in capsys.readouterr().err


def test_damage_in_a_database_is_found(run_dir, tmp_path):
    file = tmp_path / "games.db"
    assert record.main([str(run_dir), "--episodes", "2", "--out", f"sqlite:///{file}"]) == 0
    with sqlite3.connect(file) as db:
        db.execute("UPDATE episodes SET data = zeroblob(9) WHERE id = 1")
    db.close()
    with pytest.raises(ConfigError, match=r"episode 1 of .* does not match its SHA-256"):
        open_recording(f"sqlite:///{file}")
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be used as a recording"):
        open_recording(f"sqlite:///{file}")


def test_a_run_that_is_over_is_played_once_more(run_dir, tmp_path, capsys):
    write_json(run_dir / "status.json", {"state": "finished"})
    assert record.main([str(run_dir), "--follow", "--out", str(tmp_path / "out")]) == 0
    recording = Recording(tmp_path / "out")
    assert (len(recording.episodes), recording.grows) == (4, False)
    assert "4 episodes played" in capsys.readouterr().out


def test_it_can_end_after_a_number_of_episodes(run_dir, tmp_path):
    write_json(run_dir / "status.json", {"state": "running"})
    words = [str(run_dir), "--follow", "--episodes", "9", "--out", str(tmp_path / "out")]
    assert record.main(words) == 0
    assert len(Recording(tmp_path / "out").episodes) == 12  # whole rounds of four


def test_following_one_checkpoint_is_refused(run_dir, tmp_path, capsys):
    words = [str(run_dir), "--follow", "--checkpoint", "1", "--out", str(tmp_path / "out")]
    assert record.main(words) == 2
    assert "leave out --checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_two_workers_follow_a_run_that_trains(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    trainer = subprocess.Popen(
        train_command("--run-dir", run, "--total-steps", "1e9", "--checkpoint.every", 20),
        stdout=subprocess.DEVNULL, env=clean_environment(), cwd=ROOT,
    )  # fmt: skip
    try:
        while not (run / "status.json").exists():
            assert trainer.poll() is None
        succeed("-m", "spmdrl.record", run, "--follow", "--nprocs", 2, "--out", out,
                "--episodes", 60, "--num-envs", 4, "--keep", 50)  # fmt: skip
    finally:
        trainer.terminate()
        trainer.wait()
    recording = Recording(out)
    assert len(recording.episodes) == 50
    assert len({episode.update for episode in recording.episodes}) > 1, "it followed"
    assert {episode.file[:9] for episode in recording.episodes} == {"worker-00", "worker-01"}
    assert all(map_arrays(out / episode.file) for episode in recording.episodes)

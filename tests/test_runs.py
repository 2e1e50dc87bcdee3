"""`python -m spmdrl.runs`: what a directory of runs looks like, whole, broken and foreign.

How a run ends is written by the real session; only the training inside it is a stand-in.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spmdrl.config import Config, to_json
from spmdrl.runs import describe, find_runs, main, short_age
from spmdrl.runtime.rundir import CLONE_MARK, write_status
from tests.children import ROOT, python

CONFIG = Config(total_steps=4096, seed=7)

# One process, one run after the other; the last one does not survive.
ENDINGS = """
import os, signal, sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock
from spmdrl.runtime import session
from spmdrl.config import Config, ConfigError
from spmdrl.parallel.topology import Topology
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog
from spmdrl.parallel.world import World

SUMMARY = {"episode_return_mean": 1.0, "env_steps": 1, "wall_s": 1.0, "sps": 1.0}

def end(how):
    def train():
        if how == "stopped":
            raise session.Stopped("stopped on request after update 3 of 9")
        if how == "failed":
            raise ValueError("the simulator\\nbroke")
        if how == "refused":
            raise ConfigError("env.normalize_obs is for vectors")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return SUMMARY
    return train

session.build_trainer = session.header = session.describe = lambda *_, **__: MagicMock()
session.write_spaces = lambda *_: None
for how in ("finished", "stopped", "failed", "refused", "killed"):
    session.TrainingLoop = lambda *_: SimpleNamespace(train=end(how))
    config = replace(Config(), run_dir=f"{sys.argv[1]}/{how}")
    session.run_session(
        config, Topology(), World(), StopRequest(), Watchdog(0, 1, None), ["CONFIG.py"]
    )
"""


def make_run(path: Path, config: Config = CONFIG, rows: tuple[dict, ...] = ()) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(to_json(replace(config, run_dir=str(path))))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(steps: int, value: float | None) -> dict:
    return {"progress/steps": steps, "episode/return_mean": value}


def state(path: Path, now: float | None = None) -> str:
    info = describe(path, time.time() if now is None else now)
    assert info is not None
    return info.state


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ended")
    done = python("-c", ENDINGS, folder)
    assert done.returncode == -9, done.stderr
    return {Path(info.run).name: info for info in find_runs(folder)}


def test_every_end_is_told(ended):
    states = {name: info.state for name, info in ended.items()}
    assert states == {
        "finished": "finished", "stopped": "stopped", "failed": "failed", "refused": "failed",
        "killed": "killed",
    }  # fmt: skip


def test_the_reason_is_one_line(ended):
    assert ended["finished"].reason == ""
    assert ended["stopped"].reason == "stopped on request after update 3 of 9"
    assert ended["failed"].reason == "rank 0, update 0, phase start: ValueError: the simulator"
    assert ended["refused"].reason == "env.normalize_obs is for vectors"


def test_a_run_says_how_far_it_is(tmp_path):
    run = make_run(tmp_path / "a", rows=(row(1024, 10.0), row(2048, 20.0), row(3072, None)))
    info = describe(run, time.time())
    assert info is not None
    assert (info.run, info.env, info.seed) == (str(run), "CartPole-v1", 7)
    assert (info.steps, info.total_steps, info.episode_return) == (3072, 4096, 20.0)
    assert 0 <= info.age_s < 60


def test_a_row_that_a_kill_cut_is_left_out(tmp_path):
    run = make_run(tmp_path / "a", rows=(row(1024, 10.0),))
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"progress/steps": 2048, "epis')
    info = describe(run, time.time())
    assert info is not None
    assert (info.steps, info.episode_return) == (1024, 10.0)


def test_only_the_end_of_long_metrics_is_read(tmp_path):
    run = make_run(tmp_path / "a", rows=tuple(row(n, float(n)) for n in range(5_000)))
    info = describe(run, time.time())
    assert info is not None
    assert (info.steps, info.episode_return) == (4999, 4999.0)


def test_a_living_run_runs(tmp_path):
    run = make_run(tmp_path / "a")
    write_status(run, "running")
    assert state(run) == "running"


def test_a_silent_run_was_killed(tmp_path):
    run = make_run(tmp_path / "a")
    write_status(run, "running")
    assert state(run, now=time.time() + 60) == "killed"
    (run / ".heartbeat").mkdir()
    beat = {"time": time.time() + 55, "update": 3, "phase": "update"}
    (run / ".heartbeat" / "rank-0.json").write_text(json.dumps(beat))
    assert state(run, now=time.time() + 60) == "running", "its heart still beats"


def test_a_missing_process_is_noticed_only_on_its_own_machine(tmp_path):
    run = make_run(tmp_path / "a")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_status(run, "running")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"pid": child.pid}))
    assert state(run) == "killed"
    (run / "status.json").write_text(json.dumps(status | {"pid": child.pid, "host": "elsewhere"}))
    assert state(run) == "running"


def test_runs_of_a_version_without_a_status(tmp_path):
    run = make_run(tmp_path / "a")
    assert state(run) == "unknown"
    (run / "summary.json").write_text('{"episode_return_mean": 5.0}')
    assert state(run) == "finished"


def test_the_steps_of_a_clone_are_those_of_its_data(tmp_path):
    run = make_run(tmp_path / "a")
    (run / CLONE_MARK).write_text('{"total_steps": 99}')
    info = describe(run, time.time())
    assert info is not None
    assert info.total_steps == 99


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Two runs at different depths, a damaged one, and what other programs leave."""
    make_run(tmp_path / "good", rows=(row(10, 1.0),))
    make_run(tmp_path / "group" / "[bold]deep[/]")
    damaged = make_run(tmp_path / "damaged")
    (damaged / "config.json").write_text('{"env": ')
    (damaged / "metrics.jsonl").write_bytes(b"\xff\xfe\x00[1, 2]\n7\n")
    for name, text in {"foreign": '{"model_type": "bert"}', "listed": "[1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    odd = make_run(tmp_path / "odd_status")
    (odd / "status.json").write_text('["running"]')
    (odd / "summary.json").write_text("null")
    return tmp_path


def test_damaged_and_foreign_directories_do_no_harm(mixed):
    found = {Path(info.run).relative_to(mixed).as_posix(): info for info in find_runs(mixed)}
    assert set(found) == {"good", "group/[bold]deep[/]", "damaged", "odd_status"}
    assert found["damaged"].state == "damaged"
    assert "config.json" in found["damaged"].reason
    assert found["odd_status"].state == "unknown"


def test_the_table(mixed, capsys):
    assert main([str(mixed)]) == 0
    shown = capsys.readouterr().out
    assert "CartPole-v1" in shown
    assert "good" in shown
    assert "[bold]deep[/]" in shown, "a name is not markup"
    assert "foreign" not in shown


def test_json(mixed, capsys):
    assert main([str(mixed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    good = next(info for info in found if info["run"] == str(mixed / "good"))
    assert (good["env"], good["steps"], good["episode_return"]) == ("CartPole-v1", 10, 1.0)


def test_the_run_that_wrote_last_comes_first(tmp_path):
    for name, age in (("old", 500), ("new", 5), ("older", 5000)):
        run = make_run(tmp_path / name)
        for file in run.iterdir():
            os.utime(file, (time.time() - age,) * 2)
    assert [Path(info.run).name for info in find_runs(tmp_path)] == ["new", "old", "older"]


def test_nothing_there(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert f"no runs below {tmp_path}" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    assert f"spmdrl: {tmp_path / 'nowhere'} is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (90, "2 min"), (7200, "2 h"), (260_000, "3 d")]
)
def test_ages(seconds, text):
    assert short_age(seconds) == text


HOLDER = """
import sys, time
from pathlib import Path
from spmdrl.runtime import lock
lock.take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(60)
"""


def test_the_lock_outweighs_clocks_and_numbers_of_processes(tmp_path):
    run = make_run(tmp_path / "a")
    write_status(run, "running")  # by this process, which is alive
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        assert state(run, now=time.time() + 3600) == "running", "another host's clock is behind"
    finally:
        holder.kill()
        holder.communicate()
    assert state(run) == "killed", "its number is another process's by now"
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    assert state(run) == "running", "that host's locks may not be seen here"


def test_a_status_gives_no_orders_to_the_terminal(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    hostile = {"state": "failed\x1b[2J", "reason": "\x1b]0;owned\x07\x9b31m", "time": 10**400}
    (run / "status.json").write_text(json.dumps(hostile))
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "failed" in said
    assert "owned" in said
    assert not {"\x1b", "\x07", "\x9b"} & set(said)

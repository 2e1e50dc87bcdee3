"""Evaluations while a run trains leave its bits alone, choose the best checkpoint, may end it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, EvalConfig, LogConfig, NetConfig
from spmdrl.config.rules import check_fields
from spmdrl.parallel.world import World
from spmdrl.runtime import evaluator
from spmdrl.runtime.checkpoint import Checkpointer
from spmdrl.runtime.evaluation import play, statistics
from spmdrl.runtime.evaluator import Evaluator, whole_window
from spmdrl.runtime.logger import EpisodeStats
from spmdrl.runtime.loop import Stopped
from spmdrl.runtime.models import find_checkpoint
from spmdrl.runtime.signals import StopRequest
from spmdrl.sweep import Planned
from spmdrl.sweeps.plan import Point
from tests.children import CARTPOLE, clean_environment, succeed, train_command
from tests.spmd.runs import run

EVALUATED = EvalConfig(every=2, episodes=3, num_envs=2)
UPDATES = 6


def small(updates: int = UPDATES, **changes: Any) -> Config:
    config = Config(
        env=EnvConfig(num_envs=8, normalize_obs=True),
        net=NetConfig(hidden=(16,)),
        algo=Ppo(num_steps=16, minibatches=2, epochs=1),
        log=LogConfig(panel="off", window=4),
    )
    return dataclasses.replace(
        config, total_steps=updates * config.batch_size, schedule_steps=10_000, **changes
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(folder: Path) -> dict[int, float]:
    rows = rows_of(folder)
    return {r["progress/update"]: r["eval/return_mean"] for r in rows if "eval/return_mean" in r}


def trained(folder: Path, config: Config) -> dict[str, Any]:
    return run(config, 1, World(), folder)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """The programs of all these runs are the same."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return trained(folder, small()), folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    return trained(folder, small(eval=EVALUATED)), folder


def test_the_run_has_the_same_bits(plain, evaluated):
    assert evaluated[0]["params_sha256"] == plain[0]["params_sha256"]
    measured = ("perf/", "time/", "eval/", "progress/eta_s")
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows_of(folder)]
        for _, folder in (evaluated, plain)
    )
    assert ours == theirs


def test_rows_have_its_numbers_when_there_was_one(evaluated):
    rows = rows_of(evaluated[1])
    having = [row["progress/update"] for row in rows if "eval/return_mean" in row]
    assert having == [2, 4, 6]
    assert rows[1]["eval/episodes"] == 3
    assert rows[1]["eval/length_mean"] == rows[1]["eval/return_mean"], "CartPole pays 1 a step"
    assert rows[1]["time/eval"] > 0
    assert evaluated[0]["eval_return_mean"] == rows[-1]["eval/return_mean"]


def test_it_finds_what_the_command_finds(evaluated):
    summary, folder = evaluated
    config = small(eval=EVALUATED)
    found = statistics(play(config, find_checkpoint(folder)))
    assert found["return_mean"] == summary["eval_return_mean"]


@pytest.mark.slow
def test_a_resumed_run_evaluates_as_if_it_had_not_stopped(evaluated, tmp_path):
    summary, folder = evaluated
    trained(tmp_path, small(3, eval=EVALUATED))
    again = trained(tmp_path, small(eval=EVALUATED))
    assert again["params_sha256"] == summary["params_sha256"]
    assert evaluations(tmp_path) == evaluations(folder) | {3: evaluations(tmp_path)[3]}


def scripted(monkeypatch, *scores: float) -> None:
    """Evaluations with these mean returns, one after the other."""
    left = list(scores)

    def evaluate(self: Evaluator, state: Any) -> dict[str, Any]:
        return statistics([(left.pop(0), 1)])

    monkeypatch.setattr(Evaluator, "_evaluate", evaluate)


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_best_evaluation(monkeypatch, tmp_path):
    scripted(monkeypatch, 5.0, 9.0, 7.0)
    trained(tmp_path, small(eval=EVALUATED))
    keeper = Checkpointer(tmp_path / "checkpoints", 1)
    assert keeper.steps() == [2, 4, 6], "one for each new best, one at the end"
    assert keeper.best_step() == 4
    assert find_checkpoint(tmp_path, "best").name == "update-00000004"
    # A resumed run knows how good the best was.
    scripted(monkeypatch, 8.0, 9.5)
    trained(tmp_path, small(10, eval=EVALUATED))
    assert keeper.steps() == [4, 6, 10]
    assert keeper.best_step() == 10


@pytest.mark.slow
def test_a_run_ends_when_an_evaluation_reaches_the_target(monkeypatch, tmp_path):
    scripted(monkeypatch, 5.0, 9.0)
    config = small(eval=EVALUATED, until_return=9.0)
    summary = trained(tmp_path, config)
    assert (summary["updates"], summary["env_steps"]) == (4, 4 * config.batch_size)
    assert summary["reached"] == {
        "until_return": 9.0, "return_mean": 9.0, "by": "evaluation", "update": 4,
    }  # fmt: skip
    assert "has reached --until-return 9 after update 4 of 6" in (tmp_path / "log.txt").read_text()
    # The same again is over at once; with a higher target it goes on from there.
    again = trained(tmp_path, config)
    assert (again["updates"], again["reached"]["update"]) == (4, 4)
    scripted(monkeypatch, 11.0)
    higher = trained(tmp_path, dataclasses.replace(config, until_return=10.0))
    assert (higher["updates"], higher["reached"]["return_mean"]) == (6, 11.0)


@pytest.mark.slow
def test_without_evaluations_the_window_of_training_counts(tmp_path):
    config = small(until_return=5.0)
    summary = trained(tmp_path, config)
    assert summary["updates"] < UPDATES
    assert summary["reached"]["by"] == "training"
    assert summary["reached"]["return_mean"] == rows_of(tmp_path)[-1]["episode/return_mean"]
    assert trained(tmp_path, config)["updates"] == summary["updates"]


def test_a_window_that_is_not_full_ends_nothing():
    stats = EpisodeStats(3)
    stats.add(np.array([90.0, 90.0]), np.array([9, 9]))
    assert whole_window(stats) is None
    stats.add(np.array([60.0]), np.array([9]))
    assert whole_window(stats) == 80.0


@pytest.mark.slow
def test_a_request_to_stop_does_not_wait_for_the_episodes(monkeypatch, tmp_path):
    """StopRequest is set as the evaluation begins; nothing is made of a part of it."""
    requests: list[StopRequest] = []
    known, made = Evaluator.__init__, evaluator.make_envs

    def remember(self, config, world, stop, *rest):
        requests.append(stop)
        known(self, config, world, stop, *rest)

    def make_envs(*args, **named):
        requests[0].signal = "SIGTERM"
        return made(*args, **named)

    monkeypatch.setattr(Evaluator, "__init__", remember)
    monkeypatch.setattr(evaluator, "make_envs", make_envs)
    with pytest.raises(Stopped, match="after update 3"):
        trained(tmp_path, small(eval=EVALUATED))
    assert evaluations(tmp_path) == {}
    assert "evaluation left out" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "475"])
def test_a_target_is_a_number(value):
    with pytest.raises(ConfigError, match="until_return"):
        check_fields(Config(until_return=value))


def test_a_sweep_knows_that_such_a_run_is_finished(tmp_path):
    def planned(target: float | None) -> Planned:
        return Planned(Point("x", ()), small(until_return=target), tmp_path, ())

    (tmp_path / "summary.json").write_text('{"updates": 2, "reached": {"until_return": 9.0}}')
    assert planned(9.0).finished
    assert not planned(10.0).finished
    assert not planned(None).finished


# ---------------------------------------------------------------------------------------------
# Two ranks

SIZES = ["--env.num-envs", 8, "--algo.num-steps", 16, "--algo.minibatches", 2, "--log.window", 4,
         "--total-steps", 128 * UPDATES, "--nprocs", 2, "--log.panel", "off"]  # fmt: skip


@pytest.mark.slow
def test_two_ranks_have_the_same_bits_and_end_together(tmp_path):
    found = {}
    for name, flags in {
        "plain": [],
        "evaluated": ["--eval.every", 2, "--eval.episodes", 2],
        "window": ["--until-return", 5],
    }.items():
        succeed("-m", "spmdrl.train", CARTPOLE, *SIZES, *flags, "--run-dir", tmp_path / name)
        found[name] = json.loads((tmp_path / name / "summary.json").read_text())
    assert found["evaluated"]["params_sha256"] == found["plain"]["params_sha256"]
    assert sorted(evaluations(tmp_path / "evaluated")) == [2, 4, 6]
    assert found["window"]["reached"]["by"] == "training"
    assert found["window"]["updates"] < UPDATES
    state = json.loads((tmp_path / "window" / "status.json").read_text())["state"]
    assert state == "finished"


@pytest.mark.slow
def test_the_last_words_of_two_stopped_ranks_are_ours(tmp_path):
    command = train_command("--nprocs", 2, "--run-dir", tmp_path / "run", "--total-steps", "1e8")
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=clean_environment(),
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate()
    assert child.returncode == 75, said
    assert said.startswith("starting 2 ranks")
    assert "2 ranks are connected" in said
    assert "stopped on request" in said.splitlines()[-1], said[-2000:]
    assert "prterun" not in said

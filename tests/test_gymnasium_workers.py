"""Worker processes of Gymnasium environments: equal rollouts, errors with names, none left."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import spmdrl
from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig
from spmdrl.envs.base import env_seeds
from spmdrl.envs.errors import EnvError
from spmdrl.envs.gymnasium_backend import GymnasiumBatch, split_evenly, worker_count
from spmdrl.envs.workers import advice
from spmdrl.runtime.watchdog import is_running, report_fault
from tests.children import ROOT, clean_environment, succeed
from tests.own_envs.batches import GOOD, SEED, assert_gone, batch, broken, pids, step
from tests.own_envs.good import Walk


def fail(env: GymnasiumBatch) -> None:
    env.reset()
    for _ in range(5):
        step(env)


def steps_until_it_fails(env: GymnasiumBatch) -> tuple[EnvError, list[int]]:
    processes = pids(env)
    with pytest.raises(EnvError) as caught:
        fail(env)
    return caught.value, processes


# ---------------------------------------------------------------------------------------------
# Rollouts


def moves(steps: int, num_envs: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (steps, num_envs)
    return np.stack([rng.integers(0, 2, shape), rng.integers(0, 3, shape)], -1).astype(np.int32)


def by_hand(actions: np.ndarray) -> list[Any]:
    """The same environments stepped one by one, each reset in the step after its end."""
    rows: list[Any] = [[] for _ in actions]
    for i, seed in enumerate(env_seeds(SEED, range(actions.shape[1]))):
        env, over = Walk(), False
        env.reset(seed=seed)
        for t, action in enumerate(actions[:, i]):
            row = (env.reset()[0], 0.0, False, False) if over else env.step(action)[:4]
            over = row[2] or row[3]
            rows[t].append(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["inline", 1, 2, 8])
def test_rollouts_do_not_depend_on_the_workers(workers):
    actions = moves(20, 8)
    env = batch(f"{GOOD}:Walk", workers=workers)
    env.reset()
    ends = 0
    for t, wanted in enumerate(by_hand(actions)):
        answer = step(env, actions[t])
        observations, rewards, terminated, truncated = zip(*wanted, strict=True)
        assert np.array_equal(answer.obs["eye"], np.stack([o["eye"] for o in observations]))
        place = np.stack([o["place"] for o in observations]).astype(np.float32)
        gear = np.eye(3, dtype=np.float32)[[o["gear"] - 1 for o in observations]]
        assert np.array_equal(answer.obs["vector"], np.concatenate([gear, place], -1))
        assert np.array_equal(answer.reward, np.array(rewards, np.float32))
        assert answer.terminated.tolist() == list(terminated)
        assert answer.truncated.tolist() == list(truncated)
        ends += sum(terminated) + sum(truncated)
    assert ends > 8
    env.close()


def test_answers_are_copies():
    """Images above all: numbers are copied anyway when they become float32."""
    env = batch(f"{GOOD}:Walk", workers=2)
    first = env.reset()["eye"]
    before = first.copy()
    second = step(env).obs["eye"]
    after = second.copy()
    step(env)
    assert np.array_equal(first, before)
    assert np.array_equal(second, after)
    env.close()


def test_a_second_reset_begins_new_episodes_without_the_seeds():
    env = batch(f"{GOOD}:Walk", workers=2)
    first = env.reset()["vector"]
    second = env.reset()["vector"]
    assert not np.array_equal(first, second)
    env.close()


def test_a_registered_time_limit_counts():
    env = batch(f"{GOOD}:OwnWalk-v0", workers=2, num_envs=4)
    env.reset()
    lengths, running = [], np.zeros(4, int)
    for _ in range(40):
        answer = step(env)
        running += 1
        lengths += running[answer.episode_over].tolist()
        running[answer.episode_over] = -1  # the reset is no step
    assert max(lengths) == 6
    env.close()


def test_workers_are_shared_out():
    config = EnvConfig()
    assert worker_count(config, 8, 4, 1) == 4
    assert worker_count(config, 8, 4, 2) == 2
    assert worker_count(config, 2, 4, 1) == 2
    assert worker_count(dataclasses.replace(config, workers=32), 16, 4, 2) == 16
    assert worker_count(dataclasses.replace(config, workers="inline"), 16, 4, 2) == 0
    assert split_evenly(8, 3) == [3, 3, 2]


def test_workers_load_no_jax():
    heavy = ["jax", "flax", "mpi4py", "envpool", "tyro"]
    program = (
        f"import sys, spmdrl.envs.worker_process; print([m for m in {heavy} if m in sys.modules])"
    )
    assert succeed("-c", program).strip() == "[]"


# ---------------------------------------------------------------------------------------------
# Faults


def test_an_error_names_the_environment_and_shows_its_own_traceback_once(capsys):
    error, processes = steps_until_it_fails(broken("percent", 5))
    seed = env_seeds(SEED, [5])[0]
    assert str(error) == (
        f"environment 5 (seed {seed}, worker 1, episode step 3) raised ValueError: "
        "3 items, 100% of them"
    )
    assert_gone(processes)
    report_fault(0, 2, "update 3, phase collect", error)
    said = capsys.readouterr().err
    assert said.startswith("spmdrl: rank 0 of 2 on ")
    assert said.count("Traceback (most recent call last):") == 1
    assert 'raise ValueError("%d items, %d%% of them" % (count, share))' in said
    assert said.endswith("\nValueError: 3 items, 100% of them\n")
    assert "hosts.py" not in said
    assert "workers.py" not in said


def test_without_workers_the_error_says_the_same():
    env = broken("percent", 5, workers="inline")
    with pytest.raises(EnvError, match=r"environment 5 \(seed \d+, episode step 3\) raised Value"):
        fail(env)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("leave", "raised SystemExit: 0"),
        ("wrong_shape", r"raised ValueError: the observation has shape \(\), .* says \(2,\)"),
        ("wrong_dtype", "raised ValueError: the observation is <U1, but its space says float32"),
    ],
)
def test_what_else_is_an_error_of_the_environment(fault, said):
    error, processes = steps_until_it_fails(broken(fault, 2))
    assert str(error).startswith("environment 2 (seed ")
    assert re.search(said, str(error))
    assert_gone(processes)


def test_a_process_that_leaves_is_named_with_its_code():
    error, processes = steps_until_it_fails(broken("exit", 6))
    said = "which has environments 4 to 7, left with exit code 3 in environment 6 (seed "
    assert said in str(error)
    assert "worker 1, episode step 3)" in str(error)
    assert_gone(processes)


def test_a_killed_process_is_named_with_its_signal():
    env = batch(f"{GOOD}:Plain", workers=2)
    env.reset()
    step(env)
    processes = pids(env)
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(EnvError, match=r"environments 0 to 3, was ended by SIGKILL .* between two"):
        step(env)
    assert_gone(processes)


def test_an_environment_that_hangs_is_named_and_shows_where():
    error, processes = steps_until_it_fails(broken("hang", 1, timeout_s=1.0))
    assert str(error).startswith("no answer for 1 s: worker 0 (pid ")
    assert "hangs in environment 1 (seed " in str(error)
    assert "worker 1" not in str(error).replace("worker 0, episode step 3", "")
    assert "in _hang" in error.details
    assert_gone(processes)


def test_what_an_environment_has_started_ends_with_it(tmp_path):
    file = tmp_path / "helper"
    error, processes = steps_until_it_fails(broken("exit", 0, options={"helper": str(file)}))
    assert "exit code 3" in str(error)
    assert_gone([*processes, int(file.read_text())])


def test_closing_leaves_no_process_and_a_forgotten_batch_neither():
    env = batch(f"{GOOD}:Plain", workers=2)
    closed = pids(env)
    env.close()
    env.close()
    assert_gone(closed)
    with pytest.raises(EnvError, match="closed"):
        step(env)
    forgotten = batch(f"{GOOD}:Plain", workers=2)
    left = pids(forgotten)
    del forgotten
    assert_gone(left)


TRAINER = """
import time
from tests.own_envs.batches import broken, pids, step
env = broken("hang", 0)
print(*pids(env), flush=True)
env.reset()
for _ in range(3):
    step(env)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_trainer_also_in_a_step_that_hangs(number):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], cwd=ROOT, env=clean_environment(JAX_PLATFORMS="cpu"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with trainer:
        assert trainer.stdout is not None
        processes = [int(word) for word in trainer.stdout.readline().split()]
        assert len(processes) == 2
        time.sleep(1.0)  # into the step that hangs
        assert all(is_running(pid) for pid in processes)
        trainer.send_signal(number)
        trainer.wait(20)
    assert_gone(processes)


def test_signals_for_the_trainer_do_not_end_workers():
    env = batch(f"{GOOD}:Plain", workers=2)
    env.reset()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for pid in pids(env):
            os.kill(pid, number)
    assert step(env).reward.tolist() == [1.0] * 8
    env.close()


def busy(clock: float, computing: float, steps: int) -> dict[str, np.ndarray]:
    return {"busy": np.array([[clock, computing, steps]] * 2)}


def test_more_workers_are_advised_where_environments_wait():
    waiting = busy(clock=1.0, computing=0.02, steps=25)
    said = advice(waiting, workers=2, num_envs=32)
    assert "98% of the 40.0 ms" in said
    assert "--env.workers 32" in said
    assert not advice(waiting, workers=2, num_envs=2)
    assert not advice(busy(1.0, 0.9, 25), workers=2, num_envs=32)
    assert not advice(busy(1.0, 0.02, 5), workers=2, num_envs=32)
    assert not advice(busy(0.001, 0.0, 25), workers=2, num_envs=32)
    assert "--env.workers 64" in advice(waiting, workers=2, num_envs=32, batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 16])
def test_a_run_says_once_that_more_workers_would_help(workers, tmp_path):
    env = EnvConfig("tests.strange_envs:Waits", 16, backend="gymnasium", workers=workers)
    algo = Ppo(num_steps=16, epochs=1)
    config = Config(run_dir=str(tmp_path / "run"), total_steps=4 * 16 * 16, env=env, algo=algo)
    result = spmdrl.train(config)
    said = (result.run_dir / "log.txt").read_text()
    assert said.count("more workers would help, up to --env.workers 16") == (workers == 2)

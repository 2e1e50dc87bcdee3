"""Sweeps: which runs, side by side, resumed, and what is written about them."""

import csv
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from spmdrl import sweep
from spmdrl.config import ConfigError
from spmdrl.parallel.spawn import SHARED_MARK, mpirun_command
from spmdrl.runtime.signals import StopRequest
from spmdrl.sweeps.plan import make_points, read_axes
from spmdrl.sweeps.workers import Job, core_shares, run_jobs
from tests.children import CARTPOLE, python
from tests.test_plot import make_run, with_lr

TINY = ["--env.num-envs", "2", "--algo.num-steps", "8", "--total-steps", "32", "--net.hidden", "8"]


# ---------------------------------------------------------------------------------------------
# The plan


def test_every_combination_with_every_seed():
    axes = read_axes([("optim.lr", "1e-3,3e-4"), ("--algo.clip-eps", "0.1, 0.2")])
    points = make_points(axes, [1, 2])
    assert [p.name for p in points[:4]] == [
        "lr=1e-3_clip_eps=0.1_s1", "lr=1e-3_clip_eps=0.2_s1",
        "lr=3e-4_clip_eps=0.1_s1", "lr=3e-4_clip_eps=0.2_s1",
    ]  # fmt: skip
    assert len({p.name for p in points}) == 8
    expected = ("--optim.lr", "3e-4", "--algo.clip-eps", "0.2", "--seed", "2")
    assert points[-1].flags == expected


def test_values_of_several_words_and_fields_of_the_same_last_name():
    [point] = make_points(read_axes([("net.hidden", "64 32")]), [1])
    assert point.name == "hidden=64-32_s1"
    assert point.flags == ("--net.hidden", "64", "32", "--seed", "1")
    [point] = make_points(read_axes([("env.num_envs", "4"), ("eval.num_envs", "8")]), [1])
    assert point.name == "env.num_envs=4_eval.num_envs=8_s1"
    assert [p.name for p in make_points([], [3])] == ["s3"]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ([("optim.lr", "1e-3,")], "a value is missing"),
        ([("optim.lr", "1"), ("optim.lr", "2")], "there twice"),
        ([("seed", "1,2")], "--seeds"),
    ],
)
def test_a_grid_that_cannot_be_meant(grid, said):
    with pytest.raises(ConfigError, match=said):
        read_axes(grid)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "optim.lr", "1e-3,0"], "lr=0_s1: optim.lr is 0.0, but must be above 0"),
        (["--grid", "optim.lrr", "1e-3"], "there is no field --optim.lrr; did you mean --optim.lr"),
        (["--seeds", "0"], "seeds is 0"),
        (["--nprocs-each", "8"], "env.num_envs 4 is not divisible by 8 ranks"),
        (["--grid", "env.id", "CartPol-v1"], "did you mean CartPole-v1?"),
    ],
)
def test_bad_input_is_answered_before_anything_is_trained(words, said, tmp_path, capsys):
    assert sweep.main([CARTPOLE, *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------
# Processes


def job(folder: Path, name: str, program: str) -> Job:
    return Job(name, (sys.executable, "-c", program), folder / "logs" / f"{name}.txt")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # a sweep never imports jax
def test_jobs_run_side_by_side_with_cores_of_their_own(tmp_path):
    program = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('%s'))"
    jobs = [job(tmp_path, str(n), program % SHARED_MARK) for n in range(3)]
    codes = {}
    assert run_jobs(jobs, 2, StopRequest(), lambda j, code, _: codes.update({j.name: code}))
    assert codes == {"0": 0, "1": 0, "2": 0}
    shares = [str(sorted(share)) for share in core_shares(2)]
    said = [j.log.read_text().strip() for j in jobs]
    assert said[:2] == [f"{share} 1" for share in shares]


def test_every_worker_has_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    assert core_shares(1) == [{4, 5, 6}]
    assert core_shares(2) == [{4, 6}, {5}]
    assert core_shares(5) == [{4}, {5}, {6}, {4}, {5}]


def test_runs_that_share_a_machine_are_not_bound_to_its_first_cores(monkeypatch):
    monkeypatch.setattr("spmdrl.parallel.spawn.find_mpirun", lambda: "mpirun")
    monkeypatch.delenv(SHARED_MARK, raising=False)
    assert "core" in mpirun_command(1)
    monkeypatch.setenv(SHARED_MARK, "1")
    assert mpirun_command(1)[-2:] == ["--bind-to", "none"]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # a sweep never imports jax
def test_a_stop_request_is_handed_on_and_nothing_new_begins(tmp_path):
    waits = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    jobs = [job(tmp_path, "a", waits), job(tmp_path, "b", waits)]
    stop, codes = StopRequest(), {}

    def ask() -> None:
        while not (jobs[0].log.exists() and "ready" in jobs[0].log.read_text()):
            pass
        stop.signal = signal.SIGINT.name

    asking = threading.Thread(target=ask)
    asking.start()
    assert not run_jobs(jobs, 1, stop, lambda j, code, _: codes.update({j.name: code}))
    asking.join()
    assert codes == {"a": 75}
    assert not jobs[1].log.exists()


# ---------------------------------------------------------------------------------------------
# Results


def test_results_are_ranked_and_written(tmp_path):
    for lr, value in ((0.1, 10.0), (0.2, 30.0)):
        for seed in (1, 2):
            make_run(tmp_path / f"{lr}-{seed}", with_lr(lr, seed), **{"episode/return_mean": value})
    (tmp_path / "0.1-1" / "status.json").write_text('{"state": "failed"}')
    make_run(tmp_path / "begun")
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    groups = sweep.write_results(tmp_path, ["optim.lr", "algo.gamma"])
    assert [group.label for group in groups] == [
        "CartPole-v1, optim.lr 0.2 (2 seeds)", "CartPole-v1, optim.lr 0.1 (2 seeds)",
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert len(rows) == 4
    first = {k: rows[0][k] for k in ("run", "optim.lr", "algo.gamma", "seed", "state", "return")}
    assert first == {
        "run": "0.1-1", "optim.lr": "0.1", "algo.gamma": "0.99", "seed": "1", "state": "failed",
        "return": "10.0",
    }  # fmt: skip
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_sweep_trains_resumes_and_grows(tmp_path):
    out = tmp_path / "sweep"
    words = ["-m", "spmdrl.sweep", CARTPOLE, "--grid", "optim.lr", "1e-3,3e-4", "--out", out, *TINY]
    first = python(*words, "--parallel", "2")
    assert first.returncode == 0, first.stderr
    assert "2 runs in" in first.stdout
    assert "[2/2]" in first.stdout
    table = (out / "results.csv").read_text()
    assert table.count("finished") == 2
    stamps = {f: f.stat().st_mtime_ns for f in out.glob("*/summary.json")}
    again = python(*words)
    assert "2 finished already" in again.stdout
    assert stamps == {f: f.stat().st_mtime_ns for f in out.glob("*/summary.json")}
    more = python(*words, "--seeds", "2")
    assert "4 runs in" in more.stdout
    assert "(2 seeds)" in more.stdout
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert sorted((row["optim.lr"], row["seed"]) for row in rows) == [
        ("0.0003", "1"), ("0.0003", "2"), ("0.001", "1"), ("0.001", "2"),
    ]  # fmt: skip
    assert len({row["params_sha256"] for row in rows}) == 4
    assert json.loads((out / "lr=1e-3_s1" / "summary.json").read_text())["updates"] == 2
    refused = python(*words, "--algo.gamma", "0.5")
    assert refused.returncode == 2
    assert "algo.gamma: 0.99 -> 0.5" in refused.stderr


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_sweep(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import os, sys\nfrom spmdrl.config import Config, EnvConfig\n"
        "if 'PYTEST_FAIL' in os.environ and '--seed 1' in ' '.join(sys.argv):\n    os._exit(9)\n"
        "config = Config(env=EnvConfig(num_envs=2))\n"
    )
    words = ["-m", "spmdrl.sweep", file, "--seeds", "2", "--out", tmp_path / "out", *TINY]
    done = python(*words, PYTEST_FAIL="1")
    assert done.returncode == 1
    assert "s1: failed, exit code 2" in done.stdout  # a config file may not end the process
    assert "s2: finished" in done.stdout
    assert python(*words).returncode == 0, "the same command tries it again"

"""Ranks that only act and ranks that only learn: the same run as that of plain ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmdrl.acting.traffic import advice
from spmdrl.config import Config, ConfigError, EnvConfig, SyncConfig
from spmdrl.parallel import wire
from spmdrl.parallel.ids import ids_of_ranks
from spmdrl.parallel.process import SAME_BITS_FLAG
from spmdrl.parallel.roles import check_ranks, layout_of, learners_here, ranks_of_roles
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.parallel.topology import Topology
from spmdrl.runtime.validate import validate
from tests.children import CARTPOLE, ROOT, clean_environment, python, succeed, train_command
from tests.role_runs import LAYOUTS

steady = settings(max_examples=200, deadline=None, derandomize=True)


# ---------------------------------------------------------------------------------------------
# Who is what


def config_of(envs: int, learners: int = 1, shards: int = 0, **more: object) -> Config:
    sync = SyncConfig(deterministic=shards > 0, shards=shards or 8)
    config = Config(env=EnvConfig(num_envs=envs), sync=sync, learners=learners)
    return dataclasses.replace(config, **more)  # type: ignore[arg-type]


@steady
@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 12), st.integers(0, 6), st.data())
def test_every_environment_has_one_actor_and_one_learner(envs, learners, actors, halves, data):
    shards = 2 * halves * learners
    assume(not shards or envs % shards == 0)
    config = config_of(envs, learners, shards)
    try:
        layout = layout_of(config, learners + actors)
    except ConfigError:
        few = actors < learners or envs < actors or envs < learners * -(-actors // learners)
        assert few or (shards and shards // learners < 2 * -(-actors // learners))
        return
    assert layout is not None
    assert layout.size == learners + actors
    assert [i for ids in layout.acted for i in ids] == list(range(envs))
    assert list(layout.learned) == ids_of_ranks(config, learners)
    for learner in range(learners):
        mine = layout.actors_of(learner)
        assert mine
        assert [i for rank in mine for i in layout.ids(rank)] == list(layout.ids(learner))
        assert all(layout.learner_of(rank) == learner for rank in mine)
    for ids in layout.acted:
        assert not shards or (len(ids) % (envs // shards) == 0 and len(ids) >= 2 * envs // shards)
    roles = [layout.role(rank) for rank in range(layout.size)]
    assert roles == ["learner"] * learners + ["actor"] * actors


def test_unequal_actors():
    layout = layout_of(config_of(64, 2, actor_envs=(8, 24, 32)), 5)
    assert layout is not None
    assert layout.acted == (range(8), range(8, 32), range(32, 64))
    assert (layout.actors_of(0), layout.actors_of(1)) == ([2, 3], [4])


def test_ranks_that_do_both_have_no_layout():
    assert layout_of(config_of(8, learners=0), 4) is None


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (config_of(64, 4), 4, "no rank is left to act; leave --learners out for ranks that do"),
        (config_of(64, 3), 5, "3 learners need an actor each, but 2 rank"),
        (config_of(2, 1), 4, "3 actors share 2 environments"),
        (config_of(64, actor_envs=(8, 16)), 3, "actor_envs add up to 24, env.num_envs is 64"),
        (config_of(64, actor_envs=(8, 56)), 4, "actor_envs has 2 numbers for 3 actors"),
        (config_of(64, 2, actor_envs=(24, 40)), 4, "rank 3 has environments 24 to 63, but rank 0"),
        (config_of(64, 1, 8), 9, "every actor needs two shards: --sync.shards 16"),
        (config_of(64, 1, 8, actor_envs=(4, 60)), 3, "4 is not a multiple of the 8 environments"),
        (config_of(64, 1, 8, actor_envs=(8, 56)), 3, "two shards: at least 16"),
        (config_of(64, 0, actors=2), 2, "actors has no effect without --learners"),
        (config_of(64, 0, actor_envs=(64,)), 2, "actor_envs has no effect without --learners"),
        (
            config_of(64, sync=SyncConfig(strategy="gather")), 3,
            "roles go with allreduce between the learners",
        ),
    ],
)  # fmt: skip
def test_layouts_that_cannot_work(config, ranks, said):
    with pytest.raises(ConfigError) as error:
        validate(config, ranks)
    assert said in str(error.value)


def test_ranks_are_counted():
    config = config_of(64, 3, actors=2)
    assert ranks_of_roles(config) == 5
    with pytest.raises(ConfigError, match="3 learners and 2 actors are 5 ranks, but mpirun has"):
        check_ranks(config, 4, "mpirun")
    with pytest.raises(ConfigError, match="nobody acts; add --actors N"):
        ranks_of_roles(config_of(64, 3))
    assert ranks_of_roles(config_of(64, 1, nprocs=4)) == 4
    validate(config_of(64, 3))  # evaluates a run that mpirun had started


def test_learners_share_the_accelerators_among_themselves():
    here = Topology(rank=1, size=9, local_rank=1, local_size=5)
    assert learners_here(config_of(64, 2), here).local_size == 2
    assert learners_here(config_of(64, 0), here) == here


# ---------------------------------------------------------------------------------------------
# Messages


def test_headers_come_back():
    model = wire.ModelHeader(7, 3, wire.END | wire.STOP)
    assert wire.ModelHeader.read(model.pack()) == model
    rollout = wire.RolloutHeader(7, 5, 3, 16, 8, wire.STOP, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert wire.RolloutHeader.read(rollout.pack()) == rollout
    assert (len(model.pack()), len(rollout.pack())) == (64, 128)


@pytest.mark.parametrize("byte", [0, 5, 20, 40, 85])
def test_a_damaged_header_is_noticed(byte):
    data = wire.RolloutHeader(7, 5, 3, 16, 8).pack().copy()
    data[byte] ^= 1
    with pytest.raises(wire.WireError, match="damaged"):
        wire.RolloutHeader.read(data)


def test_a_form_puts_every_array_at_its_own_place():
    shapes = {
        "a": ((3, 5), np.dtype("f4")),
        "b": ((), np.dtype("i4")),
        "c": ((0, 2), np.dtype("?")),
    }
    form = wire.Form(shapes, wire.ModelHeader.SIZE)
    arrays = {
        "a": np.arange(15, dtype="f4").reshape(3, 5),
        "b": np.array(-3, "i4"),
        "c": np.zeros((0, 2), bool),
    }
    room = form.room()
    assert (len(room) % wire.BLOCK, room.ctypes.data % wire.BLOCK) == (0, 0)
    form.write(room, arrays)
    found = form.views(room)
    assert all(np.array_equal(found[name], x) for name, x in arrays.items())
    assert not room[: wire.ModelHeader.SIZE].any()
    with pytest.raises(wire.WireError, match="a is"):
        form.write(room, arrays | {"a": np.zeros((3, 5), "f8")})
    with pytest.raises(wire.WireError, match="other arrays"):
        form.write(room, {"a": arrays["a"]})
    assert form.fingerprint != wire.Form(dict(reversed(shapes.items())), 64).fingerprint


def test_couriers_lose_nothing_and_sleep():
    done = subprocess.run(
        [*mpirun_command(3), sys.executable, "-m", "tests.courier_soak", "2000"], cwd=ROOT,
        env=clean_environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [n for n in done.stdout.splitlines() if n.startswith("soak ")]
    found = json.loads(line.removeprefix("soak "))
    assert (found["received"], found["wrong"]) == (4000, 0)
    assert found["growth"] < 1 << 20
    idle = [float(n.split()[1]) for n in done.stdout.splitlines() if n.startswith("idle ")]
    assert len(idle) == 2
    assert max(idle) < 0.3  # a wait inside MPI takes all of the second


# ---------------------------------------------------------------------------------------------
# Advice


@pytest.mark.parametrize(
    ("learner", "actors", "lag", "says"),
    [
        (0.62, 0.05, 1, "about 2.6 times as many actors"),
        (0.05, 0.70, 1, "about 30% of the actors would do"),
        (0.45, 0.55, 0, "with --lag 1 they would work at once"),
        (0.1, 0.2, 1, ""),
    ],
)
def test_advice(learner, actors, lag, says):
    assert says in advice(learner, actors, lag)
    assert bool(says) == bool(advice(learner, actors, lag))


# ---------------------------------------------------------------------------------------------
# The same bits


def hashes(
    tmp_path: Path, task: str, lags: tuple[int, ...], layouts: list[str]
) -> dict[str, dict[str, str]]:
    flags = f"{SAME_BITS_FLAG} --xla_cpu_multi_thread_eigen=false"
    done = subprocess.run(
        [*mpirun_command(4), sys.executable, "-m", "tests.role_runs", tmp_path, task,
         ",".join(map(str, lags)), *layouts],
        env=clean_environment(
            XLA_FLAGS=flags, OPENBLAS_NUM_THREADS="1",
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "programs"),
        ), cwd=ROOT,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (line,) = [n for n in done.stdout.splitlines() if n.startswith("found ")]
    found: dict[str, dict[str, str]] = json.loads(line.removeprefix("found "))
    return found


FEW = ["1 x 1", "2 + 2", "1 + 3, unequal"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "lags", "layouts"),
    [
        pytest.param("cartpole", (2,), FEW, marks=pytest.mark.slow),
        pytest.param("cartpole", (0, 1), list(LAYOUTS), marks=pytest.mark.nightly),
        pytest.param("lstm", (0, 1, 2), FEW, marks=pytest.mark.nightly),
        pytest.param("jax", (0, 1), FEW, marks=pytest.mark.nightly),
    ],
)
def test_every_layout_gives_the_same_bits(task, lags, layouts, tmp_path):
    found = hashes(tmp_path, task, lags, layouts)
    for lag in lags:
        of_layouts = found[str(lag)]
        assert set(of_layouts) == set(layouts)
        assert len(set(of_layouts.values())) == 1, of_layouts
        assert all(len(value) == 64 for value in of_layouts.values())
    assert len({of_layouts["1 x 1"] for of_layouts in found.values()}) == len(lags)
    rows = (tmp_path / f"{task}-{lags[-1]}-2+2" / "metrics.jsonl").read_text().splitlines()
    seen = [json.loads(row)["roles/lag_max"] for row in rows]
    assert seen == [min(n, lags[-1]) for n in range(len(rows))]


# ---------------------------------------------------------------------------------------------
# As commands

SIZES = [
    "--env.num-envs", 32, "--algo.num-steps", 16, "--total-steps", 32 * 16 * 60, "--lag", 1,
    "--sync.deterministic", "--checkpoint.every", 20, "--log.panel", "off", "--net.hidden", 16,
]  # fmt: skip
ROLES = ["--learners", 1, "--actors", 2]


def train(folder: Path, *flags: object) -> str:
    return succeed(*train_command(*SIZES, *flags, "--run-dir", folder)[1:])


def sha(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["params_sha256"])


def cut(run: Path, copy: Path) -> Path:
    """The run as a kill after update 20 would have left it."""
    shutil.copytree(run, copy)
    for step in (40, 60):
        shutil.rmtree(copy / "checkpoints" / f"update-{step:08d}")
    (copy / "summary.json").unlink()
    return copy


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of one rank, from its start to its end."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_plain_ranks_resumes_with_roles(plain, tmp_path):
    run = cut(plain, tmp_path / "run")
    said = train(run, *ROLES)
    assert "rank 0/3 on " in said
    assert "learner, environments 0 to 31, 1 cpu device(s)" in said
    assert "actor of rank 0, environments 16 to 31, cpu" in said
    assert "resumed at update 20 of 60" in (run / "log.txt").read_text()
    assert sha(run) == sha(plain)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_finished_run_ends_at_once(plain, tmp_path):
    """There is no update left to bring the actors the last word."""
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    train(run, "--learners", 1, "--actors", 1)
    assert sha(run) == sha(plain)


@pytest.fixture
def job(tmp_path):
    """A run with roles, once it has made so many updates; ended afterwards."""
    jobs = []

    def start(*flags: object, updates: int = 2) -> subprocess.Popen[str]:
        command = train_command(*SIZES, *ROLES, "--run-dir", tmp_path / "run", *flags)
        found = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(PYTHONPATH=str(ROOT)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        jobs.append(found)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while updates and found.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= updates:
                break
            time.sleep(0.02)
        return found

    yield start
    for started in jobs:
        if started.poll() is None:
            started.kill()
            started.wait()


def beat(run: Path, rank: int) -> dict:
    """The heartbeat of a rank, once it knows its role."""
    file, until = run / ".heartbeat" / f"rank-{rank}.json", time.monotonic() + 60
    while time.monotonic() < until:
        try:
            found: dict = json.loads(file.read_text())
        except (OSError, ValueError):
            found = {"role": ""}
        if found["role"]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no heartbeat of rank {rank}")


LONG = ["--total-steps", 32 * 16 * 100_000]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("rank", "role"), [(2, "actor"), pytest.param(0, "learner", marks=pytest.mark.nightly)]
)
def test_a_killed_rank_is_named_with_its_role(job, tmp_path, rank, role):
    running = job(*LONG)
    killed = beat(tmp_path / "run", rank)
    assert killed["role"] == role
    os.kill(killed["pid"], signal.SIGKILL)
    output, _ = running.communicate(timeout=60)
    assert running.returncode not in (0, 2, 75)
    said = [n for n in output.splitlines() if "died (killed, or by os._exit) in update" in n]
    assert len(said) == 1, output[-3000:]
    assert f"rank {rank} of 3 ({role}) on " in said[0]
    assert f"(pid {killed['pid']})" in said[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_to_stop_may_reach_an_actor(job, plain, tmp_path):
    """It ends the whole job, saved; resumed by one rank, it ends as if it had never stopped."""
    running = job(updates=0)
    os.kill(beat(tmp_path / "run", 1)["pid"], signal.SIGUSR1)
    output, _ = running.communicate(timeout=100)
    assert running.returncode == 75, output[-3000:]
    assert "stopped on request after update" in output
    train(tmp_path / "run")
    assert sha(tmp_path / "run") == sha(plain)


def broken(fault: str, rank: int, folder: Path) -> list[object]:
    options = {"fault": fault, "rank": rank, "update": 3, "step": 2, "num_steps": 16}
    pairs = [f"{name}={value}" for name, value in options.items()]
    return [
        "--env.backend", "gymnasium", "--env.id", "tests.faults.broken_env:Broken-v0",
        "--env.workers", "inline", "--env.options", *pairs, f"marks={folder}",
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", ["rank 2 of 3 (actor) on", "failed in update 3, phase collect",
                   "RuntimeError: the environment broke"]),
        ("nan-reward", ["rank 0 of 3 (learner) on", "non-finite reward on rank 0 in update 3",
                        "They came from the environments of rank 2, an actor on"]),
        ("sleep", ["rank 0 of 3 (learner) on", "It waits for rollout 3 of rank 2, an actor on",
                   "Rank 2 (actor) is furthest behind: collect of update 3."]),
    ],
)  # fmt: skip
def test_what_an_actor_breaks_is_reported(job, tmp_path, fault, said):
    limit = ["--sync.phase-timeout-s", 6] if fault == "sleep" else []
    running = job(*LONG, *limit, *broken(fault, 2, tmp_path))
    output, _ = running.communicate(timeout=120)
    assert running.returncode not in (0, 2, 75)
    assert all(text in output for text in said), output[-5000:]


def test_bad_ranks_are_answered_under_mpirun():
    command = [*mpirun_command(4), sys.executable, "-m", "spmdrl.train", CARTPOLE]
    done = subprocess.run(
        [*command, "--learners", "3", "--actors", "2"], cwd=ROOT, env=clean_environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "3 learners and 2 actors are 5 ranks, but mpirun has started 4" in done.stderr


@pytest.mark.slow
def test_a_rank_that_was_meant_to_be_something_else(tmp_path):
    done = python(
        "-m", "spmdrl.train", CARTPOLE, *ROLES, "--run-dir", tmp_path / "run", SPMDRL_ROLE="actor"
    )
    assert done.returncode == 2
    assert "rank 0 on " in done.stderr
    assert "was started as actor, but is learner by --learners 1" in done.stderr

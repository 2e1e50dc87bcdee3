"""The commands as a user types them: train, resume, evaluate, plot, on real environments.

Training happens in three processes, once for all tests of this file.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmdrl.runtime.rundir import read_run
from tests.children import python, succeed

pytestmark = pytest.mark.timeout(600)  # a training is part of a test's time; CI may be busy

# CartPole with the settings of the SB3 zoo, which learn fast. Over seeds 1 to 5 the last 100
# training episodes had a mean return of 473, 500, 500, 500 and 500.
LEARNS = """
from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, OptimConfig

config = Config(
    total_steps=102_400,
    env=EnvConfig(id="CartPole-v1", num_envs=8),
    algo=Ppo(
        num_steps=32, gamma=0.98, gae_lambda=0.8, epochs=20, minibatches=1,
        clip_schedule="linear", clip_value=False, entropy_coef=0.0,
    ),
    optim=OptimConfig(lr=1e-3),
)
"""
THRESHOLD = 400.0

SHORT = """
from spmdrl.algos import Ppo
from spmdrl.config import CheckpointConfig, Config, EnvConfig

config = Config(
    total_steps=10 * 4 * 32,
    env=EnvConfig(id="CartPole-v1", num_envs=4),
    algo=Ppo(num_steps=32, epochs=2, minibatches=2),
    checkpoint=CheckpointConfig(every=4),
)
"""

# A working MPI is no condition for one process: here it cannot even be imported.
WITHOUT_MPI = """
import json, os, sys
sys.modules["mpi4py"] = sys.modules["mpi4jax"] = None
os.environ["JAX_COMPILATION_CACHE_DIR"] = sys.argv[1]  # these runs have one update in common
from spmdrl.train import main
for argv in json.loads(sys.argv[2]):
    code = main(argv)
    if code:
        sys.exit(code)
"""

# Of every run; those of several ranks, and of a rollout outside of jit, come on top.
METRICS = {
    "episode/return_mean", "episode/length_mean", "episode/count",
    "loss/policy", "loss/value", "loss/entropy",
    "ppo/approx_kl", "ppo/clip_frac", "ppo/explained_variance",
    "optim/lr", "optim/grad_norm", "perf/sps",
    "time/collect", "time/update", "time/other",
    "progress/update", "progress/steps", "progress/eta_s",
}  # fmt: skip
SUMMARY = {
    "env_steps", "updates", "wall_s", "sps", "episode_return_mean", "episode_count",
    "params_sha256", "world_size", "devices",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    path: Path
    stdout: str

    @property
    def summary(self) -> dict:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def params_sha256(self, update: int) -> str:
        meta = self.path / "checkpoints" / f"update-{update:08d}" / "meta.json"
        return json.loads(meta.read_text())["params_sha256"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "learns.py").write_text(LEARNS)
    (place / "short.py").write_text(SHORT)
    return place


@pytest.fixture(scope="session")
def learned(folder) -> Run:
    """Seed 1, long enough to learn."""
    path = folder / "learned"
    return Run(path, succeed("-m", "spmdrl.train", folder / "learns.py", "--run-dir", path))


@pytest.fixture(scope="session")
def again(folder) -> Run:
    """Seed 1, ten updates, in a process of its own."""
    path, file = folder / "again", folder / "short.py"
    return Run(path, succeed("-m", "spmdrl.train", file, "--seed", "1", "--run-dir", path))


@pytest.fixture(scope="session")
def short(folder) -> dict[str, Run]:
    """Ten updates each, in one process; the first run is then resumed for four more."""
    argv = {
        "first": ["--seed", "1"],
        "other_seed": ["--seed", "2"],
        "gymnasium": ["--env.backend", "gymnasium", "--env.threads", "1"],
    }
    path = {name: folder / name for name in argv}
    words = {n: [str(folder / "short.py"), *argv[n], "--run-dir", str(path[n])] for n in argv}
    longer = [*words["first"], "--total-steps", str(14 * 4 * 32)]
    jobs = json.dumps([*words.values(), longer])
    stdout = succeed("-c", WITHOUT_MPI, folder / "cache", jobs)
    return {name: Run(path[name], stdout) for name in path}


def test_it_learns(learned):
    assert learned.summary["episode_return_mean"] >= THRESHOLD
    assert learned.summary["env_steps"] == 102_400


def test_it_says_what_can_be_done_next(learned):
    for module in ("evaluate", "plot"):
        assert f"python -m spmdrl.{module} {learned.path}" in learned.stdout
    command = learned.summary["command"]
    assert command.startswith("python -m spmdrl.train ")
    assert command.endswith(f"--run-dir {learned.path}")
    assert command in learned.stdout
    assert re.search(r"update \d+/400 .* steps/s", learned.stdout), "plain lines without a terminal"


def test_the_run_directory_explains_itself(learned):
    names = {p.name for p in learned.path.iterdir()}
    files = {"config.json", "versions.json", "metrics.jsonl", "log.txt", "summary.json"}
    assert files | {"checkpoints"} <= names
    config = read_run(learned.path)
    assert (config.name, config.run_dir) == ("learns", str(learned.path))
    versions = json.loads((learned.path / "versions.json").read_text())
    assert {"python", "platform", "jax", "envpool", "spmdrl", "run_id"} <= set(versions)
    assert set(learned.summary) >= SUMMARY
    assert (learned.summary["world_size"], learned.summary["devices"]) == (1, 1)
    assert re.fullmatch("[0-9a-f]{64}", learned.summary["params_sha256"])


def test_metrics_have_a_row_an_update(learned):
    rows = learned.rows
    assert [row["progress/update"] for row in rows] == list(range(1, 401))
    assert [row["progress/steps"] for row in rows] == list(range(256, 102_401, 256))
    for row in rows:
        assert set(row) >= METRICS
    last = rows[-1]
    assert last["episode/return_mean"] == pytest.approx(learned.summary["episode_return_mean"])
    assert last["episode/count"] == learned.summary["episode_count"]
    assert last["progress/eta_s"] == 0
    assert rows[0]["optim/lr"] == pytest.approx(1e-3)
    assert 0 < last["optim/lr"] < 1e-5
    assert all(row["ppo/approx_kl"] is not None and row["perf/sps"] > 0 for row in rows)


def test_the_python_rollout_tells_simulation_from_inference(short):
    assert {*METRICS, "time/env", "time/inference"} <= set(short["gymnasium"].rows[-1])


def test_the_same_seed_gives_the_same_bits_in_another_process(short, again):
    first = short["first"]
    assert first.params_sha256(10) == again.params_sha256(10) == again.summary["params_sha256"]
    clock = ("time/", "perf/", "progress/eta")
    for one, two in zip(first.rows[:10], again.rows, strict=True):
        same = [k for k in one if not k.startswith(clock)]
        assert [one[k] for k in same] == [two[k] for k in same]


def test_another_seed_gives_other_bits(short, again):
    assert again.summary["params_sha256"] != short["other_seed"].summary["params_sha256"]


def test_a_finished_run_resumes_when_it_gets_more_steps(short):
    resumed = short["first"]
    assert "resumed at update 10 of 14" in (resumed.path / "log.txt").read_text()
    assert [row["progress/update"] for row in resumed.rows] == list(range(1, 15))
    assert resumed.summary["updates"] == 14
    assert resumed.summary["params_sha256"] != resumed.params_sha256(10)
    assert read_run(resumed.path).total_steps == 14 * 4 * 32
    counts = [row["episode/count"] for row in resumed.rows]
    assert counts == sorted(counts), "episodes are counted on"


def test_old_checkpoints_are_dropped(short):
    kept = sorted(p.name for p in (short["first"].path / "checkpoints").iterdir())
    assert kept[-1] == "update-00000014"
    assert len(kept) <= 4  # the newest three and the best


@pytest.mark.slow
def test_evaluate_with_a_video(learned, folder):
    image = pytest.importorskip("PIL.Image")
    gif = folder / "play.gif"
    said = succeed(
        "-m", "spmdrl.evaluate", learned.path, "--episodes", "10", "--num-envs", "5",
        "--video", gif,
    )  # fmt: skip
    result = json.loads((learned.path / "eval.json").read_text())
    assert result["episodes"] == len(result["returns"]) == 10
    assert result["return_mean"] >= THRESHOLD
    assert result["return_ci95"][0] <= result["return_mean"] <= result["return_ci95"][1]
    assert {"checkpoint", "deterministic", "seed", "return_std", "length_mean"} <= set(result)
    assert result["length_mean"] == result["return_mean"], "CartPole pays 1 for every step"
    assert f"{result['return_mean']:.1f}" in said
    assert str(gif) in said
    with image.open(gif) as video:
        assert video.format == "GIF"
        assert video.n_frames > 50


def test_plot_several_runs(learned, again, folder):
    image = pytest.importorskip("PIL.Image")
    out = folder / "curves.png"
    said = succeed("-m", "spmdrl.plot", learned.path, again.path, "--out", out)
    assert str(out) in said
    with image.open(out) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 400


@pytest.mark.parametrize("module", ["evaluate", "plot"])
def test_tools_refuse_what_is_no_run(module, folder):
    done = python("-m", f"spmdrl.{module}", folder / "nowhere")
    assert done.returncode == 2
    assert f"{folder / 'nowhere'} is not a run directory" in done.stderr

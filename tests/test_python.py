"""The policy and the trainer as calls of Python; the page that shows them is executed."""

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spmdrl
from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, EvalConfig, NetConfig
from spmdrl.library.training import checked
from spmdrl.runtime.evaluation import play
from spmdrl.runtime.spaces import from_plain, read_spaces, to_plain
from spmdrl.types import ActionSpace, EnvSpec, ObsPart
from tests.children import ROOT, python, succeed

SIGNALS_BEFORE = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
SMALL = Config(
    total_steps=64,
    env=EnvConfig(num_envs=2),
    net=NetConfig(hidden=(8,)),
    algo=Ppo(num_steps=16, minibatches=2, epochs=1),
    eval=EvalConfig(episodes=6, num_envs=3, seed=5),
)
# Continuous, normalised observations; episodes of 200 steps.
PENDULUM = replace(SMALL, env=replace(SMALL.env, id="Pendulum-v1", normalize_obs=True))


@pytest.fixture(scope="module", params=[SMALL, PENDULUM], ids=["discrete", "box"])
def result(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("python") / "run"
    return spmdrl.train(replace(request.param, run_dir=str(folder)))


def played(policy, config: Config, deterministic: bool) -> list[float]:
    """Returns of the evaluation's episodes, by calls of the policy."""
    from spmdrl.envs import make_env

    env = make_env(replace(config, seed=config.eval.seed), range(3))
    raw = env.spec.action
    policy.reset(config.eval.seed)
    obs, resetting = env.reset(), np.zeros(3, bool)
    score = np.zeros(3)
    found: list[list[float]] = [[] for _ in range(3)]
    while min(map(len, found)) < 2:
        action = policy(obs, deterministic)
        assert action.shape == (3, *raw.shape)
        assert action.dtype == raw.dtype
        env.send(action if raw.kind == "box" else action - raw.start)
        answer = env.recv()
        score += np.where(resetting, 0.0, answer.reward)
        for i in np.flatnonzero(answer.episode_over):
            found[i].append(float(score[i]))
            score[i] = 0.0
        obs, resetting = answer.obs, answer.terminated | answer.truncated
    env.close()
    return [found[i][n] for n in range(2) for i in range(3)]


@pytest.mark.parametrize("deterministic", [True, False], ids=["mode", "sampled"])
def test_the_policy_acts_bit_for_bit_as_evaluate_does(result, deterministic):
    policy = spmdrl.load(result.run_dir)
    config = policy.config
    config = replace(config, eval=replace(config.eval, deterministic=deterministic))
    expected = [score for score, _ in play(config, policy.checkpoint)]
    assert played(policy, config, deterministic) == expected


SERVED = """
import sys
import numpy as np
from jax import export
folder = sys.argv[1]
program = export.deserialize(open(folder + "/policy.jax_export", "rb").read())
obs = np.load(folder + "/obs.npy")
action, _ = program.call(obs, (), np.ones(len(obs), bool))
assert "spmdrl" not in sys.modules
np.save(folder + "/actions.npy", action)
"""


def test_an_exported_policy_acts_as_evaluate_does(result, tmp_path):
    """In a process that has only jax, on observations of the evaluation."""
    policy = spmdrl.load(result.run_dir)
    seen: list[np.ndarray] = []
    acted: list[np.ndarray] = []

    def listening(obs, deterministic):
        seen.append(np.array(obs))
        acted.append(policy(obs, deterministic))
        return acted[-1]

    listening.reset = policy.reset  # type: ignore[attr-defined]
    played(listening, policy.config, deterministic=True)
    folder = policy.export(tmp_path / "served")
    np.save(folder / "obs.npy", np.concatenate(seen))
    succeed("-c", SERVED, folder)
    actions = np.load(folder / "actions.npy")
    expected = np.concatenate(acted)
    assert actions.dtype == expected.dtype
    if expected.dtype.kind == "i":
        np.testing.assert_array_equal(actions, expected)
    else:  # more rows at once differ in the last digits
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
    assert "stablehlo." in (folder / "policy.mlir").read_text()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        policy.export(folder)


def test_one_observation_or_many(result):
    policy, shape = result.policy(), result.policy().spec.parts[""].shape
    obs = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    many = policy(obs, deterministic=True)
    one = policy(obs[0], deterministic=True)
    assert one.shape == policy.spec.action.shape
    assert many.shape == (4, *one.shape)
    assert many[0] == pytest.approx(one, rel=1e-5)
    with pytest.raises(ValueError, match=r"have shape \(7,\); the policy takes"):
        policy(np.zeros(7))


def test_noise_goes_on_from_call_to_call_and_begins_again(result):
    policy = result.policy()
    obs = np.zeros((64, *policy.spec.parts[""].shape), np.float32)

    def draws(seed: int) -> list[bytes]:
        policy.reset(seed)
        return [policy(obs, deterministic=False).tobytes() for _ in range(2)]

    first = draws(3)
    assert first[0] != first[1]
    assert draws(3) == first
    assert draws(4) != first
    assert policy(obs, deterministic=True).tobytes() == policy(obs, deterministic=True).tobytes()


def test_the_result_is_what_the_run_directory_holds(result):
    saved = json.loads((result.run_dir / "summary.json").read_text())
    assert result.summary == saved
    assert not result.stopped
    assert saved["updates"] == len(result.metrics) == 2
    assert f"run_dir={str(result.run_dir)!r}" in saved["command"]
    assert set(result.policy().params) >= {"policy_head", "value_head"}
    assert result.policy(2).checkpoint.name == "update-00000002"
    with pytest.raises(ConfigError, match="no checkpoint of update 9"):
        result.policy(9)


@pytest.mark.slow
def test_the_same_call_trains_further(tmp_path):
    config = replace(SMALL, run_dir=str(tmp_path / "run"))
    one = spmdrl.train(config)
    two = spmdrl.train(config, total_steps=128)
    assert (one.summary["updates"], two.summary["updates"]) == (2, 4)
    assert one.summary["params_sha256"] != two.summary["params_sha256"]


def test_signals_are_the_callers_again(result):
    """As the tests found them: a shell's background job ignores SIGINT from the start."""
    assert signal.getsignal(signal.SIGINT) is SIGNALS_BEFORE[signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is SIGNALS_BEFORE[signal.SIGTERM]


@pytest.mark.slow
def test_the_bits_are_those_of_the_command(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from spmdrl.algos import Ppo\n"
        "from spmdrl.config import Config, EnvConfig, NetConfig\n"
        "config = Config(total_steps=64, env=EnvConfig(num_envs=2), net=NetConfig(hidden=(8,)),\n"
        "                algo=Ppo(num_steps=16, minibatches=2, epochs=1))\n"
    )
    call = f"import spmdrl; spmdrl.train({str(file)!r}, run_dir={str(tmp_path / 'a')!r})"
    succeed("-c", call)
    succeed("-m", "spmdrl.train", file, "--run-dir", tmp_path / "b")
    one, two = (json.loads((tmp_path / n / "summary.json").read_text()) for n in "ab")
    assert one["params_sha256"] == two["params_sha256"]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["name"] == "own"


# ---------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sede": 1}, "no field 'sede'"),
        ({"nprocs": 2}, "start the script by mpirun"),
        ({"seed": -1}, "seed is -1"),
        ({"env": EnvConfig(id="CartPol-v1", num_envs=2)}, "did you mean CartPole-v1?"),
        ({"init_from": "nowhere"}, "nowhere is not a run directory"),
    ],
)
def test_what_cannot_work_is_a_config_error(changes, said):
    with pytest.raises(ConfigError) as error:
        checked(SMALL, changes)
    assert said in str(error.value)


def test_what_only_the_environment_shows_is_a_config_error_too(tmp_path):
    config = replace(SMALL, env=replace(SMALL.env, normalize_obs=True, id="Pong-v5"))
    with pytest.raises(ConfigError, match="normalize_obs is for vectors"):
        spmdrl.train(config, run_dir=str(tmp_path / "run"))


def test_a_run_that_fails_is_an_error_with_its_reason(tmp_path, monkeypatch, capfd):
    def broken(*_):
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr("spmdrl.runtime.loop.TrainingLoop.log", broken)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a fault of the program"):
        spmdrl.train(SMALL, run_dir=str(tmp_path / "run"))
    assert "Traceback" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------
# Where less is installed


def test_loading_needs_neither_mpi_nor_environments(result):
    blocked = "for name in ('mpi4py', 'mpi4jax', 'envpool'): sys.modules[name] = None"
    program = (
        f"import sys\n{blocked}\nimport numpy as np, spmdrl\n"
        f"policy = spmdrl.load({str(result.run_dir)!r})\n"
        "print(policy(policy.spec.zeros(2)).shape[0])\n"
    )
    assert succeed("-c", program).split() == ["2"]


def test_a_run_without_the_file_asks_its_environment(result):
    file = result.run_dir / "spaces.json"
    kept = file.read_text()
    file.unlink()
    try:
        assert spmdrl.load(result.run_dir).spec.parts == from_plain(json.loads(kept)).parts
    finally:
        file.write_text(kept)


def test_importing_the_package_loads_nothing():
    program = "import sys, spmdrl; print('jax' in sys.modules, 'numpy' in sys.modules)"
    assert succeed("-c", program).split() == ["False", "False"]


def test_a_module_of_the_package_is_still_found_by_its_name():
    from spmdrl import train

    assert train.__name__ == "spmdrl.train"
    assert callable(train.main)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        spmdrl.nothing  # noqa: B018


# ---------------------------------------------------------------------------------------------
# Spaces

SPECS = [
    EnvSpec(
        ObsPart((3,), np.dtype(np.float64)),
        ActionSpace(
            "box", (2,), np.dtype(np.float32),
            low=np.array([-1.0, -np.inf], np.float32), high=np.array([0.1, np.inf], np.float32),
        ),
    ),
    EnvSpec(
        {"image": ObsPart((4, 8, 8), np.dtype(np.uint8)), "at": ObsPart((), np.dtype(np.int32))},
        ActionSpace("multi_discrete", (2,), np.dtype(np.int32), (3, 4), np.array([1, 0], np.int32)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=["box", "dict"])
def test_spaces_come_back_as_they_were(spec):
    again = from_plain(json.loads(json.dumps(to_plain(spec))))
    assert again.parts == spec.parts
    for name, value in vars(spec.action).items():
        found = getattr(again.action, name)
        assert type(found) is type(value)
        np.testing.assert_array_equal(found, value)
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("text", ["{", "{}", '{"class": "Path"}', '{"class": "dict", "items": {}}'])
def test_a_damaged_file_of_spaces_is_bad_input(tmp_path, text):
    (tmp_path / "spaces.json").write_text(text)
    with pytest.raises(ConfigError, match=r"spaces\.json is damaged"):
        read_spaces(tmp_path)


# ---------------------------------------------------------------------------------------------
# The page


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    assert len(blocks) == 5
    script = tmp_path / "page.py"
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n" + "\n".join(blocks))
    done = python(script, PYTHONPATH=":".join([str(ROOT), *filter(None, sys.path)]))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "(5,) (5, 2) (5,)" in done.stdout
    assert (tmp_path / "runs" / "second" / "init.json").exists()
    assert Path(tmp_path / "runs" / "first" / "summary.json").exists()

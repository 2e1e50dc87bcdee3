"""Behaviour cloning: from recorded steps to a run directory that the other tools can use."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl import clone, evaluate, runs
from spmdrl.config import Config, EnvConfig, EvalConfig, NetConfig, to_json
from spmdrl.envs import make_env
from spmdrl.episodes import Recording, describe_spec, write_episode, write_index
from spmdrl.nets import make_policy
from spmdrl.nets.moments import variance
from spmdrl.nets.policy import variables_of
from spmdrl.runtime.models import find_checkpoint, load_model
from spmdrl.runtime.spaces import to_plain
from spmdrl.types import ActionSpace, EnvSpec, ObsPart
from tests.children import succeed

CONFIG = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=4),
    net=NetConfig(hidden=(32, 32)),
    eval=EvalConfig(episodes=8, num_envs=8),
)


def lean(obs: np.ndarray) -> int:
    """A rule that balances the pole for long: push to where it falls."""
    return int(obs[2] + 0.5 * obs[3] + 0.05 * obs[0] + 0.1 * obs[1] > 0)


def record_rule(folder: Path, config: Config, episodes: int) -> Recording:
    """Episodes of the rule, as spmdrl.record would write them."""
    folder.mkdir()
    env, written = make_env(config, range(episodes), threads=1), []
    rows: list[list[dict]] = [[] for _ in range(episodes)]
    obs, going = env.reset(), set(range(episodes))
    while going:
        action = np.array([lean(o) for o in obs], np.int32)
        env.send(action)
        answer = env.recv()
        for i in sorted(going):
            step = {name: getattr(answer, name)[i] for name in ("reward", "terminated")}
            step |= {"truncated": answer.truncated[i], "valid": np.True_}
            rows[i].append(step | {"obs": obs[i], "action": action[i]})
            if answer.episode_over[i]:
                arrays = {name: np.stack([row[name] for row in rows[i]]) for name in rows[i][0]}
                arrays["last_obs"] = answer.obs[i]
                written.append(write_episode(folder, 0, i, i, arrays))
                going.remove(i)
        obs = answer.obs
    about = {"spaces": describe_spec(env.spec), "config": json.loads(to_json(config))}
    env.close()
    write_index(folder, about, written)
    return Recording(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clone")


@pytest.fixture(scope="module")
def data(folder) -> Recording:
    config = replace(CONFIG, env=replace(CONFIG.env, normalize_obs=True))
    return record_rule(folder / "data", config, episodes=12)


@pytest.fixture(scope="module")
def cloned(folder, data) -> Path:
    out = folder / "cloned"
    words = ["--run-dir", str(out), "--epochs", "8", "--batch-size", "64", "--eval-episodes", "8"]
    assert clone.main([str(data.folder), *words, "--lr", "3e-3"]) == 0
    return out


def test_the_data_are_worth_learning_from(data):
    assert min(episode.episode_return for episode in data.episodes) >= 200


def test_the_clone_plays_like_the_rule(cloned, data):
    result = json.loads((cloned / "eval.json").read_text())
    recorded = np.mean([episode.episode_return for episode in data.episodes])
    assert result["return_mean"] >= 0.9 * recorded
    assert result["episodes"] == 8


def test_the_clone_does_what_the_rule_does(cloned, data):
    config = data.config
    policy, variables = load_model(config, data.spec(), find_checkpoint(cloned))
    arrays = data.arrays(data.episodes[0])
    obs = np.array(arrays["obs"])
    _, dist_params, _ = policy.apply(variables, (), obs, jnp.zeros(len(obs), bool))
    agreed = np.mean(np.asarray(policy.dist.mode(dist_params)) == arrays["action"])
    assert agreed >= 0.9


def test_the_loss_falls(cloned, data):
    rows = [json.loads(line) for line in (cloned / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss/nll"] for row in rows]
    assert len(losses) == 8
    assert losses[0] < 0.75, "about log 2 at first"
    assert losses[-1] < 0.5 * losses[0]
    assert [row["progress/steps"] for row in rows] == [
        data.num_steps * epoch for epoch in range(1, 9)
    ]


def test_the_loss_is_the_negative_log_likelihood(data):
    config = replace(data.config, env=replace(data.config.env, normalize_obs=False))
    policy = make_policy(config, data.spec())
    params = jax.jit(policy.init)(jax.random.key(0))
    arrays = data.arrays(data.episodes[0])
    obs, action = jnp.asarray(arrays["obs"]), np.array(arrays["action"])
    _, logits, _ = policy.apply(variables_of(params, None), (), obs, jnp.zeros(len(obs), bool))
    rows = np.asarray(logits, np.float64)
    log_p = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    expected = -log_p[np.arange(len(action)), action].mean()
    found = clone.negative_log_likelihood(policy, params, None, obs, action)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_observations_are_normalised_by_the_data(cloned, data):
    obs = np.concatenate([data.arrays(episode)["obs"] for episode in data.episodes])
    found = clone.observation_moments(data, data.spec())
    assert float(found.count) == len(obs)
    np.testing.assert_allclose(found.mean, obs.mean(0, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(variance(found), obs.var(0, dtype=np.float64), rtol=1e-5)
    _, variables = load_model(data.config, data.spec(), find_checkpoint(cloned))
    saved = variables["obs_stats"]["moments"]
    np.testing.assert_array_equal(saved.mean, found.mean)


def test_the_other_tools_take_it_for_a_run(cloned, data, capsys):
    before = json.loads((cloned / "eval.json").read_text())
    assert evaluate.main([str(cloned)]) == 0
    assert json.loads((cloned / "eval.json").read_text()) == before, "evaluated in the same way"
    info = runs.describe(cloned, now=0.0)
    assert info is not None
    assert (info.state, info.steps, info.total_steps) == (
        "finished", 8 * data.num_steps, 8 * data.num_steps,
    )  # fmt: skip
    assert info.episode_return == before["return_mean"]


def test_a_clone_is_loaded_without_its_environment(cloned, data, monkeypatch):
    import spmdrl

    monkeypatch.setattr("spmdrl.envs.make_env", None)
    policy = spmdrl.load(cloned)
    arrays = data.arrays(data.episodes[0])
    agreed = np.mean(policy(np.array(arrays["obs"])) == arrays["action"])
    assert agreed >= 0.9


@pytest.mark.parametrize(
    "action",
    [
        ActionSpace("discrete", (), np.dtype(np.int64), (6,), 0, joint=(2, 3), env_shape=(2,)),
        ActionSpace("multi_discrete", (4,), np.dtype(np.int32), (2,) * 4, 1, env_shape=(2, 2)),
        ActionSpace("box", (2,), np.dtype(np.float32), low=np.array([-np.inf, -0.3], np.float32),
                    high=np.array([0.1, np.inf], np.float32)),
    ],
    ids=lambda action: action.kind,
)  # fmt: skip
def test_a_recording_has_all_of_the_spaces(action, data, monkeypatch):
    """Else a clone would act in another way than its environment takes."""
    parts = {
        "image": ObsPart((7, 7, 3), np.dtype(np.uint8), "ids", (11, 6, 4)),
        "vector": ObsPart((3,), np.dtype(np.float32)),
    }
    spec = EnvSpec(parts, action, left_out=("mission",))
    saved = json.loads(json.dumps(describe_spec(spec)))
    monkeypatch.setitem(data.index, "spaces", saved)
    assert to_plain(data.spec()) == to_plain(replace(spec, action=replace(
        action, start=np.asarray(action.start)
    )))  # fmt: skip


def test_bad_input(folder, data, cloned, tmp_path, capsys):
    out = str(tmp_path / "out")

    def refusal(*argv: str) -> str:
        assert clone.main(list(argv)) == 2
        message = capsys.readouterr().err
        assert message.startswith("spmdrl: ")
        assert message.count("\n") == 1
        return message

    source = str(data.folder)
    assert "is not a finished recording" in refusal(str(tmp_path), "--run-dir", out)
    assert "not an empty directory" in refusal(source, "--run-dir", str(cloned))
    assert "epochs is 0" in refusal(source, "--run-dir", out, "--epochs", "0")
    assert "optim.lr is -1.0" in refusal(source, "--run-dir", out, "--lr", "-1")
    assert not Path(out).exists()


# ---------------------------------------------------------------------------------------------
# The whole way


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_from_an_expert_to_its_clone(tmp_path):
    """Train, record with two workers, clone, evaluate: each as a user types it."""

    def command(module: str, *words: object) -> None:
        print(succeed("-m", f"spmdrl.{module}", *words))

    expert, data, out = tmp_path / "expert", tmp_path / "data", tmp_path / "clone"
    command("train", "configs/cartpole.py", "--total-steps", 250_000, "--run-dir", expert)
    command("record", expert, "--episodes", 100, "--nprocs", 2, "--out", data)
    recorded = [episode.episode_return for episode in Recording(data).episodes]
    assert np.mean(recorded) >= 475
    command("clone", data, "--run-dir", out)
    command("evaluate", out, "--episodes", 100)
    assert json.loads((out / "eval.json").read_text())["return_mean"] >= 450

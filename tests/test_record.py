"""Recording episodes and reading them back, on real environments.

The policy is untrained: what is recorded matters here, not how well it plays.
"""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl import evaluate, record
from spmdrl.config import Config, ConfigError, EnvConfig, EvalConfig, NetConfig
from spmdrl.envs import make_env
from spmdrl.envs.envpool_backend import EnvpoolBatch
from spmdrl.episodes import FIELDS, INDEX, Batches, Recording, map_arrays
from spmdrl.nets import make_policy, moments
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot, to_named
from spmdrl.runtime.models import find_checkpoint
from spmdrl.runtime.rundir import open_run
from tests.children import succeed

EPISODES = 11


def make_run(path: Path, env: EnvConfig, returns: tuple[float | None, ...] = (1.0,)) -> Path:
    """A run with untrained networks, whose heads are large enough for varied actions."""
    config = Config(
        run_dir=str(path),
        env=env,
        net=NetConfig(torso="mlp", hidden=(16,)),  # also for images: it compiles faster
        eval=EvalConfig(num_envs=4, max_steps=2_000),
    )
    one = make_env(config, range(1), threads=1)
    policy, shape = make_policy(config, one.spec), one.spec.parts[""].shape
    one.close()
    open_run(config)
    init = jax.jit(policy.init)
    for update, value in enumerate(returns, start=1):
        params = jax.tree.map(lambda p: np.asarray(3 * p), init(jax.random.key(update)))
        seen = moments.init(shape if env.normalize_obs else (0,))
        arrays = {"params": to_named({"params": params, "obs_moments": seen})}
        Checkpointer(path / "checkpoints", keep=9).save(
            Snapshot(update, arrays, {"return_mean": value})
        )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def run_dir(folder) -> Path:
    return make_run(folder / "run", EnvConfig(id="CartPole-v1"), returns=(1.0, 3.0, 2.0))


@pytest.fixture(scope="module")
def recording(folder, run_dir) -> Recording:
    argv = [str(run_dir), "--out", str(folder / "one"), "--episodes", str(EPISODES)]
    assert record.main([*argv, "--stochastic"]) == 0
    return Recording(folder / "one")


@pytest.fixture(scope="module")
def by_two(folder, run_dir) -> Recording:
    """The same command with two workers."""
    said = succeed(
        "-m", "spmdrl.record", run_dir, "--out", folder / "two",
        "--episodes", EPISODES, "--stochastic", "--nprocs", 2,
    )  # fmt: skip
    assert f"{EPISODES} episodes" in said
    return Recording(folder / "two")


# ---------------------------------------------------------------------------------------------
# What is recorded


def test_exactly_the_episodes_that_were_asked_for(recording):
    assert [episode.id for episode in recording.episodes] == list(range(EPISODES))
    files = {p.name for p in recording.folder.iterdir()}
    assert files == {INDEX, *(episode.file for episode in recording.episodes)}
    assert len({episode.seed for episode in recording.episodes}) == EPISODES
    assert len({episode.sha256 for episode in recording.episodes}) == EPISODES


def test_the_index_explains_the_recording(recording, run_dir):
    index = recording.index
    assert index["env"] == "CartPole-v1"
    assert index["spaces"]["obs"] == {
        "shape": [4], "dtype": "float32", "kind": "vector", "values": [], "columns": [],
    }  # fmt: skip
    assert index["spaces"]["action"]["kind"] == "discrete"
    manifest = json.loads((find_checkpoint(run_dir) / "manifest.json").read_text())
    assert index["checkpoint"]["sha256"] == manifest["sha256"]
    assert index["checkpoint"]["update"] == 3
    assert (index["deterministic"], index["workers"]) == (False, 1)
    row = index["episodes"][0]
    assert set(row) == {"id", "file", "length", "return", "seed", "sha256"}
    assert row["return"] == row["length"], "CartPole pays 1 for every step"
    assert recording.config.eval == EvalConfig(num_envs=4, max_steps=2_000), "as in the run"
    assert recording.spec().action.nvec == (2,)


def test_an_episode_is_whole(recording):
    for episode in recording.episodes:
        arrays = recording.arrays(episode)
        n = episode.length
        assert {name: arrays[name].shape for name in FIELDS} == {
            "obs": (n, 4), "action": (n,), "reward": (n,), "terminated": (n,), "truncated": (n,),
        }  # fmt: skip
        over = arrays["terminated"] | arrays["truncated"]
        assert over[-1]
        assert not over[:-1].any()
        assert arrays["valid"].all()
        assert arrays["last_obs"].shape == (4,)


def test_the_number_of_workers_does_not_matter(recording, by_two):
    assert by_two.index["workers"] == 2
    assert {episode.file[:9] for episode in by_two.episodes} == {"worker-00", "worker-01"}
    assert by_two.fingerprint == recording.fingerprint
    for one, two in zip(recording.episodes, by_two.episodes, strict=True):
        assert (one.id, one.seed, one.episode_return) == (two.id, two.seed, two.episode_return)


def replay(backend: EnvpoolBatch, arrays: dict[str, np.ndarray]) -> None:
    """Step one environment by the recorded actions; every answer must be the recorded one."""
    seen = [*arrays["obs"], arrays["last_obs"]]
    np.testing.assert_array_equal(backend.reset()[0], seen[0])
    for t, action in enumerate(arrays["action"]):
        backend.send(action[None])
        answer = backend.recv()
        np.testing.assert_array_equal(answer.obs[0], seen[t + 1])
        for name in ("reward", "terminated", "truncated"):
            assert getattr(answer, name)[0] == arrays[name][t]
    assert answer.episode_over[0]
    backend.close()


def test_an_episode_replays_from_its_seed(recording):
    for episode in recording.episodes:
        env = EnvpoolBatch("CartPole-v1", [episode.seed], 1, {})
        replay(env, recording.arrays(episode))


def test_continuous_actions_and_normalised_observations(folder):
    env = EnvConfig(id="Pendulum-v1", normalize_obs=True)
    run = make_run(folder / "pendulum", env)
    out = folder / "swings"
    assert record.main([str(run), "--out", str(out), "--episodes", "2", "--stochastic"]) == 0
    recording = Recording(out)
    for episode in recording.episodes:
        arrays = recording.arrays(episode)
        assert episode.length == 200
        assert (arrays["truncated"][-1], arrays["terminated"][-1]) == (True, False)
        assert np.abs(arrays["obs"][:, 2]).max() > 1, "raw, not as the network sees them"
        replay(EnvpoolBatch("Pendulum-v1", [episode.seed], 1, {}), arrays)
    assert recording.index["spaces"]["action"]["low"] == [-2.0]


def test_the_reset_after_a_lost_life_is_no_step(folder):
    """Breakout under episodic_life: the episode is the game, and resets inside have no weight."""
    env = EnvConfig(id="Breakout-v5", options={"episodic_life": True, "max_episode_steps": 200})
    run = make_run(folder / "breakout", env)
    out = folder / "games"
    assert record.main([str(run), "--out", str(out), "--episodes", "1", "--stochastic"]) == 0
    recording = Recording(out)
    (episode,) = recording.episodes
    arrays = recording.arrays(episode)
    lost = np.flatnonzero(arrays["terminated"])
    assert len(lost) > 1
    np.testing.assert_array_equal(np.flatnonzero(~arrays["valid"]), lost[lost < lost[-1]] + 1)
    assert episode.length == arrays["valid"].sum() < len(arrays["action"])
    replay(EnvpoolBatch("Breakout-v5", [episode.seed], 1, dict(env.options)), arrays)
    batch = next(Batches(recording, batch_size=10_000))
    assert len(batch["action"]) == episode.length


# ---------------------------------------------------------------------------------------------
# Reading


def test_mapped_arrays_are_those_of_safetensors(recording):
    from safetensors.numpy import load_file

    file = recording.folder / recording.episodes[0].file
    mapped, loaded = map_arrays(file), load_file(file)
    assert set(mapped) == set(loaded)
    for name, array in loaded.items():
        assert mapped[name].dtype == array.dtype
        np.testing.assert_array_equal(mapped[name], array)


def test_an_epoch_holds_every_step_once(recording):
    batches = list(Batches(recording, batch_size=7, seed=3, epochs=1))
    assert len(batches) == -(-recording.num_steps // 7)
    files = [recording.arrays(episode) for episode in recording.episodes]
    for name in FIELDS:
        read = np.concatenate([batch[name] for batch in batches])
        stored = np.concatenate([arrays[name] for arrays in files])
        assert read.dtype == stored.dtype
        assert sorted(map(tuple, read.reshape(len(read), -1))) == sorted(
            map(tuple, stored.reshape(len(stored), -1))
        )


def test_a_batch_keeps_what_belongs_together(recording):
    """An observation comes with its own action."""
    files = [recording.arrays(episode) for episode in recording.episodes]
    action_of = {
        obs.tobytes(): action
        for arrays in files
        for obs, action in zip(arrays["obs"], arrays["action"], strict=True)
    }
    for batch in Batches(recording, batch_size=16, seed=1, epochs=1):
        for obs, action in zip(batch["obs"], batch["action"], strict=True):
            assert action_of[obs.tobytes()] == action


def test_epochs_and_seeds_have_orders_of_their_own(recording):
    def order(seed: int, epoch: int) -> bytes:
        reader = Batches(recording, batch_size=recording.num_steps, seed=seed)
        return [next(reader) for _ in range(epoch + 1)][epoch]["obs"].tobytes()

    assert order(1, 0) == order(1, 0)
    assert len({order(1, 0), order(1, 1), order(2, 0)}) == 3


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(1, 120),
    seed=st.integers(0, 2**31 - 1),
    taken=st.integers(0, 60),
    then=st.integers(1, 40),
)
def test_a_saved_state_resumes_exactly(recording, batch_size, seed, taken, then):
    reader = Batches(recording, batch_size, seed)
    for _ in range(taken):
        next(reader)
    state = json.loads(json.dumps(reader.state()))
    other = Batches(recording, batch_size, seed, state=state)
    assert other.state() == reader.state()
    for _ in range(then):
        one, two = next(reader), next(other)
        assert set(one) == set(two) == set(FIELDS)
        for name in FIELDS:
            np.testing.assert_array_equal(one[name], two[name])


def test_the_state_of_another_reader_is_refused(recording):
    state = Batches(recording, 8, seed=1).state()
    for batch_size, seed in ((9, 1), (8, 2)):
        with pytest.raises(ConfigError, match="another reader"):
            Batches(recording, batch_size, seed, state=state)


# ---------------------------------------------------------------------------------------------
# What is refused


def refusal(capsys, *argv: object) -> str:
    assert record.main([str(word) for word in argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith("spmdrl: ")
    assert message.count("\n") == 1
    return message


def test_bad_input(run_dir, recording, folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert "not a run directory" in refusal(capsys, tmp_path / "nowhere", "--out", out)
    assert "at least 1" in refusal(capsys, run_dir, "--out", out, "--episodes", 0)
    assert "there are: 1, 2, 3" in refusal(capsys, run_dir, "--out", out, "--checkpoint", 7)
    assert "latest, best or" in refusal(capsys, run_dir, "--out", out, "--checkpoint", "newest")
    assert "holds a recording already" in refusal(capsys, run_dir, "--out", recording.folder)
    assert "is not empty" in refusal(capsys, run_dir, "--out", folder)
    assert not out.exists()
    out.mkdir()
    (out / "worker-00-episode-000000.safetensors").touch()
    assert "unfinished recording; delete it" in refusal(capsys, run_dir, "--out", out)


def test_an_episode_without_an_end_is_an_error(run_dir, tmp_path, capsys):
    said = refusal(capsys, run_dir, "--out", tmp_path / "out", "--max-steps", 3)
    assert "did not end within 3 steps" in said
    assert "--max-steps" in said
    with pytest.raises(ConfigError, match="not a finished recording"):
        Recording(tmp_path / "out")


def test_the_best_checkpoint(run_dir):
    assert find_checkpoint(run_dir, "best").name == "update-00000002"
    assert find_checkpoint(run_dir, "latest").name == "update-00000003"
    assert find_checkpoint(run_dir, "1").name == "update-00000001"


def test_no_checkpoint_is_the_best_where_none_knows_its_return(folder):
    run = make_run(folder / "silent", EnvConfig(id="CartPole-v1"), returns=(None,))
    with pytest.raises(ConfigError, match="has a recorded return; use --checkpoint latest"):
        find_checkpoint(run, "best")
    assert find_checkpoint(run).name == "update-00000001"


# ---------------------------------------------------------------------------------------------
# Evaluating has the same words for the same things


def test_evaluate_and_record_take_the_same_words(run_dir, tmp_path, capsys):
    words = ["--checkpoint", "best", "--stochastic"]
    few = ["--episodes", "2"]
    assert evaluate.main([str(run_dir), *few, *words]) == 0
    assert record.main([str(run_dir), *few, *words, "--out", str(tmp_path / "out")]) == 0
    result = json.loads((run_dir / "eval.json").read_text())
    index = Recording(tmp_path / "out").index
    assert (result["checkpoint"], index["checkpoint"]["update"]) == ("update-00000002", 2)
    assert result["deterministic"] is index["deterministic"] is False
    low, high = result["return_ci95"]
    assert low <= result["return_mean"] <= high
    assert "95 % interval" in capsys.readouterr().out


def test_one_episode_has_neither_deviation_nor_interval(run_dir, capsys):
    assert evaluate.main([str(run_dir), "--episodes", "1"]) == 0
    said = capsys.readouterr().out
    assert "over 1 episode, length" in said
    assert "±" not in said
    assert "interval" not in said
    result = json.loads((run_dir / "eval.json").read_text())
    assert (result["return_std"], result["return_ci95"]) == (None, None)
    assert result["returns"] == [result["return_mean"]]


def test_eval_json_is_replaced_and_not_written_over(run_dir, tmp_path):
    file, old = run_dir / "eval.json", tmp_path / "old"
    file.write_text("old")
    os.link(file, old)
    assert evaluate.main([str(run_dir), "--episodes", "1"]) == 0
    assert old.read_text() == "old"
    assert "return_mean" in file.read_text()


def test_a_flipped_bit_is_found(recording, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in recording.folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    Recording(copy)
    victim = copy / recording.episodes[4].file
    data = bytearray(victim.read_bytes())
    data[-20] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ConfigError, match=f"{victim.name} does not match its SHA-256"):
        Recording(copy)
    victim.unlink()
    with pytest.raises(ConfigError, match=f"{victim.name} is missing"):
        Recording(copy)
    (copy / INDEX).write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="not an index of recorded episodes"):
        Recording(copy)


def test_a_damaged_checkpoint_is_named(folder, tmp_path, capsys):
    run = make_run(folder / "hurt", EnvConfig(id="CartPole-v1"))
    file = run / "checkpoints" / "update-00000001" / "params.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said = refusal(capsys, run, "--out", tmp_path / "out", "--episodes", 1)
    assert "update-00000001 cannot be played" in said
    assert "--checkpoint" in said

"""Environments written in JAX: exact rows, keys, resets, checkpoints, topologies, libraries."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.envs import jax_libraries, make_env
from spmdrl.envs.base import EnvBatch
from spmdrl.envs.ids import check_id
from spmdrl.envs.jax_backend import JaxStepper, env_keys
from spmdrl.envs.jax_protocol import Simulator
from spmdrl.parallel.world import World
from tests.children import CARTPOLE, python, succeed
from tests.jax_envs import CartPole, Drawing, Ending
from tests.spmd.runs import rows, run, updates

OWN = "tests.jax_envs"


def config_of(env_id: str, num_envs: int = 8, **options: Any) -> Config:
    env = EnvConfig(id=env_id, backend="jax", num_envs=num_envs, options=options)
    return Config(env=env, algo=Ppo(num_steps=8, minibatches=2, epochs=1))


def batch_of(name: str, ids: range = range(3), generation: int = 0, **options: Any) -> Any:
    return make_env(config_of(f"{OWN}:{name}", **options), ids, generation=generation)


def played(env: EnvBatch, steps: int) -> Any:
    """Rows `[T, B, ...]` of obs, reward, terminated, truncated; action 1 throughout."""
    action, found = np.ones(env.num_envs, np.int32), []
    for _ in range(steps):
        env.send(action)
        found.append(env.recv())
    return jax.tree.map(lambda *x: np.stack(x), *found)


# -- semantics


@pytest.mark.parametrize("name", ["Ending", "Limit"])
def test_rows_follow_the_next_step_reset(name):
    env = batch_of(name)
    first = env.reset()
    assert isinstance(env, EnvBatch)
    assert first[:, 0].tolist() == [0, 0, 0]
    found = played(env, 8)
    assert found.obs[:, 0, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0]
    assert found.reward[:, 1].tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    ends = [False, False, True, False, False, False, True, False]
    never = [False] * 8
    assert found.terminated[:, 2].tolist() == (ends if name == "Ending" else never)
    assert found.truncated[:, 2].tolist() == (ends if name == "Limit" else never)
    assert found.episode_over[:, 0].tolist() == ends
    assert found.reward.dtype == np.float32


def test_a_reset_goes_back_to_the_first_episodes():
    env = batch_of("Drawing")
    first, before = env.reset(), played(env, 5)
    again, after = env.reset(), played(env, 5)
    assert np.array_equal(first, again)
    assert np.array_equal(before.obs, after.obs)


def test_a_real_end_at_the_time_limit_is_no_truncation():
    env = batch_of("Both")
    env.reset()
    found = played(env, 3)
    assert found.terminated[:, 0].tolist() == [False, False, True]
    assert not found.truncated.any()


def test_cached_resets_repeat_the_first_state():
    new, cached = batch_of("Ending"), batch_of("Ending", reset="cached")
    first = cached.reset()
    assert np.array_equal(first, new.reset())
    assert np.array_equal(played(cached, 8).obs[[3, 7]], np.stack([first, first]))
    drawn = played(new, 8).obs[[3, 7], :, 1]
    assert len(np.unique(np.concatenate([drawn.ravel(), first[:, 1]]))) == 9


def test_masks_come_as_a_leaf_of_that_name():
    assert "action_mask" in Simulator(jax_libraries.make(f"{OWN}:Masked", {}), "x").form[0]


def test_cartpole_moves_as_gymnasium_does():
    env: Any = gym.make("CartPole-v1").unwrapped
    env.reset(seed=3)
    step = jax.jit(CartPole().step)
    rng = np.random.default_rng(0)
    for _ in range(200):
        state, action = rng.uniform(-0.2, 0.2, 4).astype(np.float32), int(rng.integers(2))
        env.state = tuple(state.astype(np.float64))
        theirs, _, fallen, _, _ = env.step(action)
        env.steps_beyond_terminated = None
        ours, _, _, over, _ = step(None, state, action)
        assert np.allclose(ours, theirs, rtol=0, atol=2e-6)
        assert bool(over) == fallen


# -- resets and keys


def stepper(env: Any) -> JaxStepper:
    return JaxStepper(Simulator(env, "test"), "test")


@pytest.mark.parametrize("num_envs", [1, 7, 8, 40])
@pytest.mark.parametrize("cls", [Drawing, Ending, CartPole])
def test_the_reset_loop_gives_the_bits_of_the_plain_form(cls, num_envs):
    made, rng = stepper(cls()), np.random.default_rng(num_envs)
    key, count = env_keys(1, 0, range(num_envs)), jnp.arange(num_envs)
    _, handle = made.start(key)
    old = jax.vmap(made.simulator.reset)(env_keys(2, 0, range(num_envs)))

    @jax.jit
    def plain(due, tree):
        new = jax.vmap(made.simulator.reset)(jax.vmap(jax.random.fold_in)(key, count))
        pick = lambda x, y: jnp.where(due.reshape(-1, *[1] * (x.ndim - 1)), x, y)  # noqa: E731
        return jax.tree.map(pick, new, tree)

    loop = jax.jit(lambda due, tree: made.reset_rows(key, count, due, tree))
    for share in (0.0, 0.2, 0.6, 1.0):
        due = rng.random(num_envs) < share
        assert bits(loop(due, old)) == bits(plain(due, old))
    assert [x.shape for x in jax.tree.leaves(handle["state"])] == [
        x.shape for x in jax.tree.leaves(old[1])
    ]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_an_environment_is_the_same_whoever_its_neighbours_are():
    """Also in number: 40 rows, 8 of them, one of them."""
    whole, part, alone = (batch_of("CartPole", ids) for ids in (range(40), range(8), range(5, 6)))
    first = [env.reset() for env in (whole, part, alone)]
    assert first[0][:8].tobytes() == first[1].tobytes()
    assert first[0][5].tobytes() == first[2][0].tobytes()
    found = [played(env, 60).obs for env in (whole, part, alone)]
    assert found[0][:, :8].tobytes() == found[1].tobytes()
    assert np.allclose(found[0][:, 5], found[2][:, 0], atol=1e-5)


def test_no_two_steps_ids_generations_or_seeds_share_a_key():
    batches = [batch_of("Drawing", range(6)), batch_of("Drawing", range(6), generation=1)]
    batches.append(batch_of("Drawing", range(6), generation=-5))
    other = dataclasses.replace(config_of(f"{OWN}:Drawing"), seed=2)
    batches.append(make_env(other, range(6)))
    numbers = np.concatenate([(np.r_[env.reset()[None], played(env, 30).obs]) for env in batches])
    numbers = numbers % 1.0  # the observation of a reset is shifted by 1
    # A float in [0, 1) has 2**23 values: of a thousand draws hardly two are equal by chance.
    assert len(np.unique(numbers)) >= numbers.size - 1


def test_the_steps_of_a_rollout_are_those_of_single_calls():
    env = batch_of("Drawing", range(5))
    env.reset()
    xla = env.xla()
    assert xla.pure

    @jax.jit
    def scan(handle):
        return jax.lax.scan(lambda h, _: xla.step(h, np.ones(5, np.int32)), handle, length=20)

    _, inside = scan(xla.handle)
    assert bits(inside) == bits(played(env, 20))


def test_a_handle_is_arrays_with_the_environments_first():
    handle = batch_of("Drawing", range(5)).xla().handle
    assert {x.shape[0] for x in jax.tree.leaves(handle)} == {5}
    assert {str(x.dtype) for x in jax.tree.leaves(handle)} == {"float32", "uint32", "int32", "bool"}


# -- training


@pytest.mark.slow
def test_resume_is_exact_without_a_replay(tmp_path):
    config = steady(updates(config_of(f"{OWN}:CartPole"), 4))
    whole = run(config, 1, World(), tmp_path / "whole")
    short = dataclasses.replace(config, total_steps=2 * config.batch_size)
    run(short, 1, World(), tmp_path / "cut")
    resumed = run(config, 1, World(), tmp_path / "cut")
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert not (tmp_path / "cut" / "replay").exists()


@pytest.mark.slow
def test_environments_that_are_saved_are_never_made_anew(tmp_path):
    config = steady(updates(config_of(f"{OWN}:CartPole"), 3))
    often = dataclasses.replace(config.checkpoint, renew_every=1)
    seldom = run(config, 1, World(), tmp_path / "seldom")
    renewed = run(dataclasses.replace(config, checkpoint=often), 1, World(), tmp_path / "often")
    assert renewed["params_sha256"] == seldom["params_sha256"]


def steady(config: Config) -> Config:
    """Its learning rate does not depend on the length of the run."""
    fixed = dataclasses.replace(config.optim, lr_schedule="constant")
    return dataclasses.replace(config, optim=fixed)


@pytest.mark.slow
def test_fresh_environments_begin_new_episodes(tmp_path):
    config = updates(config_of(f"{OWN}:CartPole"), 2)
    fresh = dataclasses.replace(config.checkpoint, envs="fresh")
    config = dataclasses.replace(config, checkpoint=fresh)
    run(config, 1, World(), tmp_path / "run")
    more = dataclasses.replace(config, total_steps=3 * config.batch_size)
    run(more, 1, World(), tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 3


SIZES = [
    "--env.backend", "jax", "--env.id", f"{OWN}:CartPole", "--env.num-envs", "32",
    "--algo.num-steps", "32", "--log.panel", "off",
]  # fmt: skip


def train(run_dir: Path, *flags: object, updates: int = 4) -> dict[str, Any]:
    length = ["--total-steps", 32 * 32 * updates, "--checkpoint.every", 2]
    succeed("-m", "spmdrl.train", CARTPOLE, *SIZES, *length, *flags, "--run-dir", run_dir)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_topology_gives_the_same_bits_in_deterministic_mode(tmp_path):
    found = {
        name: train(tmp_path / name, "--sync.deterministic", *flags)
        for name, flags in {
            "alone": (), "devices": ("--devices", 2), "ranks": ("--nprocs", 2),
        }.items()
    }  # fmt: skip
    assert len({summary["params_sha256"] for summary in found.values()}) == 1
    assert found["alone"]["episode_count"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_resumes_on_another_topology(tmp_path):
    flags = ("--sync.deterministic", "--optim.lr-schedule", "constant")
    whole = train(tmp_path / "whole", *flags)
    train(tmp_path / "run", *flags, "--nprocs", 2, updates=2)
    resumed = train(tmp_path / "run", *flags, "--devices", 2)
    assert "resumed at update 2 of 4" in (tmp_path / "run" / "log.txt").read_text()
    assert resumed["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_the_rollout_is_compiled_once_and_kept_for_later_runs(tmp_path):
    for steps in (4, 8):
        words = [*SIZES, "--total-steps", 32 * 32 * steps, "--run-dir", tmp_path / "run"]
        done = python("-m", "spmdrl.train", CARTPOLE, *words, JAX_LOG_COMPILES="1")
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout + done.stderr
        assert len(re.findall(r"Finished XLA compilation of jit\(collect\)", said)) == 1


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_trained_run_is_evaluated_recorded_and_drawn(tmp_path):
    drawing = ["--env.id", f"{OWN}:Drawing"]
    train(tmp_path / "run", *drawing, updates=1)
    said = succeed("-m", "spmdrl.evaluate", tmp_path / "run", "--episodes", 4, "--video",
                   tmp_path / "seen.gif", "--trust")  # fmt: skip
    assert "over 4 episodes" in said
    assert (tmp_path / "seen.gif").stat().st_size > 0
    said = succeed("-m", "spmdrl.record", tmp_path / "run", "--out", tmp_path / "recorded",
                   "--episodes", 4, "--trust")  # fmt: skip
    assert "4 episodes" in said


# -- bad input


@pytest.mark.parametrize(
    ("env_id", "answer"),
    [
        ("CartPole-v1", "LIBRARY:NAME or MODULE:CLASS"),
        ("gymnx:CartPole-v1", "did you mean gymnax?"),
        ("no_such_module:MyEnv", "neither a library nor a module no_such_module"),
    ],
)
def test_a_wrong_id_gets_an_answer_before_jax_is_loaded(env_id, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        check_id(config_of(env_id).env)


def test_a_library_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setattr(jax_libraries, "_installed", lambda module: False)
    with pytest.raises(ConfigError, match="uv sync --extra brax"):
        check_id(config_of("brax:ant").env)


def test_a_name_that_the_library_does_not_have_is_corrected(monkeypatch):
    monkeypatch.setattr(jax_libraries, "_installed", lambda module: True)
    monkeypatch.setattr(jax_libraries, "known_names", lambda prefix: ["CartPole-v1"])
    with pytest.raises(ConfigError, match="did you mean CartPole-v1"):
        check_id(config_of("gymnax:CartPol-v1").env)


def test_checking_an_id_does_not_load_jax():
    """Else it would be loaded before the settings of this process are in place."""
    program = (
        "import sys; from spmdrl.config import EnvConfig; from spmdrl.envs.ids import check_id; "
        f"check_id(EnvConfig(id='{OWN}:CartPole', backend='jax')); print('jax' in sys.modules)"
    )
    assert succeed("-c", program).strip() == "False"


@pytest.mark.parametrize(
    ("env_id", "options", "answer"),
    [
        (f"{OWN}:CartPol", {}, "has no CartPol; did you mean CartPole?"),
        (f"{OWN}:CartPole", {"limit": 3}, "env.options do not fit"),
        (f"{OWN}:CartPole", {"reset": "old"}, "must be new or cached"),
        (f"{OWN}:CartPole", {"render_mode": "rgb_array"}, "cannot be drawn"),
        (f"{OWN}:np", {}, "not callable"),
        (f"{OWN}:Broken", {"how": "space"}, r"has shape (3,), but reset shows (2,)"),
        (f"{OWN}:Broken", {"how": "reset"}, "reset must return (obs, state)"),
        ("builtins:list", {}, "is no JAX environment: it has no observation_space"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(env_id, options, answer):
    with pytest.raises(ConfigError, match=re.escape(answer)):
        make_env(config_of(env_id, **options), range(2))


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        ("four results", "step must return (obs, state, reward, terminated, truncated)"),
        ("structure", "another structure than reset"),
        ("shape", "state['drawn'] is float32[2] after a step, but float32[] after a reset"),
        ("dtype", "state['time'] is float32[] after a step, but int32[] after a reset"),
        ("reward", "must be single numbers"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_compiled(how, answer):
    env = batch_of("Broken", how=how)
    with pytest.raises(ConfigError, match=re.escape(answer)):
        env.send(np.ones(3, np.int32))


# -- libraries, where they are installed


LIBRARIES = {
    "gymnax": ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"],
    "jumanji": ["Game2048-v1"],
    "navix": ["Navix-Empty-8x8-v0"],
    "xminigrid": ["MiniGrid-Empty-8x8"],
}
SLOW = {
    "craftax": ["Craftax-Classic-Symbolic-v1"],
    "brax": ["inverted_pendulum"],
    "playground": ["CartpoleBalance"],
}


def ids(libraries: dict[str, list[str]]) -> list[str]:
    return [f"{library}:{name}" for library, names in libraries.items() for name in names]


def need(library: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        try:
            importlib.import_module(f"spmdrl.envs.jax_libraries.{library}")
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", ids(LIBRARIES))
def test_two_updates_with_a_library(env_id, tmp_path):
    need(env_id.partition(":")[0])
    summary = run(updates(config_of(env_id), 2), 1, World(), tmp_path / "run")
    assert summary["updates"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", ids(SLOW))
def test_two_updates_with_a_library_that_compiles_for_minutes(env_id, tmp_path):
    need(env_id.partition(":")[0])
    summary = run(updates(config_of(env_id), 2), 1, World(), tmp_path / "run")
    assert summary["updates"] == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", jax_libraries.LIBRARIES)
def test_the_list_of_names_is_that_of_the_library(library):
    need(library)
    listed = jax_libraries.known_names(library)
    adapter = importlib.import_module(f"spmdrl.envs.jax_libraries.{library}")
    assert listed is None or listed == sorted(adapter.names())


@pytest.mark.filterwarnings("ignore")
def test_gymnax_moves_as_gymnasium_does_and_tells_its_limit_apart():
    need("gymnax")
    env = jax_libraries.make("gymnax:CartPole-v1", {"max_steps_in_episode": 5})
    theirs: Any = gym.make("CartPole-v1").unwrapped
    theirs.reset(seed=1)
    key = jax.random.PRNGKey(0)
    obs, state = env.reset(key)
    theirs.state = tuple(np.asarray(obs, np.float64))
    for t in range(5):
        obs, state, reward, terminated, truncated = env.step(key, state, t % 2)
        expected, *_ = theirs.step(t % 2)
        assert np.allclose(obs, expected, atol=1e-5)
        assert (float(reward), bool(terminated), bool(truncated)) == (1.0, False, t == 4)

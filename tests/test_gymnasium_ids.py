"""Gymnasium environments by every kind of id, wrappers, options, spaces, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from spmdrl.config import ConfigError, own_code
from spmdrl.envs.base import env_seeds
from spmdrl.envs.hosts import Task, make_host
from spmdrl.envs.leaves import leaf_spaces, leaf_values, nested
from spmdrl.envs.making import find_entry
from spmdrl.envs.origin import wrapper_names
from spmdrl.envs.shared_block import batch_layout, plain
from spmdrl.envs.space_json import space_from_json, space_to_json
from tests.children import CARTPOLE, ROOT, clean_environment, train_command
from tests.own_envs.batches import BAD, GOOD, SEED, batch, pids, step
from tests.own_envs.good import Plain

# ---------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("env_id", "fields", "said"),
    [
        (f"{BAD}:NoSpace", {}, "has observations Graph"),
        (f"{BAD}:Raises", {}, r"could not be made: RuntimeError: there is no simul.*bad.py, line"),
        (f"{BAD}:Broken", {"options": {"falt": 1}}, r"with env.options \{'falt': 1\}.*'falt'"),
        ("CartPole-v1", {"options": {"sutton_barto": 1}}, r"sutton_barto': 1\}: .*unexpected"),
        (f"{GOOD}:Wlak", {}, "neither registered nor in .*good; did you mean Walk"),
        (f"{GOOD}:SameStep", {}, "SameStep.*only AutoresetMode.NEXT_STEP"),
        (f"{GOOD}:Plain", {"wrap": f"{GOOD}:no_wrapper"}, "returned a NoneType, not an envir"),
        (f"{GOOD}:Plain", {"wrap": "tenfold"}, "'tenfold' must be module:function"),
        (f"{GOOD}:Plain", {"wrap": f"{GOOD}:Tenfolt"}, "no function Tenfolt; did you mean Tenfold"),
    ],
)
def test_refusals_are_one_line(env_id, fields, said):
    with pytest.raises(ConfigError, match=said) as caught:
        batch(env_id, **fields)
    assert "\n" not in str(caught.value)


def test_an_id_that_only_the_trainer_knows_is_explained():
    gym.register("OnlyHere-v0", entry_point=Plain)
    with pytest.raises(ConfigError, match=r"OnlyHere-v0.*name that module, or use --env"):
        batch("OnlyHere-v0")
    env = batch("OnlyHere-v0", workers="inline")
    assert env.reset().shape == (8, 2)


def test_a_refusal_is_one_line_and_exit_code_2_of_the_command(tmp_path):
    done = trained(tmp_path, f"{BAD}:Raises")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"spmdrl: env.id {BAD}:Raises could not be made: RuntimeError")


def test_a_fault_is_reported_once_with_rank_and_phase_by_the_command(tmp_path):
    options = f"--env.options fault=percent seed={env_seeds(1, [5])[0]} at=3".split()
    done = trained(tmp_path, f"{BAD}:Broken", *options)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("spmdrl: ") == 1
    assert "failed in update 0, phase collect:\nenvironment 5 (seed " in done.stderr


def trained(tmp_path: Path, env_id: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = train_command(
        "--env.backend", "gymnasium", "--env.id", env_id, "--env.num-envs", "8",
        "--total-steps", "2048", "--log.panel", "off", "--run-dir", tmp_path / "run", *flags,
        config=CARTPOLE,
    )  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False
    )


# ---------------------------------------------------------------------------------------------
# What an id can be


@pytest.mark.parametrize(
    ("name", "is_vector"),
    [
        ("OwnWalk-v0", False),
        ("Walk", False),
        ("made_by_function", False),
        ("Counters", True),
        ("vector_by_function", True),
        ("OwnCounters-v0", True),
    ],
)
def test_ids_of_every_kind(name, is_vector):
    assert find_entry(f"{GOOD}:{name}").is_vector == is_vector
    env = batch(f"{GOOD}:{name}", workers=2)
    env.reset()
    assert step(env).reward.shape == (8,)
    assert len(pids(env)) == (1 if is_vector else 2)
    env.close()


def test_a_vector_environment_steps_all_with_their_seeds():
    env = batch(f"{GOOD}:Counters")
    assert env.reset().tolist() == [[0.0]] * 8
    last = np.array([seed % 10 + 2 for seed in env_seeds(SEED, range(8))])
    for t in range(1, 15):
        answer = step(env, np.ones(8, np.int32))
        inside = t <= last
        assert answer.obs[inside, 0].tolist() == [t] * inside.sum()
        assert (answer.terminated == (t % (last + 1) == last)).all()
        assert (answer.reward == (t % (last + 1) != 0)).all()
    env.close()


def test_wrappers_are_applied_in_order():
    assert wrapper_names("a:b, c:d") == wrapper_names(("a:b", "c:d")) == ("a:b", "c:d")
    for wrap, reward in [
        (f"{GOOD}:Tenfold", 10.0),
        (f"{GOOD}:Tenfold,{GOOD}:plus_one", 11.0),
        ((f"{GOOD}:plus_one", f"{GOOD}:Tenfold"), 20.0),
    ]:
        env = batch(f"{GOOD}:Plain", num_envs=2, wrap=wrap)
        env.reset()
        assert step(env).reward.tolist() == [reward] * 2
        env.close()


def test_options_of_every_json_kind_reach_the_environment():
    options = {"a": [1, [2.5]], "b": {"c": None}, "d": True, "e": "text", "f": -3}
    env = batch(f"{GOOD}:Plain", num_envs=2, options=options)
    assert env.reset()[0, 1] == len(repr(sorted(options.items())))
    env.close()


@pytest.mark.parametrize("workers", ["inline", 2])
def test_the_first_environment_is_drawn(workers):
    env = batch(f"{GOOD}:Walk", workers=workers, options={"render_mode": "rgb_array"})
    env.reset()
    step(env)
    step(env)
    frame = env.render()
    assert (frame.shape, frame.dtype) == ((2, 3, 3), np.dtype(np.uint8))
    assert frame.max() == 2
    env.close()


def test_one_that_draws_nothing_is_refused():
    env = batch(f"{GOOD}:Plain", num_envs=2)
    env.reset()
    with pytest.raises(ConfigError, match=r"Plain draws no picture"):
        env.render()


def test_a_mask_in_info_is_a_part_of_the_observation():
    env = batch(f"{GOOD}:Masked", num_envs=4, workers=2)
    steps: Any = env._steps
    assert steps.obs_space["action_mask"] == gym.spaces.Box(0, 1, (2,), np.int8)
    env.reset()
    seen = [env._arrays["obs:action_mask"].tolist()]
    for _ in range(6):
        step(env)
        seen.append(env._arrays["obs:action_mask"].tolist())
    # reset, four steps, the end of the episode without a mask, the next reset
    assert seen == [[row] * 4 for row in [[1, 0], *[[0, 1]] * 4, [1, 1], [1, 0]]]
    env.close()


def test_what_the_config_file_registers_is_known_in_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "_executed", {})
    file = tmp_path / "my_config.py"
    file.write_text(
        "import gymnasium as gym\nfrom tests.own_envs.good import Plain\n"
        "if 'InConfig-v0' not in gym.registry:\n"
        "    gym.register('InConfig-v0', entry_point=Plain)\n"
    )
    own_code.execute(file)
    env = batch("InConfig-v0", workers=2)
    assert env.reset().shape == (8, 2)
    env.close()


def test_modules_are_found_where_the_trainer_finds_them(tmp_path, monkeypatch):
    (tmp_path / "module_of_mine.py").write_text("from tests.own_envs.good import Plain\n")
    monkeypatch.syspath_prepend(tmp_path)
    env = batch("module_of_mine:Plain", workers=2)
    assert env.reset().shape == (8, 2)
    env.close()


# ---------------------------------------------------------------------------------------------
# Parts

SPACES = [
    gym.spaces.Box(-1, 1, (3,), np.float32),
    gym.spaces.Box(np.array([0.1, -np.inf]), np.array([np.inf, 2 / 3]), dtype=np.float64),
    gym.spaces.Box(0, 255, (84, 84, 3), np.uint8),
    gym.spaces.Box(-5, 5, (), np.int16),
    gym.spaces.Discrete(4, start=-2),
    gym.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[1, 0], [0, 7]])),
    gym.spaces.MultiBinary(3),
    gym.spaces.MultiBinary([2, 2]),
    gym.spaces.Text(7, min_length=2, charset="abc"),
    gym.spaces.Dict(b=gym.spaces.Discrete(2), a=gym.spaces.Tuple([gym.spaces.Discrete(3)])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_survive_json(space):
    said = json.loads(json.dumps(space_to_json(space)))
    assert space_from_json(said) == space


def test_a_space_of_another_kind_keeps_its_name():
    space = gym.spaces.Sequence(gym.spaces.Discrete(2))
    assert str(space_from_json(space_to_json(space))) == str(space)


def test_nested_observations_come_together_again():
    space = gym.spaces.Dict(
        a=gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Dict(x=gym.spaces.Discrete(5))]),
        b=gym.spaces.Discrete(3),
    )
    value = {"a": (1, {"x": 4}), "b": 2}
    assert nested(space, leaf_values(space, value)) == value
    assert nested(gym.spaces.Discrete(2), {"": 1}) == 1


def test_leaves_of_nested_observations_are_in_the_block():
    seeds = env_seeds(SEED, range(2))
    host = make_host(Task(f"{GOOD}:Nested", {}, [], [0, 1], seeds, 0, None))
    arrays = plain(batch_layout(host.obs_space, np.zeros((2, 2), np.int32), 1))
    host.attach(arrays)
    host.step()
    assert set(leaf_spaces(host.obs_space)) == {"all/0/eye", "all/0/gear", "all/0/place", "all/1"}
    assert arrays["obs:all/0/gear"].tolist() == [2, 2]
    assert bytes(arrays["obs:all/1"][0]) == b"t1\0\0\0\0\0\0"
    host.close()

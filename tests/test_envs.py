"""Real environments of every family: shapes, automatic resets, time limits, scores, seeds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.envs import actions, make_env
from spmdrl.envs.base import EnvBatch
from spmdrl.envs.envpool_backend import declared, has_64_bit_arrays, pool_reader
from spmdrl.envs.envpool_loading import load_envpool
from spmdrl.types import MASK, ObsPart
from tests import compiled_step

FAMILIES = {
    "CartPole-v1": ((4,), np.float32, "discrete"),
    "Pendulum-v1": ((3,), np.float32, "box"),
    "LunarLander-v3": ((8,), np.float32, "discrete"),
    "BipedalWalker-v3": ((24,), np.float32, "box"),
    "Pong-v5": ((4, 84, 84), np.uint8, "discrete"),
    "HalfCheetah-v4": ((17,), np.float32, "box"),
    "highway-fast-v0": ((5, 5), np.float32, "discrete"),
    "MetaWorld/Reach-v3": ((39,), np.float32, "box"),
    "WalkerWalk-v1": ((24,), np.float32, "box"),  # a flat dict, end to end
    "FrozenLake-v1": ((16,), np.float32, "discrete"),  # a number, one-hot
}


def make(env_id: str, num_envs: int = 2, seed: int = 1, **options: Any) -> EnvBatch:
    config = Config(seed=seed, env=EnvConfig(id=env_id, num_envs=num_envs, options=options))
    return make_env(config, range(num_envs), threads=1)


def idle(env: EnvBatch) -> np.ndarray:
    """The middle of the action space, for every environment."""
    space = env.spec.action
    if space.kind == "box":
        return np.zeros((env.num_envs, int(np.prod(space.shape))), np.float32)
    return np.zeros((env.num_envs, *space.shape), np.int32)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_every_family_steps(env_id):
    shape, dtype, kind = FAMILIES[env_id]
    env = make(env_id)
    obs = env.reset()
    assert env.spec.obs == ObsPart(shape, np.dtype(dtype))
    assert env.spec.action.kind == kind
    assert obs.shape == (2, *shape)
    env.send(idle(env))
    answer = env.recv()
    assert answer.obs.shape == (2, *shape)
    assert answer.obs.dtype == dtype
    assert answer.reward.dtype == np.float32
    env.close()


def test_the_step_after_an_end_is_a_reset():
    env = make("CartPole-v1", num_envs=1)
    env.reset()
    while True:
        env.send(idle(env))
        answer = env.recv()
        if answer.terminated[0]:
            break
    last = answer.obs
    assert abs(last[0, 2]) > 0.2 or abs(last[0, 0]) > 2.4  # the true final observation
    env.send(idle(env))
    answer = env.recv()
    assert answer.reward[0] == 0.0
    assert not answer.terminated[0]
    assert np.abs(answer.obs).max() < 0.05  # CartPole starts within that
    env.close()


def test_a_time_limit_is_not_a_termination():
    env = make("Pendulum-v1", num_envs=1, max_episode_steps=5)
    env.reset()
    for _ in range(5):
        env.send(idle(env))
        answer = env.recv()
    assert answer.truncated[0]
    assert not answer.terminated[0]
    assert answer.episode_over[0]
    env.close()


def test_a_lost_life_does_not_end_the_game_and_the_score_is_raw():
    env = make("Breakout-v5", num_envs=8, episodic_life=True, reward_clip=True)
    env.reset()
    rng = np.random.default_rng(0)
    lives_lost = games_over = 0
    for _ in range(400):
        env.send(rng.integers(0, 4, 8).astype(np.int32))
        answer = env.recv()
        lives_lost += int((answer.terminated & ~answer.episode_over).sum())
        games_over += int(answer.episode_over.sum())
        assert not (answer.episode_over & ~answer.terminated & ~answer.truncated).any()
    assert lives_lost > 4 * games_over / 2
    assert games_over > 0
    env.close()


def test_the_same_global_ids_give_the_same_environments():
    config = Config(env=EnvConfig(id="CartPole-v1", num_envs=6))
    together = make_env(config, range(6)).reset()
    apart = [make_env(config, ids).reset() for ids in (range(2), range(2, 6))]
    assert np.array_equal(together, np.concatenate(apart))
    assert len(np.unique(together, axis=0)) == 6
    other = make_env(dataclasses.replace(config, seed=2), range(6)).reset()
    assert not np.array_equal(together, other)


# One id of each family whose buffers are 32-bit, or whose actions are float64.
COMPILED = {
    "CartPole-v1": False,
    "Pong-v5": False,
    "LunarLander-v3": False,
    "FrozenLake-v1": False,
    "highway-fast-v0": False,
    "MiniGrid-Empty-5x5-v0": False,
    "Sokoban-v0": False,
    "Play2048-v1": False,
    "BinPack-v2": False,
    "MultiCVRP-v0": False,
    "Blackjack-v1": False,
    "Ant-v4": True,
    "WalkerWalk-v1": True,
    "Go1JoystickFlatTerrain-v1": True,
    "FrankaKitchen-v1": True,
}
# Families with float32 actions and float64 observations or info: with 32-bit buffers envpool
# writes over malloc's own records.
WIDE_ANSWERS = ["FetchReach-v4", "MetaWorld/Reach-v3", "myoElbowPose1D6MRandom-v0", "parking-v0"]


LONG = {"Go1JoystickFlatTerrain-v1", "FrankaKitchen-v1", "myoElbowPose1D6MRandom-v0"}


def slow_if_long(ids):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in ids]


@pytest.mark.parametrize("env_id", slow_if_long(COMPILED))
def test_a_compiled_step_has_the_bits_of_a_python_step(env_id):
    assert make(env_id).needs_x64 == COMPILED[env_id]  # x64 would change what is compiled around
    compiled_step.check(env_id)


@pytest.mark.parametrize("env_id", slow_if_long(WIDE_ANSWERS))
def test_doubles_are_not_written_into_buffers_for_floats(env_id):
    """In a child process: what it guards against is a crash."""
    command = [sys.executable, str(Path(compiled_step.__file__)), env_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"equal {env_id}\n"), done.stderr[-2000:]


class Declared:
    """A pool's specification, as far as `has_64_bit_arrays` reads it."""

    def __init__(self, state: type, action: type):
        array = lambda dtype: dataclasses.make_dataclass("Array", ["dtype"])(dtype)  # noqa: E731
        self.state_array_spec = {"obs": array(np.float32), "info:x": array(state)}
        self.action_array_spec = {"action": array(action)}


@pytest.mark.parametrize(
    ("state", "action", "wide"),
    [
        (np.float32, np.int32, False),
        (np.bool_, np.uint8, False),
        (np.float64, np.float32, True),
        (np.int64, np.float32, True),
        (np.uint64, np.float32, True),
        (np.int32, np.float64, True),
        (np.int32, np.int64, True),
    ],
)
def test_any_64_bit_array_asks_for_x64(state, action, wide):
    assert has_64_bit_arrays(Declared(state, action)) == wide


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v4"])
def test_jax_sees_no_effect_in_a_compiled_step(env_id):
    """Programs with effects are started through Python, every one of them half a millisecond."""
    env = make(env_id)
    xla = env.xla()
    assert xla is not None
    with jax.enable_x64(env.needs_x64):
        assert not jax.make_jaxpr(xla.step)(xla.handle, idle(env)).effects


def test_a_wrong_batch_is_refused_in_python():
    env = make("CartPole-v1", num_envs=2)
    env.reset()
    with pytest.raises(ValueError, match="shape"):
        env.send(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="outside"):
        env.send(np.full(2, 7, np.int32))
    env.close()


def test_an_unknown_option_is_named():
    with pytest.raises(ConfigError, match=r"max_episode_step.*max_episode_steps"):
        make("CartPole-v1", max_episode_step=5)


def test_gymnasium_environments_follow_the_same_rules():
    config = Config(env=EnvConfig(id="CartPole-v1", num_envs=3, backend="gymnasium"))
    env = make_env(config, range(3), threads=1)
    obs = env.reset()
    assert obs.shape == (3, 4)
    over = np.zeros(3, bool)
    for _ in range(60):
        env.send(np.zeros(3, np.int32))
        answer = env.recv()
        assert (answer.reward[over] == 0.0).all()  # the reset row
        over = answer.terminated | answer.truncated
        if over.any():
            seen = True
    assert seen
    env.close()


# ---------------------------------------------------------------------------------------------
# Families of other forms: what is seen and chosen, and what is refused

FORMS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], str, tuple[int, ...]]] = {
    "MiniGrid-DoorKey-5x5-v0": (
        {"image": ("ids", (7, 7, 3)), "vector": ("vector", (4,))}, "discrete", (7,),
    ),
    "Play2048-v1": (
        {"obs": ("ids", (4, 4, 31)), MASK: ("mask", (4,))}, "discrete", (4,),
    ),
    "Game2048-v1": (
        {"vector": ("vector", (16,)), MASK: ("mask", (4,))}, "discrete", (4,),
    ),
    "Snake-v1": (
        {"grid": ("image", (12, 12, 5)), "vector": ("vector", (1,)), MASK: ("mask", (4,))},
        "discrete", (4,),
    ),
    "BinPack-v2": (
        {"vector": ("vector", (380,)), MASK: ("mask", (800,))}, "discrete", (800,),
    ),
    "Cleaner-v0": (
        {
            "agents_locations": ("ids", (3, 2)), "grid": ("ids", (10, 10)),
            "vector": ("vector", (1,)), MASK: ("mask", (12,)),
        },
        "multi_discrete", (4, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("env_id", FORMS)
def test_other_forms_are_read_as_what_they_are(env_id):
    parts, kind, nvec = FORMS[env_id]
    env = make(env_id)
    assert {k: (part.kind, part.shape) for k, part in env.spec.parts.items()} == parts
    assert (env.spec.action.kind, env.spec.action.nvec) == (kind, nvec)
    obs = env.reset()
    for _ in range(3):
        assert {k: (x.shape, x.dtype) for k, x in obs.items()} == {
            k: ((2, *part.shape), part.dtype) for k, part in env.spec.parts.items()
        }
        env.send(allowed_action(env, obs))
        obs = env.recv().obs
    env.close()


def allowed_action(env: EnvBatch, obs: dict[str, np.ndarray]) -> np.ndarray:
    """The first one that no mask forbids, in every component."""
    nvec = env.spec.action.nvec
    mask = obs.get(MASK, np.ones((env.num_envs, sum(nvec)), bool))
    parts = np.split(mask, np.cumsum(nvec)[:-1], axis=-1)
    choices = np.stack([part.argmax(-1) for part in parts], -1).astype(np.int32)
    return choices[:, 0] if env.spec.action.kind == "discrete" else choices


def test_buttons_of_doom_are_pressed_or_not():
    """By its declaration alone: the game itself crashes in some of its starts."""
    space = pool_reader(declared("Basic-v1", {}), "Basic-v1").spec.action
    found = (space.kind, space.nvec, str(space.dtype))
    assert found == ("multi_discrete", (2, 2, 2), "float64")
    pressed = actions.to_env_action(space, np.array([[0, 1, 1], [1, 0, 0]], np.int32), np)
    assert pressed.dtype == np.float64
    assert pressed.tolist() == [[0, 1, 1], [1, 0, 0]]
    combined = declared("Basic-v1", {"use_combined_action": True})
    space = pool_reader(combined, "Basic-v1").spec.action
    assert space.kind == "discrete"
    assert space.nvec[0] >= 4


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("TicTacToe-v1", "is for 2 players; spmdrl trains one agent"),
        ("intersection-multi-agent-v0", "is for .* players; spmdrl trains one agent"),
        ("VizdoomCustom-v1", "cannot be made here"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(env_id, says):
    with pytest.raises(ConfigError, match=says):
        make(env_id)


def test_a_missing_library_is_named(monkeypatch):
    envpool = load_envpool("CoinrunEasy-v0")

    def fails(*_: Any, **__: Any) -> None:
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime\nand more")

    monkeypatch.setattr(envpool, "make_spec", fails)
    with pytest.raises(ConfigError, match=r"CoinrunEasy-v0 cannot be made here: .* Qt 5 runtime$"):
        make("CoinrunEasy-v0")

"""The small functions between simulator and loss: rewards, returns, order, sums, seeds, actions."""

import math
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.acting.steps import (
    ActorState,
    Scores,
    Steps,
    accumulate,
    finish_rollout,
    transform_reward,
)
from spmdrl.algos import Ppo
from spmdrl.algos.base import scheduled
from spmdrl.algos.ppo import Targets, center_and_scale, explained_variance, fit_sums
from spmdrl.config import Config, EnvConfig, OptimConfig, SyncConfig
from spmdrl.envs.actions import action_space, check_actions, to_env_action
from spmdrl.envs.base import env_seeds
from spmdrl.learning.gradients import chunk_rows, sum_over_chunks
from spmdrl.learning.optimizer import learning_rate
from spmdrl.parallel.ids import ids_of_ranks, shards_in, split_ids
from spmdrl.parallel.placement import in_shards
from spmdrl.types import ActionSpace

steady = settings(max_examples=100, deadline=None, derandomize=True)


# ---------------------------------------------------------------------------------------------
# Rewards and returns


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [-7.0, -0.5, 0.0, 0.25, 30.0]),
        ("sign", [-1.0, -1.0, 0.0, 1.0, 1.0]),
        ("abs_one", [-1.0, -0.5, 0.0, 0.25, 1.0]),
        # 5 tanh(r / 5), its negative part times 0.3: tanh(1.4) = 0.885352, tanh(0.1) = 0.099668,
        # tanh(0.05) = 0.0499584, tanh(6) = 0.9999877
        ("soft_asymmetric", [-1.328028, -0.149502, 0.0, 0.249792, 4.999939]),
    ],
)
def test_transform_reward_by_hand(kind, expected):
    reward = np.asarray([-7.0, -0.5, 0.0, 0.25, 30.0], np.float32)
    np.testing.assert_allclose(transform_reward(kind, reward), expected, rtol=1e-5)


def accumulate_by_loop(start, x, discount, ends):
    y, out = np.array(start, np.float64), []
    for row, end in zip(x, ends, strict=True):
        y = row + discount * y
        out.append(y)
        y = np.where(end, 0.0, y)
    return y, np.stack(out)


def test_accumulate_by_hand():
    # From 4 with discount 0.5: 1 + 2 = 3, 1 + 1.5 = 2.5 and the end, then 1, 1 + 0.5 = 1.5.
    ends = np.array([[False], [True], [False], [False]])
    last, every = accumulate(jnp.float32([4]), jnp.ones((4, 1)), 0.5, ends)
    np.testing.assert_array_equal(every[:, 0], [3.0, 2.5, 1.0, 1.5])
    np.testing.assert_array_equal(last, [1.5])


def test_accumulate_starts_at_zero_after_an_end_in_the_last_row():
    last, every = accumulate(jnp.float32([4]), jnp.ones((1, 1)), 0.5, np.array([[True]]))
    assert (float(every[0, 0]), float(last[0])) == (3.0, 0.0)


def test_accumulate_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    start, x = rng.standard_normal(5).astype(np.float32), rng.standard_normal((37, 5))
    ends = rng.random((37, 5)) < 0.2
    out = accumulate(jnp.asarray(start), x.astype(np.float32), 0.97, ends)
    for ours, reference in zip(out, accumulate_by_loop(start, x, 0.97, ends), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def steps_of(valid, reward, terminated, truncated, episode_over):
    column = lambda x, dtype=bool: np.asarray(x, dtype)[:, None]  # noqa: E731
    blank = np.zeros((len(valid), 1), np.float32)
    return Steps(
        obs=blank,
        first=column(np.zeros(len(valid))),
        valid=column(valid),
        action=blank,
        dist_params=blank,
        value=blank,
        reward=column(reward, np.float32),
        terminated=column(terminated),
        truncated=column(truncated),
        episode_over=column(episode_over),
    )


def fresh_actor(**fields):
    zero = np.zeros(1, np.float32)
    blank = {
        "obs": zero,
        "first": np.ones(1, bool),
        "resetting": np.zeros(1, bool),
        "carry": (),
        "discounted_return": zero,
        "episode_return": zero,
        "episode_length": np.zeros(1, np.int32),
    }
    return ActorState(**(blank | fields))


FINISH = Config(env=EnvConfig(reward="abs_one"), algo=Ppo(gamma=0.5))

# Two steps and a lost life, the reset row with a reward that must not count, two more steps and
# the end of the game by its time limit, another reset row, one step of the next game.
GAME = {
    "valid": [1, 1, 0, 1, 1, 0, 1],
    "reward": [3, 1, 99, 2, -5, 99, 1],
    "terminated": [0, 1, 0, 0, 0, 0, 0],
    "truncated": [0, 0, 0, 0, 1, 0, 0],
    "episode_over": [0, 0, 0, 0, 1, 0, 0],
}


def finish(steps, before):
    ids = np.arange(1, dtype=np.int32)
    return jax.jit(lambda b, s: finish_rollout(FINISH, ids, b, s, Scores(s.value, s.value), b))(
        before, steps
    )


def test_finish_rollout_by_hand():
    # Rewards in [-1, 1]: 1 1 - 1 -1 - 1. Discounted by 0.5 since the last end: 1, 1.5, 0, 1,
    # -0.5, 0, 1. Scores are raw and go on over the lost life: 3, 4, 4, 6, 1, then 0, 1.
    after, rollout, episodes = finish(steps_of(**GAME), fresh_actor())
    column = lambda x: np.asarray(x)[:, 0].tolist()  # noqa: E731
    assert column(rollout.reward) == [1, 1, 0, 1, -1, 0, 1]
    assert column(rollout.discounted_return) == [1, 1.5, 0, 1, -0.5, 0, 1]
    assert column(episodes["return"]) == [3, 4, 4, 6, 1, 0, 1]
    assert column(episodes["length"]) == [1, 2, 2, 3, 4, 0, 1]
    assert column(episodes["over"]) == [False, False, False, False, True, False, False]
    assert after.episode_return.tolist() == [1.0]
    assert after.episode_length.tolist() == [1]
    assert after.discounted_return.tolist() == [1.0]


@pytest.mark.parametrize("cut", [2, 5])
def test_two_rollouts_in_a_row_equal_one(cut):
    whole_after, whole, whole_episodes = finish(steps_of(**GAME), fresh_actor())
    halves = [{k: v[:cut] for k, v in GAME.items()}, {k: v[cut:] for k, v in GAME.items()}]
    between, head, head_episodes = finish(steps_of(**halves[0]), fresh_actor())
    after, tail, tail_episodes = finish(steps_of(**halves[1]), between)
    assert_joined = lambda a, b, c: np.testing.assert_array_equal(np.concatenate([a, b]), c)  # noqa: E731
    assert_joined(head.discounted_return, tail.discounted_return, whole.discounted_return)
    jax.tree.map(assert_joined, head_episodes, tail_episodes, whole_episodes)
    jax.tree.map(np.testing.assert_array_equal, after, whole_after)


# ---------------------------------------------------------------------------------------------
# Sums and what is made of them


def powers(x):
    return jnp.float32([len(x), x.sum(), (x**2).sum()])


def test_center_and_scale_equals_numpy():
    x = np.random.default_rng(0).normal(0.5, 2.0, 100)
    mean, scale = center_and_scale(powers(x))
    np.testing.assert_allclose(mean, x.mean(), rtol=1e-5)
    np.testing.assert_allclose(scale, 1 / (x.std(ddof=1) + 1e-8), rtol=1e-5)


@pytest.mark.parametrize("x", [[], [3.0], [2.0, 2.0]], ids=["none", "one", "equal"])
def test_center_and_scale_of_what_has_no_deviation(x):
    x = np.asarray(x, np.float32)
    mean, scale = center_and_scale(powers(x))
    np.testing.assert_allclose(scale, 1e8, rtol=1e-5)
    np.testing.assert_array_equal((x - mean) * scale, np.zeros_like(x))


def random_fit(seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    target = (offset + rng.normal(0, 2.0, (20, 5))).astype(np.float32)
    value = (target + rng.normal(0.3, 1.0, (20, 5))).astype(np.float32)
    return target, value, rng.random((20, 5)) < 0.8


def fit_of(target, value, valid):
    rollout: Any = SimpleNamespace(value=value, valid=valid)  # all that is looked at
    return fit_sums(rollout, Targets(target, target))


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_explained_variance_equals_numpy(offset):
    target, value, valid = random_fit(offset=offset)
    value[~valid] = np.nan
    y, error = target[valid].astype(np.float64), (target - value)[valid].astype(np.float64)
    fit = fit_of(target, value, valid)
    np.testing.assert_allclose(explained_variance(fit), 1 - error.var() / y.var(), rtol=1e-3)


def test_explained_variance_at_its_marks():
    target, _, valid = random_fit()
    mean = np.full_like(target, target[valid].mean())
    close = lambda value, mark: np.testing.assert_allclose(  # noqa: E731
        explained_variance(fit_of(target, value, valid)), mark, atol=1e-5
    )
    close(target, 1.0)
    close(target + 3.0, 1.0)  # a constant error is no lack of explanation
    close(mean, 0.0)
    assert explained_variance(jnp.zeros(5)) == 0.0


@pytest.mark.parametrize("size", [12, 6, 4, 1])
def test_sum_over_chunks_is_the_sum_over_all(size):
    table = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    t, b = (x.reshape(-1) for x in np.indices((3, 4)))
    seen = []

    def function(t, b):
        seen.append(t.shape[0])
        x = jnp.asarray(table)[t, b]
        sums = {"sum": x.sum(), "squares": [(x**2).sum(), jnp.float32(t.shape[0])]}
        return sums, {"rows": jnp.stack([x, -x], axis=1)}

    out, kept = sum_over_chunks(function, size, jnp.asarray(t), jnp.asarray(b))
    np.testing.assert_array_equal(kept["rows"], np.stack([table, -table], -1).reshape(12, 2))
    np.testing.assert_allclose(out["sum"], table.sum(), rtol=1e-5)
    np.testing.assert_allclose(out["squares"], [(table**2).sum(), 12], rtol=1e-5)
    assert set(seen) == {size}


@given(st.integers(1, 5000))
@steady
def test_chunks_of_images_divide_the_rows_and_fit(rows):
    size = chunk_rows(rows, 32, is_image=True)
    assert rows % size == 0
    assert 1 <= size <= 32
    assert not any(rows % n == 0 for n in range(size + 1, 33) if n <= rows)


@pytest.mark.parametrize(
    ("rows", "size"), [(256, 256), (1024, 1024), (16384, 1024), (5000, 1000), (4999, 4999)]
)
def test_chunks_of_vectors(rows, size):
    # 4999 is prime: one by one would be slower than all at once
    assert chunk_rows(rows, 1024, is_image=False) == size


def test_without_a_limit_all_rows_are_one_chunk():
    assert chunk_rows(4096, None, is_image=True) == 4096


@pytest.mark.parametrize(
    ("schedule", "left", "expected"),
    [
        ("constant", 1.0, 0.2),
        ("constant", 0.0, 0.2),
        ("linear", 1.0, 0.2),
        ("linear", 0.5, 0.1),
        ("linear", 0.0, 0.0),
        ("cosine", 1.0, 0.2),
        ("cosine", 0.5, 0.1),
        ("cosine", 0.25, 0.1 * (1 + math.cos(0.75 * math.pi))),
        ("cosine", 0.0, 0.0),
    ],
)
def test_schedules_by_hand(schedule, left, expected):
    np.testing.assert_allclose(scheduled(0.2, schedule, jnp.float32(left)), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("constant", 2, [0.5, 1.0, 1.0, 1.0, 1.0]),
        # rises over two updates, then falls over the other three
        ("linear", 2, [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
    ],
)
def test_learning_rates_of_a_run_by_hand(schedule, warmup, rates):
    config = Config(
        total_steps=500,
        env=EnvConfig(num_envs=10),
        algo=Ppo(num_steps=10),
        optim=OptimConfig(lr=1.0, lr_schedule=schedule, warmup=warmup),
    )
    found = [learning_rate(config, jnp.int32(step)) for step in range(5)]
    np.testing.assert_allclose(found, rates, rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 6])
def test_in_shards_keeps_the_order_of_the_rows(shards):
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    sizes = []

    def function(x, y):
        sizes.append(x.shape[0])
        return 2 * x, (x.sum(-1) + y,)

    doubled, (total,) = in_shards(function, shards, x, np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(total, x.sum(-1) + np.arange(6))
    assert set(sizes) == {6 // shards}


# ---------------------------------------------------------------------------------------------
# Ids and seeds


env_id_lists = st.lists(st.integers(0, 2**20), min_size=1, max_size=200, unique=True)
run_seeds = st.integers(0, 2**31 - 1)


@given(run_seeds, env_id_lists, st.integers(0, 100))
@steady
def test_env_seeds_are_distinct_and_in_range(seed, ids, generation):
    seeds = env_seeds(seed, ids, generation)
    assert len(set(seeds)) == len(ids)
    assert all(type(s) is int and 0 <= s < 2**31 for s in seeds)


@given(run_seeds, env_id_lists, st.data())
@steady
def test_env_seeds_do_not_depend_on_the_grouping(seed, ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    assert env_seeds(seed, ids) == env_seeds(seed, ids[:cut]) + env_seeds(seed, ids[cut:])
    assert env_seeds(seed, np.asarray(ids, np.int32)) == env_seeds(seed, ids)


def test_neighbouring_runs_and_generations_have_other_seeds():
    groups = [(seed, generation) for seed in range(5) for generation in range(3)]
    seeds = [s for seed, g in groups for s in env_seeds(seed, range(256), g)]
    assert len(set(seeds)) == len(seeds)


@given(st.integers(1, 300), st.data())
@steady
def test_split_ids_covers_all_ids_once_in_order(num_envs, data):
    places = data.draw(st.integers(1, num_envs))
    blocks = split_ids(num_envs, places)
    assert len(blocks) == places
    assert [g for block in blocks for g in block] == list(range(num_envs))
    lengths = [len(block) for block in blocks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("envs", "ranks", "sizes"),
    [
        (64, 2, [32, 32]),
        (24, 2, [12, 12]),
        (64, 3, [24, 24, 16]),  # rows of a network in whole vectors, for the same bits
        (10, 4, [3, 3, 2, 2]),
        (8, 3, [3, 3, 2]),
    ],
)
def test_uneven_ranks_take_whole_vectors_where_they_can(envs, ranks, sizes):
    config = Config(env=EnvConfig(id="CartPole-v1", num_envs=envs))
    assert [len(block) for block in ids_of_ranks(config, ranks)] == sizes


@given(st.integers(1, 8), st.integers(1, 16), st.data())
@steady
def test_deterministic_ranks_take_whole_shards(size, shards, data):
    ranks = data.draw(st.integers(1, shards))
    config = Config(
        env=EnvConfig(id="CartPole-v1", num_envs=size * shards),
        sync=SyncConfig(deterministic=True, shards=shards),
    )
    blocks = ids_of_ranks(config, ranks)
    assert [g for block in blocks for g in block] == list(range(size * shards))
    assert all(block.start % size == 0 and len(block) % size == 0 for block in blocks)
    assert sum(shards_in(config, len(block)) for block in blocks) == shards


# ---------------------------------------------------------------------------------------------
# Actions


DISCRETE = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(4,), start=2)  # 2 .. 5
MULTI = ActionSpace("multi_discrete", (2,), np.dtype(np.int32), nvec=(3, 2))
BOX = ActionSpace(
    "box", (2,), np.dtype(np.float64), low=np.array([-1.0, 0.0]), high=np.array([1.0, 5.0])
)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (DISCRETE, np.asarray([2, 5, 3], np.int32)),
        (MULTI, np.asarray([[0, 0], [2, 1], [1, 0]], np.int32)),
        (BOX, np.asarray([[-1, 0], [1, 5], [0, 2]], np.float64)),
    ],
    ids=["discrete", "multi_discrete", "box"],
)
def test_valid_actions_pass(space, action):
    check_actions(space, 3, action)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (DISCRETE, np.asarray([2, 3], np.int32), r"shape \(2,\), the environments expect \(3,\)"),
        (DISCRETE, np.asarray([[2], [3], [4]], np.int32), r"shape \(3, 1\)"),
        (MULTI, np.asarray([0, 0, 0], np.int32), r"shape \(3,\), the environments expect \(3, 2\)"),
        (DISCRETE, np.asarray([2, 3, 4], np.int64), "int64, the environments expect int32"),
        (DISCRETE, np.asarray([2, 3, 4], np.float32), "float32, the environments expect int32"),
        (BOX, np.zeros((3, 2), np.float32), "float32, the environments expect float64"),
        (DISCRETE, np.asarray([2, 6, 3], np.int32), "outside of"),
        (DISCRETE, np.asarray([1, 2, 3], np.int32), "outside of"),
        (MULTI, np.asarray([[0, 0], [0, 2], [0, 0]], np.int32), "outside of"),
        (MULTI, np.asarray([[0, 0], [-1, 0], [0, 0]], np.int32), "outside of"),
        (BOX, np.asarray([[0, 0], [0, 5.1], [0, 0]], np.float64), "outside of"),
        (BOX, np.asarray([[0, 0], [0, -0.1], [0, 0]], np.float64), "outside of"),
        (BOX, np.asarray([[0, 0], [np.nan, 0], [0, 0]], np.float64), "not finite"),
        (BOX, np.asarray([[0, 0], [np.inf, 0], [0, 0]], np.float64), "not finite"),
    ],
)
def test_invalid_actions_are_refused(space, action, message):
    with pytest.raises(ValueError, match=message):
        check_actions(space, 3, action)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_to_env_action_clips_to_the_box(xp):
    space = ActionSpace(
        "box",
        (2,),
        np.dtype(np.float32),
        low=np.asarray([-1, 0], np.float32),
        high=np.asarray([1, 5], np.float32),
    )
    action = to_env_action(space, xp.asarray([[-9.0, -9.0], [9.0, 9.0], [0.5, 2.0]]), xp)
    np.testing.assert_array_equal(action, np.asarray([[-1, 0], [1, 5], [0.5, 2]], np.float32))
    check_actions(space, 3, np.asarray(action))


def test_to_env_action_takes_the_shape_and_dtype_of_the_space():
    space = ActionSpace(
        "box", (2, 2), np.dtype(np.float64), low=np.full((2, 2), -1.0), high=np.ones((2, 2))
    )
    flat = np.asarray([[0.0, 0.25, 0.5, 3.0]], np.float32)
    action = to_env_action(space, flat, np)
    np.testing.assert_array_equal(action, [[[0.0, 0.25], [0.5, 1.0]]])
    check_actions(space, 1, action)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_to_env_action_shifts_discrete_choices_to_their_start(xp):
    action = to_env_action(DISCRETE, xp.asarray([0, 3, 1]), xp)
    np.testing.assert_array_equal(action, [2, 5, 3])
    check_actions(DISCRETE, 3, np.asarray(action))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Discrete(3, start=5),
        gym.spaces.MultiDiscrete([3, 2]),
        gym.spaces.MultiDiscrete([3, 2], start=[1, 4]),
        gym.spaces.Box(-1.0, 2.0, (2,)),
        gym.spaces.Box(-math.inf, math.inf, (2, 3), np.float64),
        gym.spaces.Box(0.0, 1.0, ()),
    ],
    ids=str,
)
def test_a_policys_action_is_in_the_environments_space(space):
    ours = action_space(space, "Some-v0")
    rng = np.random.default_rng(0)
    if ours.kind == "box":
        choice = rng.normal(0, 3, (50, math.prod(ours.shape))).astype(np.float32)
    else:
        choice = np.stack([rng.integers(n, size=50) for n in ours.nvec], -1).astype(np.int32)
        choice = choice[:, 0] if ours.kind == "discrete" else choice
    action = to_env_action(ours, choice, np)
    check_actions(ours, 50, action)
    for row in action:
        assert space.contains(np.asarray(row).astype(space.dtype))

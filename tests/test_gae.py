"""Advantages against hand numbers, a plain loop, rlax and the next-step auto-reset layout."""

from functools import partial

import jax
import numpy as np
import pytest

from spmdrl.algos.returns import fold_discounts, gae

GAMMA, LAMBDA = 0.9, 0.8


@partial(jax.jit, static_argnames=["gamma", "lambda_"])
def advantages(reward, terminated, truncated, value, v_last, gamma=GAMMA, lambda_=LAMBDA):
    discount, trace = fold_discounts(terminated, truncated, gamma, lambda_)
    return gae(reward, discount, trace, value, v_last)


def of_one_env(reward, terminated, truncated, value, v_last, **options):
    column = lambda x, dtype: np.asarray(x, dtype)[:, None]  # noqa: E731
    out = advantages(
        column(reward, np.float32),
        column(terminated, bool),
        column(truncated, bool),
        column(value, np.float32),
        np.asarray([v_last], np.float32),
        **options,
    )
    return np.asarray(out)[:, 0]


def by_loop(reward, terminated, truncated, value, v_last, gamma=GAMMA, lambda_=LAMBDA):
    T, B = reward.shape
    out = np.zeros((T, B))
    for b in range(B):
        following = 0.0
        for t in reversed(range(T)):
            v_next = v_last[b] if t == T - 1 else value[t + 1, b]
            if terminated[t, b]:
                v_next = 0.0
            if terminated[t, b] or truncated[t, b]:
                following = 0.0
            following = reward[t, b] + gamma * v_next - value[t, b] + gamma * lambda_ * following
            out[t, b] = following
    return out


def random_rollout(seed, T=37, B=5, p_end=0.15):
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    terminated = rng.random((T, B)) < p_end
    truncated = (rng.random((T, B)) < p_end) & ~terminated
    return draw(T, B), terminated, truncated, draw(T, B), draw(B)


def test_hand_numbers():
    # gamma 0.5, lambda 0.5: trace 0.25.
    # delta_2 = 3 + 0.5 * 4 - 2 = 3                  A_2 = 3
    # delta_1 = 2 + 0.5 * 2 - 1 = 2                  A_1 = 2 + 0.25 * 3 = 2.75
    # delta_0 = 1 + 0.5 * 1 - 0.5 = 1                A_0 = 1 + 0.25 * 2.75 = 1.6875
    no = [False] * 3
    out = of_one_env([1, 2, 3], no, no, [0.5, 1, 2], 4, gamma=0.5, lambda_=0.5)
    np.testing.assert_array_equal(out, [1.6875, 2.75, 3.0])


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_a_plain_loop(seed):
    rollout = random_rollout(seed)
    np.testing.assert_allclose(advantages(*rollout), by_loop(*rollout), rtol=1e-5, atol=1e-5)


def test_lambda_one_is_the_discounted_return_minus_the_value():
    reward, _, _, value, v_last = random_rollout(2)
    no = np.zeros(reward.shape, bool)
    T = reward.shape[0]
    returns = np.stack(
        [
            sum(GAMMA ** (k - t) * reward[k] for k in range(t, T)) + GAMMA ** (T - t) * v_last
            for t in range(T)
        ]
    )
    out = advantages(reward, no, no, value, v_last, lambda_=1.0)
    np.testing.assert_allclose(out, returns - value, rtol=1e-5, atol=1e-5)


def test_equals_rlax_where_episodes_only_terminate(rlax):
    reward, terminated, _, value, v_last = random_rollout(3)
    discount = GAMMA * (1.0 - terminated.astype(np.float32))
    of_one = lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, LAMBDA, v)  # noqa: E731
    of_all = jax.jit(jax.vmap(of_one, in_axes=1, out_axes=1))
    reference = of_all(reward, discount, np.concatenate([value, v_last[None]]))
    out = advantages(reward, terminated, np.zeros_like(terminated), value, v_last)
    np.testing.assert_allclose(out, reference, rtol=1e-5, atol=1e-5)


# Two steps, the end, the reset row (value 4 of the true final observation), a new episode.
# gamma 0.5, lambda 0.5.
REWARD = [1.0, 2.0, 0.0, 1.0]
VALUE = [2.0, 3.0, 4.0, 5.0]
V_LAST = 6.0
AT_1 = [False, True, False, False]
NEVER = [False] * 4


def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not():
    # Both: A_3 = 1 + 0.5 * 6 - 5 = -1
    # Truncated:  A_1 = 2 + 0.5 * 4 - 3 = 1     A_0 = (1 + 0.5 * 3 - 2) + 0.25 * 1  = 0.75
    # Terminated: A_1 = 2 - 3 = -1              A_0 = (1 + 0.5 * 3 - 2) + 0.25 * -1 = 0.25
    half = {"gamma": 0.5, "lambda_": 0.5}
    truncated = of_one_env(REWARD, NEVER, AT_1, VALUE, V_LAST, **half)
    terminated = of_one_env(REWARD, AT_1, NEVER, VALUE, V_LAST, **half)
    rows = [0, 1, 3]
    np.testing.assert_array_equal(truncated[rows], [0.75, 1.0, -1.0])
    np.testing.assert_array_equal(terminated[rows], [0.25, -1.0, -1.0])
    targets = lambda a: (a + np.asarray(VALUE, np.float32))[rows]  # noqa: E731
    np.testing.assert_array_equal(targets(truncated), [2.75, 4.0, 4.0])
    np.testing.assert_array_equal(targets(terminated), [2.25, 2.0, 4.0])


def test_episode_that_ends_with_the_rollout():
    # The final observation's value is then v_last: A_1 = 2 + 0.5 * 4 - 3 = 1, or 2 - 3 = -1.
    half = {"gamma": 0.5, "lambda_": 0.5}
    ends, never = [False, True], [False, False]
    truncated = of_one_env([1, 2], never, ends, [2, 3], 4, **half)
    terminated = of_one_env([1, 2], ends, never, [2, 3], 4, **half)
    np.testing.assert_array_equal(truncated, [0.75, 1.0])
    np.testing.assert_array_equal(terminated, [0.25, -1.0])


@pytest.mark.parametrize(
    ("terminated", "truncated"), [(AT_1, NEVER), (NEVER, AT_1)], ids=["terminated", "truncated"]
)
def test_nothing_from_the_reset_row_on_reaches_the_episode_before(terminated, truncated):
    before = of_one_env(REWARD, terminated, truncated, VALUE, V_LAST)
    reward, value = REWARD.copy(), VALUE.copy()
    reward[2], reward[3], value[3] = 1e6, -1e6, 1e6
    if terminated[1]:
        value[2] = 1e6  # of no meaning; after a truncation it is the bootstrap
    after = of_one_env(reward, terminated, truncated, value, -1e6)
    np.testing.assert_array_equal(after[:2], before[:2])
    assert abs(after[3] - before[3]) > 1e5


def test_truncation_takes_exactly_the_reset_rows_value():
    value = VALUE.copy()
    before = of_one_env(REWARD, NEVER, AT_1, value, V_LAST)
    value[2] += 1.0
    after = of_one_env(REWARD, NEVER, AT_1, value, V_LAST)
    np.testing.assert_allclose(after[1] - before[1], GAMMA, rtol=1e-6)
    np.testing.assert_allclose(after[0] - before[0], GAMMA * LAMBDA * GAMMA, rtol=1e-6)


def test_environments_do_not_mix():
    rollout = random_rollout(4)
    alone = [x[..., 2:3] for x in rollout]
    np.testing.assert_allclose(
        advantages(*alone)[:, 0], advantages(*rollout)[:, 2], rtol=1e-6, atol=1e-6
    )

"""V-trace against hand numbers, rlax and its identities, and at automatic resets."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from spmdrl.algos.returns import fold_discounts, gae
from spmdrl.algos.vtrace import Clips, vtrace

ONES = Clips(1.0, 1.0, 1.0)
REWARD, VALUE, LAST, RHO = [1.0, 0.0, 2.0], [0.5, 1.0, 1.5], 2.0, [2.0, 0.5, 1.0]


def of_one_env(terminated=(), truncated=(), lambda_=1.0, value=VALUE, rho=RHO, last=LAST):
    """Rows that end, by number; the row after each is its reset. gamma is 0.9."""
    count = len(REWARD)
    over = np.isin(np.arange(count), terminated)
    ended = over | np.isin(np.arange(count), truncated)
    valid = ~np.concatenate([[False], ended[:-1]])
    columns = (np.asarray(x, np.float32)[:, None] for x in (REWARD, 0.9 * ~over, value, rho))
    reward, discount, value, rho = columns
    last = np.asarray([last], np.float32)
    found = vtrace(reward, discount, valid[:, None], value, last, np.log(rho), lambda_, ONES)
    return np.asarray(found.value)[:, 0], np.asarray(found.advantage)[:, 0]


def test_hand_numbers():
    value, advantage = of_one_env()
    np.testing.assert_allclose(value, [2.989, 2.21, 3.8], rtol=1e-6)
    np.testing.assert_allclose(advantage, [2.489, 1.21, 2.3], rtol=1e-6)
    value, _ = of_one_env(lambda_=0.5)
    np.testing.assert_allclose(value, [2.211625, 1.6925, 3.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("ends", "value", "advantage"),
    [({"truncated": [0]}, 1.9, 1.4), ({"terminated": [0]}, 1.0, 0.5)],
    ids=["time limit", "end"],
)
def test_nothing_flows_through_a_reset_but_the_value_before_it(ends, value, advantage):
    values, advantages = of_one_env(**ends)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    np.testing.assert_allclose(advantages, [advantage, 0.0, 2.3], rtol=1e-6)


@pytest.mark.parametrize(("row", "valid"), [(0, [0, 2]), (2, [0, 1, 2])])
def test_what_is_not_finite_behind_an_end_stays_there(row, valid):
    value, last = [*VALUE], LAST
    if row == 2:
        last = np.nan
    else:
        value[row + 1] = np.nan
    rho = [2.0, np.inf, 1.0] if row == 0 else RHO
    values, advantages = of_one_env(terminated=[row], value=value, rho=rho, last=last)
    assert np.isfinite(values[valid]).all()
    assert np.isfinite(advantages).all()


def random_problem(seed, steps=37, envs=5):
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    terminated = rng.random((steps, envs)) < 0.1
    discount = np.float32(0.9) * ~terminated
    shape = (steps, envs)
    return draw(*shape), discount, draw(*shape), draw(envs), 0.7 * draw(*shape), terminated


@pytest.mark.parametrize("lambda_", [1.0, 0.8])
@pytest.mark.parametrize("clips", [ONES, Clips(1.3, 1.0, 0.7)], ids=["ones", "others"])
def test_equals_rlax_where_no_row_is_masked(rlax, lambda_, clips):
    """Whose traces are always clipped at 1."""
    reward, discount, value, last, log_rho, _ = random_problem(3)
    valid = np.ones_like(reward, bool)
    found = vtrace(reward, discount, valid, value, last, log_rho, lambda_, clips)

    def theirs(v_tm1, v_t, r_t, discount_t, rho):
        return rlax.vtrace_td_error_and_advantage(
            v_tm1, v_t, r_t, discount_t, rho, lambda_, clips.rho, clips.pg_rho
        )

    v_t = np.concatenate([value[1:], last[None]])
    expected = jax.vmap(theirs, 1, 1)(value, v_t, reward, discount, np.exp(log_rho))
    np.testing.assert_allclose(found.value - value, expected.errors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.advantage, expected.pg_advantage, rtol=1e-4, atol=1e-5)


def test_the_bound_of_the_traces_is_one_of_its_own():
    """Errors by hand: 1 (0 + 0.9 2 - 1) = 0.8 behind, so 1 + 0.9 1 - 0.5 + 0.9 0.25 0.8 = 1.58."""
    column = lambda *x: np.asarray(x, np.float32)[:, None]  # noqa: E731
    found = vtrace(
        column(1, 0), column(0.9, 0.9), np.ones((2, 1), bool), column(0.5, 1),
        np.full(1, 2, np.float32), np.zeros((2, 1), np.float32), 1.0, Clips(1.0, 0.25, 1.0),
    )  # fmt: skip
    np.testing.assert_allclose(found.value, column(0.5 + 1.58, 1.8), rtol=1e-6)


@pytest.mark.parametrize("lambda_", [1.0, 0.6])
def test_on_policy_it_is_generalised_advantage_estimation(lambda_):
    """Of any rollout, with ends and time limits; lambda 1 is the n-step return."""
    rng = np.random.default_rng(5)
    reward, _, value, last, log_rho, terminated = random_problem(4)
    truncated = (rng.random(terminated.shape) < 0.1) & ~terminated
    reset = np.zeros((1, terminated.shape[1]), bool)
    valid = ~np.concatenate([reset, (terminated | truncated)[:-1]])
    discount, trace = fold_discounts(terminated, truncated, 0.9, lambda_)
    expected = np.asarray(gae(reward, discount, trace, value, last))
    found = vtrace(reward, discount, valid, value, last, 0.0 * log_rho, lambda_, ONES)
    np.testing.assert_allclose(np.asarray(found.advantage)[valid], expected[valid], 1e-5, 1e-5)
    np.testing.assert_allclose(
        np.asarray(found.value)[valid], (expected + value)[valid], 1e-5, 1e-5
    )

"""Action distributions against distrax, and their samples against what they promise."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spmdrl.nets.distributions import Categorical, DiagNormal, make_distribution
from spmdrl.types import ActionSpace

DISCRETE = Categorical((5,), squeeze=True)
MULTI = Categorical((3, 2, 4), squeeze=False)
NORMAL = DiagNormal(3)


@pytest.fixture(scope="module")
def distrax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses deprecated names of jax when imported
        import distrax
    return distrax


def random_params(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 1.5, shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames="dist")
def answers(dist, params, action):
    return dist.log_prob(params, action), dist.entropy(params), dist.mode(params)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# Closed forms


def test_categorical_by_hand():
    # Logits of probabilities 1/2, 1/4, 1/8, 1/8; entropy 1.75 bits. A shift changes nothing.
    dist = Categorical((4,), squeeze=True)
    params = np.log(np.float32([[0.5, 0.25, 0.125, 0.125]])) + np.float32(7.0)
    log_prob, entropy, mode = answers(dist, params, np.int32([1]))
    close(log_prob, [math.log(0.25)])
    close(entropy, [1.75 * math.log(2)])
    np.testing.assert_array_equal(mode, [0])


def test_normal_by_hand():
    # Means 0 and 1, deviations 1 and 2, action one deviation off in the second component only.
    params = np.float32([[0.0, 1.0, 0.0, math.log(2.0)]])
    log_prob, entropy, mode = answers(DiagNormal(2), params, np.float32([[0.0, 3.0]]))
    close(log_prob, [-math.log(2 * math.pi) - math.log(2.0) - 0.5])
    close(entropy, [1.0 + math.log(2 * math.pi) + math.log(2.0)])
    close(mode, [[0.0, 1.0]])


def test_categorical_equals_distrax(distrax):
    params = random_params(64, 5)
    reference = distrax.Categorical(logits=params)
    for choice in range(5):
        action = np.full(64, choice, np.int32)
        log_prob, entropy, mode = answers(DISCRETE, params, action)
        close(log_prob, reference.log_prob(action))
    close(entropy, reference.entropy())
    np.testing.assert_array_equal(mode, reference.mode())


def test_multi_categorical_is_independent_categoricals(distrax):
    params = random_params(64, 9)
    parts = [distrax.Categorical(logits=p) for p in np.split(params, [3, 5], axis=-1)]
    rng = np.random.default_rng(1)
    action = np.stack([rng.integers(n, size=64) for n in MULTI.nvec], -1).astype(np.int32)
    log_prob, entropy, mode = answers(MULTI, params, action)
    close(log_prob, sum(part.log_prob(action[:, i]) for i, part in enumerate(parts)))
    close(entropy, sum(part.entropy() for part in parts))
    np.testing.assert_array_equal(mode, np.stack([part.mode() for part in parts], -1))


def test_normal_equals_distrax(distrax):
    params, action = random_params(64, 6), random_params(64, 3, seed=1)
    reference = distrax.MultivariateNormalDiag(params[:, :3], jnp.exp(params[:, 3:]))
    log_prob, entropy, mode = answers(NORMAL, params, action)
    np.testing.assert_allclose(log_prob, reference.log_prob(action), rtol=1e-4)
    close(entropy, reference.entropy())
    close(mode, reference.mode())


@pytest.mark.parametrize("dist", [DISCRETE, MULTI], ids=["discrete", "multi_discrete"])
def test_probabilities_of_all_actions_add_up_to_one(dist):
    params = random_params(dist.num_params, seed=2)
    grid = np.indices(dist.nvec).reshape(len(dist.nvec), -1).T.astype(np.int32)
    action = grid[:, 0] if dist.squeeze else grid
    rows = np.broadcast_to(params, (len(grid), dist.num_params))
    log_prob, _, _ = answers(dist, rows, action)
    close(np.exp(log_prob).sum(), 1.0)


def test_large_logits_stay_finite():
    params = np.float32([[1e4, 0.0, -1e4]])
    log_prob, entropy, _ = answers(Categorical((3,), squeeze=True), params, np.int32([0]))
    close(log_prob, [0.0])
    close(entropy, [0.0])


# ---------------------------------------------------------------------------------------------
# Sampling


@functools.partial(jax.jit, static_argnames=("dist", "rows"))
def draw(dist, params, rows):
    return dist.sample(params, dist.noise(jax.random.key(0), (rows,)))


def assert_plausible(choices, logits):
    expected = np.exp(logits - np.logaddexp.reduce(logits)) * len(choices)
    observed = np.bincount(choices, minlength=len(logits))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_categorical_samples_follow_the_probabilities():
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    assert_plausible(np.asarray(draw(DISCRETE, np.float32(logits), 20_000)), logits)


def test_multi_categorical_samples_follow_the_probabilities_independently():
    logits = random_params(9, seed=3).astype(np.float64)
    action = np.asarray(draw(MULTI, np.float32(logits), 20_000))
    for i, part in enumerate(np.split(logits, [3, 5])):
        assert_plausible(action[:, i], part)
    table = np.zeros((3, 4))
    np.add.at(table, (action[:, 0], action[:, 2]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_normal_samples_have_the_mean_and_deviation():
    n = 20_000
    mean, std = np.array([-2.0, 0.0, 3.0]), np.array([0.5, 1.0, 2.0])
    action = np.asarray(draw(NORMAL, np.float32([*mean, *np.log(std)]), n), np.float64)
    assert (np.abs(action.mean(0) - mean) < 4 * std / math.sqrt(n)).all()
    assert (np.abs(action.std(0) - std) < 4 * std / math.sqrt(2 * n)).all()
    off_diagonal = np.corrcoef(action.T)[np.triu_indices(3, 1)]
    assert (np.abs(off_diagonal) < 4 / math.sqrt(n)).all()


def test_categorical_sample_is_the_argmax_after_the_noise():
    params = random_params(50, 9)
    noise = np.asarray(MULTI.noise(jax.random.key(1), (50,)))
    disturbed = np.split(params + noise, [3, 5], axis=-1)
    expected = np.stack([part.argmax(-1) for part in disturbed], -1)
    np.testing.assert_array_equal(MULTI.sample(params, noise), expected)
    plain = DISCRETE.sample(params[:, :5], noise[:, :5])
    np.testing.assert_array_equal(plain, (params + noise)[:, :5].argmax(-1))


def test_normal_sample_is_the_mean_plus_scaled_noise():
    params, noise = random_params(50, 6), random_params(50, 3, seed=1)
    expected = params[:, :3] + np.exp(params[:, 3:]) * noise
    close(NORMAL.sample(params, noise), expected)


@pytest.mark.parametrize("dist", [DISCRETE, MULTI, NORMAL])
def test_no_noise_gives_the_mode(dist):
    width = 6 if dist is NORMAL else dist.num_params
    params = random_params(10, width)
    noise = np.zeros(dist.noise(jax.random.key(0), (10,)).shape, np.float32)
    np.testing.assert_array_equal(dist.sample(params, noise), dist.mode(params))


# ---------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    ("space", "dist", "shape", "dtype"),
    [
        (ActionSpace("discrete", (), np.dtype("int32"), nvec=(5,)), DISCRETE, (2, 7), "int32"),
        (
            ActionSpace("multi_discrete", (3,), np.dtype("int32"), nvec=(3, 2, 4)),
            MULTI,
            (2, 7, 3),
            "int32",
        ),
        (ActionSpace("box", (3,), np.dtype("float32")), NORMAL, (2, 7, 3), "float32"),
        (ActionSpace("box", (2, 2), np.dtype("float64")), DiagNormal(4), (2, 7, 4), "float32"),
    ],
)
def test_make_distribution_and_its_shapes(space, dist, shape, dtype):
    made = make_distribution(space)
    assert made == dist
    width = made.num_params * (2 if space.kind == "box" else 1)
    params = random_params(2, 7, width)
    action = made.sample(params, made.noise(jax.random.key(0), (2, 7)))
    assert action.shape == shape
    assert action.dtype == dtype
    assert made.log_prob(params, action).shape == (2, 7)
    assert made.entropy(params).shape == (2, 7)

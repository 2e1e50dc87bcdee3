"""Action distributions against distrax, and their samples against what they promise."""

import functools
import math

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
    params = np.log(np.asarray([[0.5, 0.25, 0.125, 0.125]], np.float32)) + np.float32(7.0)
    log_prob, entropy, mode = answers(dist, params, np.asarray([1], np.int32))
    close(log_prob, [math.log(0.25)])
    close(entropy, [1.75 * math.log(2)])
    np.testing.assert_array_equal(mode, [0])


def test_normal_by_hand():
    # Means 0 and 1, deviations 1 and 2, action one deviation off in the second component only.
    params = np.asarray([[0.0, 1.0, 0.0, math.log(2.0)]], np.float32)
    log_prob, entropy, mode = answers(DiagNormal(2), params, np.asarray([[0.0, 3.0]], np.float32))
    close(log_prob, [-math.log(2 * math.pi) - math.log(2.0) - 0.5])
    close(entropy, [1.0 + math.log(2 * math.pi) + math.log(2.0)])
    close(mode, [[0.0, 1.0]])


def reference_answers(make, params, action):
    def of(params, action):
        reference = make(params)
        return reference.log_prob(action), reference.entropy(), reference.mode()

    return jax.jit(of)(params, action)


def test_categorical_equals_distrax(distrax):
    params, action = random_params(64, 5), np.arange(64, dtype=np.int32) % 5
    reference = reference_answers(lambda p: distrax.Categorical(logits=p), params, action)
    jax.tree.map(close, answers(DISCRETE, params, action), reference)


def test_multi_categorical_is_independent_categoricals(distrax):
    params, rng = random_params(64, 9), np.random.default_rng(1)
    action = np.stack([rng.integers(n, size=64) for n in MULTI.nvec], -1).astype(np.int32)
    parts = [
        reference_answers(lambda p: distrax.Categorical(logits=p), part, action[:, i])
        for i, part in enumerate(np.split(params, [3, 5], axis=-1))
    ]
    log_probs, entropies, modes = zip(*parts, strict=True)
    log_prob, entropy, mode = answers(MULTI, params, action)
    close(log_prob, np.sum(log_probs, axis=0))
    close(entropy, np.sum(entropies, axis=0))
    np.testing.assert_array_equal(mode, np.stack(modes, -1))


def test_normal_equals_distrax(distrax):
    params, action = random_params(64, 6), random_params(64, 3, seed=1)
    make = lambda p: distrax.MultivariateNormalDiag(p[:, :3], jnp.exp(p[:, 3:]))  # noqa: E731
    jax.tree.map(close, answers(NORMAL, params, action), reference_answers(make, params, action))


@pytest.mark.parametrize("dist", [DISCRETE, MULTI], ids=["discrete", "multi_discrete"])
def test_probabilities_of_all_actions_add_up_to_one(dist):
    params = random_params(dist.num_params, seed=2)
    grid = np.indices(dist.nvec).reshape(len(dist.nvec), -1).T.astype(np.int32)
    action = grid[:, 0] if dist.squeeze else grid
    rows = np.broadcast_to(params, (len(grid), dist.num_params))
    log_prob, _, _ = answers(dist, rows, action)
    close(np.exp(log_prob).sum(), 1.0)


def test_large_logits_stay_finite():
    params = np.asarray([[1e4, 0.0, -1e4]], np.float32)
    log_prob, entropy, _ = answers(
        Categorical((3,), squeeze=True), params, np.asarray([0], np.int32)
    )
    close(log_prob, [0.0])
    close(entropy, [0.0])


# ---------------------------------------------------------------------------------------------
# Sampling


@functools.partial(jax.jit, static_argnames=("dist", "rows"))
def draw(dist, params, rows):
    return dist.sample(params, dist.noise(jax.random.key(0), (rows,)))


def sample(dist, params, noise):
    return np.asarray(jax.jit(dist.sample)(params, noise))


def assert_plausible(choices, logits):
    expected = np.exp(logits - np.logaddexp.reduce(logits)) * len(choices)
    observed = np.bincount(choices, minlength=len(logits))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_categorical_samples_follow_the_probabilities():
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    assert_plausible(np.asarray(draw(DISCRETE, np.asarray(logits, np.float32), 20_000)), logits)


def test_multi_categorical_samples_follow_the_probabilities_independently():
    logits = random_params(9, seed=3).astype(np.float64)
    action = np.asarray(draw(MULTI, np.asarray(logits, np.float32), 20_000))
    for i, part in enumerate(np.split(logits, [3, 5])):
        assert_plausible(action[:, i], part)
    table = np.zeros((3, 4))
    np.add.at(table, (action[:, 0], action[:, 2]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_normal_samples_have_the_mean_and_deviation():
    n = 20_000
    mean, std = np.array([-2.0, 0.0, 3.0]), np.array([0.5, 1.0, 2.0])
    action = np.asarray(draw(NORMAL, np.asarray([*mean, *np.log(std)], np.float32), n), np.float64)
    assert (np.abs(action.mean(0) - mean) < 4 * std / math.sqrt(n)).all()
    assert (np.abs(action.std(0) - std) < 4 * std / math.sqrt(2 * n)).all()
    off_diagonal = np.atleast_2d(np.corrcoef(action.T))[np.triu_indices(3, 1)]
    assert (np.abs(off_diagonal) < 4 / math.sqrt(n)).all()


def test_categorical_sample_is_the_argmax_after_the_noise():
    params = random_params(50, 9)
    noise = np.random.default_rng(1).gumbel(size=(50, 9)).astype(np.float32)
    disturbed = np.split(params + noise, [3, 5], axis=-1)
    expected = np.stack([part.argmax(-1) for part in disturbed], -1)
    np.testing.assert_array_equal(sample(MULTI, params, noise), expected)
    plain = sample(DISCRETE, params[:, :5], noise[:, :5])
    np.testing.assert_array_equal(plain, (params + noise)[:, :5].argmax(-1))


def test_normal_sample_is_the_mean_plus_scaled_noise():
    params, noise = random_params(50, 6), random_params(50, 3, seed=1)
    close(sample(NORMAL, params, noise), params[:, :3] + np.exp(params[:, 3:]) * noise)


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
    params = jnp.asarray(random_params(2, 7, width))

    def everything(key):
        action = made.sample(params, made.noise(key, (2, 7)))
        return action, made.mode(params), made.log_prob(params, action), made.entropy(params)

    action, mode, log_prob, entropy = jax.eval_shape(everything, jax.random.key(0))
    assert (action.shape, action.dtype) == (shape, dtype)
    assert (mode.shape, mode.dtype) == (shape, dtype)
    assert (log_prob.shape, log_prob.dtype) == ((2, 7), "float32")
    assert (entropy.shape, entropy.dtype) == ((2, 7), "float32")

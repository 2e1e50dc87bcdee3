"""The PPO sums against hand numbers, a plain loop and rlax; reset rows must not matter at all."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos.base import Minibatch, Outputs
from spmdrl.algos.ppo import Constants, Ppo, Targets, loss
from spmdrl.nets.distributions import Categorical, DiagNormal, Distribution

EPS = 0.2
ALGO = Ppo(value_coef=0.5, entropy_coef=0.01, clip_value=True)


@dataclasses.dataclass(frozen=True)
class Given:
    """Log-probability and entropy straight from the parameters, for numbers by hand."""

    def log_prob(self, params, action):
        return params[:, 0]

    def entropy(self, params):
        return params[:, 1]


GIVEN: Any = Given()  # all of a distribution that the loss asks for


def constants_of(mean, scale, algo=ALGO):
    return Constants(*map(jnp.float32, (mean, scale, EPS, algo.entropy_coef)))


@functools.partial(jax.jit, static_argnames=("dist", "algo"))
def evaluate(dist, dist_params, value, rows, algo=ALGO):
    """`(loss, sums, gradients)`, the last with respect to the network's two outputs."""

    now = constants_of(0.0, 1.0, algo)

    def of_outputs(dist_params, value):
        return loss(algo, dist, now, Outputs(dist_params, value), rows)

    (total, sums), grads = jax.value_and_grad(of_outputs, (0, 1), has_aux=True)(dist_params, value)
    return total, sums, grads


def make_rows(n, **fields):
    zeros = np.zeros(n, np.float32)
    blank = {
        "action": np.zeros(n, np.int32),
        "log_prob": zeros,
        "value": zeros,
        "advantage": zeros,
        "target": zeros,
        "weight": np.ones(n, np.float32),
    }
    return rows_of(**(blank | {k: np.asarray(v, blank[k].dtype) for k, v in fields.items()}))


def rows_of(action, log_prob, value, advantage, target, weight):
    """A minibatch with what the loss looks at; the rest is never touched."""
    no = np.zeros(len(weight), bool)
    return Minibatch(
        obs=(),
        first=no,
        action=action,
        log_prob=log_prob,
        value=value,
        reward=np.zeros(len(weight), np.float32),
        terminated=no,
        truncated=no,
        weight=weight,
        targets=Targets(advantage, target),
    )


def changed(rows, **fields):
    targets = {"advantage": "advantage", "target": "value"}
    for name, x in fields.items():
        if name in targets:
            rows = rows._replace(targets=rows.targets._replace(**{targets[name]: x}))
        else:
            rows = rows._replace(**{name: x})
    return rows


def field_of(rows, name):
    if name == "advantage":
        return rows.targets.advantage
    return rows.targets.value if name == "target" else getattr(rows, name)


def given(ratio, entropy=0.0):
    log_prob = np.log(np.asarray(ratio, np.float64))
    return np.stack([log_prob, np.broadcast_to(entropy, log_prob.shape)], -1).astype(np.float32)


def random_problem(dist, seed=0, n=40):
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if isinstance(dist, DiagNormal):
        params, action = draw(n, 2 * dist.dim), draw(n, dist.dim)
    else:
        params = draw(n, dist.num_params)
        action = np.stack([rng.integers(k, size=n) for k in dist.nvec], -1).astype(np.int32)
        action = action[:, 0] if dist.squeeze else action
    old = np.asarray(dist.log_prob(jnp.asarray(params), jnp.asarray(action))) + 0.3 * draw(n)
    value = draw(n)
    rows = rows_of(
        action=action,
        log_prob=old,
        value=value + 0.3 * draw(n),
        advantage=draw(n),
        target=draw(n),
        weight=(rng.random(n) < 0.8).astype(np.float32),
    )
    return params, value, rows


DISTS: list[Distribution] = [
    Categorical((4,), squeeze=True),
    Categorical((3, 2), squeeze=False),
    DiagNormal(2),
]
DIST_IDS = ["discrete", "multi_discrete", "box"]
each_dist = pytest.mark.parametrize("dist", DISTS, ids=DIST_IDS)


# ---------------------------------------------------------------------------------------------
# Hand numbers


RATIO = [1.5, 0.5, 1.5, 0.5, 1.1]
ADVANTAGE = [2.0, 2.0, -1.0, -1.0, 1.0]


def test_policy_loss_by_hand():
    # ratio 1.5, A  2: min( 3.0,  1.2 *  2) =  2.4   the ratio is clipped from above
    # ratio 0.5, A  2: min( 1.0,  0.8 *  2) =  1.0   the worse one is free
    # ratio 1.5, A -1: min(-1.5, -1.2)      = -1.5   the worse one is free
    # ratio 0.5, A -1: min(-0.5, -0.8)      = -0.8   clipped from below
    # ratio 1.1, A  1: 1.1                           inside
    # -(2.4 + 1.0 - 1.5 - 0.8 + 1.1) = -2.2
    _, sums, _ = evaluate(GIVEN, given(RATIO), jnp.zeros(5), make_rows(5, advantage=ADVANTAGE))
    np.testing.assert_allclose(sums["loss/policy"], -2.2, rtol=1e-6)


def test_policy_gradient_is_zero_exactly_where_the_clip_binds():
    # d(-ratio A)/d log_prob = -ratio A on free rows.
    rows = make_rows(5, advantage=ADVANTAGE)
    _, _, (grad, _) = evaluate(GIVEN, given(RATIO), jnp.zeros(5), rows)
    np.testing.assert_allclose(grad[:, 0], [0.0, -1.0, 1.5, 0.0, -1.1], rtol=1e-6)


def test_kl_and_clip_fraction_by_hand():
    # k3 = ratio - 1 - log ratio, never negative:
    # 2 (0.5 - ln 1.5) + 2 (-0.5 + ln 2) + (0.1 - ln 1.1) = 0.580054
    # |ratio - 1| is 0.5 four times and 0.1 once, against 0.2.
    _, sums, _ = evaluate(GIVEN, given(RATIO), jnp.zeros(5), make_rows(5, advantage=ADVANTAGE))
    by_hand = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2)) + 0.1 - math.log(1.1)
    np.testing.assert_allclose(by_hand, 0.580054, rtol=1e-5)
    np.testing.assert_allclose(sums["ppo/approx_kl"], by_hand, rtol=1e-5)
    assert sums["ppo/clip_frac"] == 4.0


def test_kl_and_clip_fraction_are_zero_for_the_policy_that_acted():
    _, sums, _ = evaluate(GIVEN, given([1.0, 1.0]), jnp.zeros(2), make_rows(2))
    assert sums["ppo/approx_kl"] == 0.0
    assert sums["ppo/clip_frac"] == 0.0


@pytest.mark.parametrize(("clip_value", "expected"), [(True, 4.345), (False, 3.03)])
def test_value_loss_by_hand(clip_value, expected):
    # Old value 1, so the bounded new one stays in [0.8, 1.2]; half of the squared error:
    # new 1.5, target  2: free 0.25, bounded at 1.2 0.64
    # new 1.1, target  2: free 0.81, bounded at 1.1 0.81
    # new 0.0, target -1: free 1.00, bounded at 0.8 3.24
    # new 3.0, target  1: free 4.00, bounded at 1.2 0.04
    # clipped 0.5 (0.64 + 0.81 + 3.24 + 4) = 4.345; free 0.5 (0.25 + 0.81 + 1 + 4) = 3.03
    value = jnp.float32([1.5, 1.1, 0.0, 3.0])
    rows = make_rows(4, value=[1, 1, 1, 1], target=[2, 2, -1, 1])
    algo = dataclasses.replace(ALGO, clip_value=clip_value)
    _, sums, _ = evaluate(GIVEN, given([1.0] * 4), value, rows, algo)
    np.testing.assert_allclose(sums["loss/value"], expected, rtol=1e-6)


def test_value_gradient_vanishes_where_the_bound_is_the_worse():
    # Rows as above, times value_coef 0.5: free rows have 0.5 (value - target).
    value = jnp.float32([1.5, 1.1, 0.0, 3.0])
    rows = make_rows(4, value=[1, 1, 1, 1], target=[2, 2, -1, 1])
    _, _, (_, grad) = evaluate(GIVEN, given([1.0] * 4), value, rows)
    np.testing.assert_allclose(grad, [0.0, -0.45, 0.0, 1.0], rtol=1e-6)


def test_loss_is_the_weighted_sum_of_its_parts():
    # Policy -1.2 * 1, value 0.5 (0 - 2)^2 = 2, entropy 0.7: -1.2 + 0.25 * 2 - 0.1 * 0.7 = -0.77
    algo = Ppo(value_coef=0.25, entropy_coef=0.1, clip_value=False)
    rows = make_rows(1, advantage=[1.0], target=[2.0])
    loss, sums, _ = evaluate(GIVEN, given([1.5], entropy=0.7), jnp.zeros(1), rows, algo)
    np.testing.assert_allclose(sums["loss/entropy"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(loss, -0.77, rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# References


def by_loop(dist, params, value, rows, clip_value):
    """Every row on its own, in double precision."""
    names = ["loss/policy", "loss/value", "loss/entropy", "ppo/approx_kl", "ppo/clip_frac"]
    out = dict.fromkeys(names, 0.0)
    for i in range(len(value)):
        if rows.weight[i] == 0:
            continue
        log_prob, entropy = row_by_hand(dist, params[i].astype(np.float64), rows.action[i])
        log_ratio = log_prob - float(rows.log_prob[i])
        ratio, advantage = math.exp(log_ratio), float(rows.targets.advantage[i])
        bounded_ratio = min(max(ratio, 1 - EPS), 1 + EPS)
        old, new, target = (float(x[i]) for x in (rows.value, value, rows.targets.value))
        error = (new - target) ** 2
        if clip_value:
            error = max(error, (old + min(max(new - old, -EPS), EPS) - target) ** 2)
        out["loss/policy"] -= min(ratio * advantage, bounded_ratio * advantage)
        out["loss/value"] += error / 2
        out["loss/entropy"] += entropy
        out["ppo/approx_kl"] += ratio - 1 - log_ratio
        out["ppo/clip_frac"] += abs(ratio - 1) > EPS
    return out


def row_by_hand(dist, params, action):
    if isinstance(dist, DiagNormal):
        mean, std = params[: dist.dim], np.exp(params[dist.dim :])
        density = np.exp(-0.5 * ((action - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
        return np.log(density).sum(), (0.5 * np.log(2 * math.pi * math.e * std**2)).sum()
    log_prob = entropy = 0.0
    parts = np.split(params, np.cumsum(dist.nvec)[:-1])
    for part, chosen in zip(parts, np.ravel(action), strict=True):
        p = np.exp(part) / np.exp(part).sum()
        log_prob, entropy = log_prob + np.log(p[chosen]), entropy - (p * np.log(p)).sum()
    return log_prob, entropy


@each_dist
@pytest.mark.parametrize("clip_value", [True, False])
def test_equals_a_plain_loop(dist, clip_value):
    params, value, rows = random_problem(dist)
    algo = dataclasses.replace(ALGO, clip_value=clip_value)
    loss, sums, _ = evaluate(dist, params, value, rows, algo)
    reference = by_loop(dist, params, value, rows, clip_value)
    assert 0 < reference["ppo/clip_frac"] < rows.weight.sum()
    assert sums.keys() == reference.keys()
    for name, number in reference.items():
        np.testing.assert_allclose(sums[name], number, rtol=1e-4, err_msg=name)
    total = reference["loss/policy"] + 0.5 * reference["loss/value"]
    np.testing.assert_allclose(loss, total - 0.01 * reference["loss/entropy"], rtol=1e-4)


def test_policy_loss_and_its_gradient_equal_rlax(rlax):
    dist = DISTS[0]
    params, value, rows = random_problem(dist, seed=1)
    rows = changed(rows, weight=np.ones_like(rows.weight))

    def our_loss(params):
        return evaluate(dist, params, value, rows)[1]["loss/policy"] / len(value)

    def their_loss(params):
        ratio = jnp.exp(dist.log_prob(params, rows.action) - rows.log_prob)
        return rlax.clipped_surrogate_pg_loss(ratio, rows.targets.advantage, EPS)

    ours, theirs = (jax.jit(jax.value_and_grad(f))(params) for f in (our_loss, their_loss))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-8)


# ---------------------------------------------------------------------------------------------
# Sums over rows


@each_dist
def test_sums_of_a_split_add_up(dist):
    problem = random_problem(dist, seed=2)
    halves = [jax.tree.map(lambda x, s=s: x[s], problem) for s in (slice(20), slice(20, 40))]
    first, second, whole = (evaluate(dist, *part) for part in (*halves, problem))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b, c: close(a + b, c), first[:2], second[:2], whole[:2])
    jax.tree.map(lambda a, b, c: close(np.concatenate([a, b]), c), first[2], second[2], whole[2])


RESET = np.array([1, 4, 39])


def with_resets(dist):
    params, value, rows = random_problem(dist, seed=3)
    weight = np.ones_like(rows.weight)
    weight[RESET] = 0.0
    return params, value, changed(rows, weight=weight)


def assert_resets_do_not_matter(dist, params, value, rows):
    """The reset rows' own gradient is zero, and the rest is as if they held other numbers."""
    loss, sums, grads = evaluate(dist, params, value, rows)
    reference_loss, reference_sums, reference_grads = evaluate(dist, *with_resets(dist))
    np.testing.assert_array_equal(loss, reference_loss)
    jax.tree.map(np.testing.assert_array_equal, sums, reference_sums)
    for grad, reference in zip(grads, reference_grads, strict=True):
        np.testing.assert_array_equal(grad[RESET], np.zeros_like(grad[RESET]))
        np.testing.assert_array_equal(grad, reference)


@each_dist
def test_reset_rows_weigh_nothing(dist):
    assert_resets_do_not_matter(dist, *with_resets(dist))


def test_loss_without_the_reset_rows_is_the_same():
    problem = with_resets(DISTS[0])
    keep = np.setdiff1d(np.arange(40), RESET)
    kept = jax.tree.map(lambda x: x[keep], problem)
    whole, without = (evaluate(DISTS[0], *rows)[:2] for rows in (problem, kept))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, without)


def poison(x):
    x = np.array(x)
    x[RESET] = np.reshape([np.inf, -np.inf, np.nan], (3,) + (1,) * (x.ndim - 1))
    return x


@each_dist
@pytest.mark.parametrize("field", ["log_prob", "value", "advantage", "target"])
def test_reset_rows_weigh_nothing_whatever_the_rollout_holds(dist, field):
    params, value, rows = with_resets(dist)
    rows = changed(rows, **{field: poison(field_of(rows, field))})
    assert_resets_do_not_matter(dist, params, value, rows)


def test_reset_rows_weigh_nothing_whatever_their_action():
    dist = DiagNormal(2)
    params, value, rows = with_resets(dist)
    assert_resets_do_not_matter(dist, params, value, changed(rows, action=poison(rows.action)))


@each_dist
@pytest.mark.parametrize("output", ["dist_params", "value"])
def test_reset_rows_weigh_nothing_whatever_the_network_says(dist, output):
    params, value, rows = with_resets(dist)
    if output == "dist_params":
        params = poison(params)
    else:
        value = poison(value)
    assert_resets_do_not_matter(dist, params, value, rows)


def test_advantages_are_normalised_by_the_constants():
    # (3 - 1) * 0.5 = 1, so the loss is that of an advantage of 1.
    now = constants_of(1.0, 0.5)
    outputs = Outputs(given([1.1]), jnp.zeros(1))
    _, sums = loss(ALGO, GIVEN, now, outputs, make_rows(1, advantage=[3.0]))
    np.testing.assert_allclose(sums["loss/policy"], -1.1, rtol=1e-6)


def test_sequences_of_rows_have_the_loss_of_the_same_rows_side_by_side():
    dist = DISTS[0]
    params, value, rows = random_problem(dist, seed=4)
    now = constants_of(0.1, 2.0)
    flat = loss(ALGO, dist, now, Outputs(params, value), rows)
    cut = lambda x: np.reshape(x, (8, 5, *np.shape(x)[1:]))  # noqa: E731
    outputs, rows = jax.tree.map(cut, (Outputs(params, value), rows))
    together = loss(ALGO, dist, now, outputs, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), flat, together)

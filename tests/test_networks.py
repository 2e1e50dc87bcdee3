"""Convolutions against Flax, and the networks that `make_policy` builds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.nets import moments
from spmdrl.nets.cpu.conv import Conv, conv_as_matmul
from spmdrl.nets.distributions import Categorical, DiagNormal
from spmdrl.nets.policy import make_policy, variables_of
from spmdrl.types import ActionSpace, EnvSpec, Moments, ObsPart

# ---------------------------------------------------------------------------------------------
# Convolutions

# Input side, channels, features, kernel, stride, input dtype, scale; the sides are those of
# Nature CNN, and 10 with stride 4 leaves two pixels that no window reaches.
LAYERS = {
    "first": (84, 4, 32, 8, 4, np.uint8, 1 / 255),
    "first_float": (84, 4, 32, 8, 4, np.float32, 1.0),
    "second": (20, 32, 64, 4, 2, np.float32, 1.0),
    "third": (9, 64, 64, 3, 1, np.float32, 1.0),
    "leftover": (10, 3, 5, 8, 4, np.float32, 1.0),
    "bytes, leftover": (29, 4, 5, 8, 4, np.uint8, 1 / 255),
    "bytes, words of two": (44, 8, 5, 16, 8, np.uint8, 1 / 255),
    "bytes, not in words": (22, 3, 5, 4, 2, np.uint8, 1 / 255),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def random_input(layer, seed=0):
    side, channels, _, _, _, dtype, _ = layer
    rng = np.random.default_rng(seed)
    shape = (2, side, side, channels)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.standard_normal(shape).astype(dtype)


def random_params(layer):
    _, channels, features, size, _, _, _ = layer
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {"kernel": 0.05 * draw(size, size, channels, features), "bias": draw(features)}


def flax_conv(layer):
    _, _, features, size, stride, _, scale = layer
    conv = nn.Conv(features, (size, size), (stride, stride), padding="VALID")
    return lambda params, x: conv.apply({"params": params}, x.astype(jnp.float32) * scale)


def our_conv(layer, method, channels_first=False):
    _, _, features, size, stride, _, scale = layer
    conv = Conv(features, size, stride, method, scale, channels_first)
    order = (0, 3, 1, 2) if channels_first else (0, 1, 2, 3)
    return lambda params, x: conv.apply({"params": params}, x.transpose(order))


def assert_close(a, b, tolerance=1e-5):
    """Relative to the largest entry: a sum that cancels has no digits of its own."""
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def output_and_grads(conv, params, x):
    """The gradients are those of a random linear function of the output."""

    def loss(params, x):
        y = conv(params, x)
        weights = jax.random.normal(jax.random.key(0), y.shape)
        return jnp.sum(weights * y), y

    argnums = (0,) if x.dtype == np.uint8 else (0, 1)
    grads, y = jax.grad(loss, argnums, has_aux=True)(params, x)
    return y, grads


@each_layer
def test_conv_and_its_gradients_equal_flax(layer):
    ways = itertools.product(("matmul", "xla"), (False, True))
    convs = [flax_conv(layer), *(our_conv(layer, *way) for way in ways)]
    everything = jax.jit(lambda params, x: [output_and_grads(conv, params, x) for conv in convs])
    reference, *ours = everything(random_params(layer), random_input(layer))
    for answer in ours:
        assert answer[0].dtype == np.float32
        jax.tree.map(assert_close, answer, reference)


def test_conv_as_matmul_by_hand():
    # 4x4 image of 0..15, kernel of ones, stride 2: sums of the four 2x2 blocks.
    # 0+1+4+5 = 10, 2+3+6+7 = 18, 8+9+12+13 = 42, 10+11+14+15 = 50
    x = jnp.arange(16, dtype=jnp.float32).reshape(1, 4, 4, 1)
    y = conv_as_matmul(x, jnp.ones((2, 2, 1, 1)), stride=2)
    np.testing.assert_array_equal(y[0, :, :, 0], [[10, 18], [42, 50]])


def test_conv_as_matmul_has_no_flip():
    # A kernel that picks the pixel at row 0, column 1 of each window.
    x = jnp.arange(16, dtype=jnp.float32).reshape(1, 4, 4, 1)
    kernel = jnp.zeros((2, 2, 1, 1)).at[0, 1].set(1.0)
    np.testing.assert_array_equal(conv_as_matmul(x, kernel, 2)[0, :, :, 0], [[1, 3], [9, 11]])


def test_both_methods_and_flax_have_the_same_parameters():
    x = random_input(LAYERS["second"])
    convs = [nn.Conv(64, (4, 4), (2, 2)), Conv(64, 4, 2, "matmul"), Conv(64, 4, 2, "xla")]
    shapes = [jax.eval_shape(conv.init, jax.random.key(0), x) for conv in convs]
    assert shapes[0] == shapes[1] == shapes[2]


# ---------------------------------------------------------------------------------------------
# Policies

DISCRETE = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(4,))
MULTI = ActionSpace("multi_discrete", (2,), np.dtype(np.int32), nvec=(3, 2))
BOX = ActionSpace("box", (3,), np.dtype(np.float32))
SQRT2 = 2**0.5


def spec_of(action, shape=(5,), dtype=np.float32):
    return EnvSpec(ObsPart(shape, np.dtype(dtype)), action)


def policy_of(spec, env=None, **net):
    config = Config(env=EnvConfig(**(env or {})), net=NetConfig(**net))
    return make_policy(config, spec)


def image_policy(shape=(84, 84, 4), method="matmul"):
    return policy_of(spec_of(DISCRETE, shape, np.uint8), shared=True, conv=method)


def shapes_of(policy):
    return jax.eval_shape(policy.init, jax.random.key(0))


def params_of(policy):
    """Random numbers in every leaf, biases too; much faster than the orthogonal ones."""
    rng = np.random.default_rng(0)
    shapes = shapes_of(policy)
    return jax.tree.map(lambda s: 0.05 * rng.standard_normal(s.shape, np.float32), shapes)


def run(policy, params, obs, known=None):
    known = moments.init(obs.shape[1:]) if known is None else known
    first = np.zeros(len(obs), bool)
    apply = jax.jit(policy.apply)
    carry, dist_params, value = apply(variables_of(params, known), (), obs, first)
    assert carry == ()
    return np.asarray(dist_params), np.asarray(value)


def gain_error(kernel, gain):
    """Largest deviation of the smaller Gram matrix from gain^2 times the identity."""
    w = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    return np.abs(gram / gain**2 - np.eye(len(gram))).max()


def biases(params):
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [leaf for path, leaf in paths if path[-1].key == "bias"]


def assert_heads(params, hidden, dist_params, value, tolerance):
    policy_head, value_head = params["policy_head"], params["value_head"]
    assert_close(dist_params, hidden @ policy_head["kernel"] + policy_head["bias"], tolerance)
    assert_close(value, (hidden @ value_head["kernel"] + value_head["bias"])[:, 0], tolerance)


def test_orthogonal_gains_of_the_mlp():
    params = jax.jit(policy_of(spec_of(DISCRETE), hidden=(64, 32)).init)(jax.random.key(0))
    assert gain_error(params["policy_head"]["kernel"], 0.01) < 1e-4
    assert gain_error(params["value_head"]["kernel"], 1.0) < 1e-4
    for torso in ("actor_torso", "critic_torso"):
        kernels = [layer["kernel"] for layer in params[torso].values()]
        assert [k.shape for k in kernels] == [(5, 64), (64, 32)]
        assert all(gain_error(k, SQRT2) < 1e-4 for k in kernels)
    actor, critic = (params[name]["Dense_1"]["kernel"] for name in ("actor_torso", "critic_torso"))
    assert np.abs(actor - critic).max() > 0.1
    assert len(biases(params)) == 6
    assert all((b == 0).all() for b in biases(params))


def test_orthogonal_gains_of_the_nature_cnn():
    params = jax.jit(image_policy((44, 44, 4)).init)(jax.random.key(0))
    torso = [layer["kernel"] for layer in params["torso"].values()]
    assert [k.shape for k in torso] == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (256, 512)]
    assert all(gain_error(k, SQRT2) < 1e-4 for k in torso)
    assert gain_error(params["policy_head"]["kernel"], 0.01) < 1e-4
    assert gain_error(params["value_head"]["kernel"], 1.0) < 1e-4
    assert len(biases(params)) == 6
    assert all((b == 0).all() for b in biases(params))


def test_separate_and_shared_torsos():
    heads = {"policy_head", "value_head"}
    separate = shapes_of(policy_of(spec_of(DISCRETE), shared=False))
    shared = shapes_of(policy_of(spec_of(DISCRETE), shared=True))
    assert separate.keys() == heads | {"actor_torso", "critic_torso"}
    assert shared.keys() == heads | {"torso"}


def test_separate_torsos_answer_separately():
    policy, obs = policy_of(spec_of(DISCRETE)), np.ones((2, 5), np.float32)
    params = params_of(policy)
    dist_params, value = run(policy, params, obs)
    changed = params | {"critic_torso": jax.tree.map(lambda x: x + 1.0, params["critic_torso"])}
    new_dist_params, new_value = run(policy, changed, obs)
    np.testing.assert_array_equal(new_dist_params, dist_params)
    assert np.abs(new_value - value).max() > 1e-3


@pytest.mark.parametrize(
    ("action", "dist", "width"),
    [
        (DISCRETE, Categorical((4,), squeeze=True), 4),
        (MULTI, Categorical((3, 2), squeeze=False), 5),
        (BOX, DiagNormal(3), 6),
    ],
    ids=["discrete", "multi_discrete", "box"],
)
def test_shapes_of_the_answers(action, dist, width):
    policy = policy_of(spec_of(action))
    params = params_of(policy)
    dist_params, value = run(policy, params, np.ones((7, 5), np.float32))
    assert policy.dist == dist
    assert policy.initial_carry(7) == ()
    assert (dist_params.shape, dist_params.dtype) == ((7, width), np.float32)
    assert (value.shape, value.dtype) == ((7,), np.float32)


def test_observations_of_any_shape_are_flattened_for_the_mlp():
    policy = policy_of(spec_of(DISCRETE, (2, 3)))
    params = params_of(policy)
    obs = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    flat = policy_of(spec_of(DISCRETE, (6,)))
    jax.tree.map(
        np.testing.assert_array_equal,
        run(policy, params, obs),
        run(flat, params, obs.reshape(4, 6)),
    )


@pytest.mark.parametrize("init", [0.0, -0.5])
def test_log_std_starts_at_its_setting(init):
    policy = policy_of(spec_of(BOX), hidden=(), log_std_init=init)
    params = jax.jit(policy.init)(jax.random.key(0))
    np.testing.assert_array_equal(params["log_std"], np.full(3, init, np.float32))


def test_log_std_does_not_depend_on_the_observation():
    policy = policy_of(spec_of(BOX))
    params = params_of(policy)
    obs = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    dist_params, _ = run(policy, params, obs)
    np.testing.assert_array_equal(dist_params[:, 3:], np.tile(params["log_std"], (4, 1)))
    assert np.ptp(dist_params[:, :3], axis=0).min() > 0


def test_only_continuous_actions_have_a_log_std():
    assert "log_std" not in shapes_of(policy_of(spec_of(DISCRETE)))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_mlp_by_numpy(activation):
    policy = policy_of(spec_of(DISCRETE), hidden=(8,), shared=True, activation=activation)
    params = jax.tree.map(np.asarray, jax.jit(policy.init)(jax.random.key(0)))
    obs = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    layer = params["torso"]["Dense_0"]
    hidden = obs @ layer["kernel"] + layer["bias"]
    hidden = np.tanh(hidden) if activation == "tanh" else np.maximum(hidden, 0)
    dist_params, value = run(policy, params, obs)
    assert_heads(params, hidden, dist_params, value, 1e-5)


# ---------------------------------------------------------------------------------------------
# Observation moments


KNOWN = Moments(jnp.float32(4), jnp.float32([1, 2, 3, 4, 5]), jnp.float32([4, 16, 36, 64, 1]))


def test_normalisation_uses_the_moments_in_the_variables():
    policy = policy_of(spec_of(DISCRETE), env={"normalize_obs": True, "obs_clip": 2.0})
    plain = policy_of(spec_of(DISCRETE))
    params = params_of(policy)
    obs = np.asarray(np.random.default_rng(0).normal(3, 5, (20, 5)), np.float32)
    std = np.asarray([1, 2, 3, 4, 0.5], np.float32)  # m2 / count is 1, 4, 9, 16, 0.25
    scaled = np.clip((obs - np.asarray([1, 2, 3, 4, 5], np.float32)) / std, -2, 2)
    assert (np.abs(scaled) == 2).any()
    for ours, reference in zip(
        run(policy, params, obs, KNOWN), run(plain, params, scaled), strict=True
    ):
        assert_close(ours, reference)


def test_moments_are_ignored_without_normalisation():
    policy = policy_of(spec_of(DISCRETE))
    params = params_of(policy)
    obs = np.ones((3, 5), np.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        run(policy, params, obs, KNOWN),
        run(policy, params, obs, moments.init((0,))),
    )


# ---------------------------------------------------------------------------------------------
# Images


def images(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (2, 84, 84, 4), np.uint8)


def test_channels_first_and_last_give_the_same_answer():
    last, first = image_policy((84, 84, 4)), image_policy((4, 84, 84))
    assert shapes_of(last) == shapes_of(first)
    params, obs = params_of(last), images()
    outputs = run(last, params, obs)
    assert np.abs(outputs[1]).min() > 0
    transposed = run(first, params, obs.transpose(0, 3, 1, 2))
    # Not the same bits: the first layer adds the pixels of a patch up in another order.
    jax.tree.map(assert_close, outputs, transposed)


@pytest.mark.parametrize("method", ["matmul", "xla"])
def test_nature_cnn_equals_plain_flax(method):
    policy, x = image_policy(method=method), images().astype(np.float32) / 255
    params = params_of(policy)
    torso = params["torso"]
    for i, (features, size, stride) in enumerate([(32, 8, 4), (64, 4, 2), (64, 3, 1)]):
        conv = nn.Conv(features, (size, size), (stride, stride), padding="VALID")
        x = nn.relu(jnp.asarray(conv.apply({"params": torso[f"Conv_{i}"]}, x)))
    x = nn.relu(x.reshape(2, -1) @ torso["wide"]["kernel"] + torso["wide"]["bias"])
    dist_params, value = run(policy, params, images())
    assert_heads(params, x, dist_params, value, 1e-4)


def test_nature_cnn_needs_images():
    with pytest.raises(ValueError, match=r"nature_cnn needs images.*--net\.torso mlp"):
        policy_of(spec_of(DISCRETE), torso="nature_cnn")

"""Who sees what of an observation, which encoder gets it, and what the log says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig
from spmdrl.envs.observations import make_reader
from spmdrl.nets import make_policy, moments
from spmdrl.nets.describe import describe
from spmdrl.nets.policy import variables_of
from spmdrl.nets.torsos import one_hot, planes
from spmdrl.types import EnvSpec

Box, Discrete, Dict = gym.spaces.Box, gym.spaces.Discrete, gym.spaces.Dict
MiniGrid = Dict(
    direction=Discrete(4),
    image=Box(0, 255, (7, 7, 3), np.uint8),
    mission=Box(0, 255, (512,), np.uint8),
)
ROBOT = Dict(
    arm=Dict(joints=Box(-1, 1, (3,)), speed=Box(-9, 9, (2,))),
    camera=Box(0, 255, (12, 12, 3), np.uint8),
    privileged_state=Box(-1, 1, (5,)),
    touch=Box(0, 1, (1,)),
)


def spec_of(space: Any, env_id: str = "Some-v0") -> EnvSpec:
    return make_reader(space, Discrete(3), env_id).spec


def config_of(env_id: str = "Some-v0", normalize: bool = False, **net: Any) -> Config:
    env = EnvConfig(id=env_id, normalize_obs=normalize)
    return Config(env=env, net=NetConfig(hidden=(8,), **net))


def answers(config: Config, spec: EnvSpec, obs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits and values by random parameters, of which none is zero."""
    policy = make_policy(config, spec)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: 0.3 * rng.standard_normal(s.shape, np.float32), shapes)
    variables = variables_of(params, moments.of_observations(True, spec))
    rows = jax.tree.leaves(obs)[0].shape[0]
    _, logits, value = policy.apply(variables, (), obs, jnp.zeros(rows, bool))
    return np.asarray(logits), np.asarray(value)


def sees(config: Config, spec: EnvSpec, part: str, column: int = 0) -> tuple[bool, bool]:
    """Whether policy and value change with one number of the observation."""
    obs: Any = spec.zeros(2)
    (obs if part == "" else obs[part])[1, ..., column] = 1
    logits, value = answers(config, spec, jax.tree.map(jnp.asarray, obs))
    return not np.array_equal(logits[0], logits[1]), value[0] != value[1]


# Columns of the robot's vector: joints 0-2, speed 3-4, privileged 5-9, touch 10.
BOTH, POLICY, VALUE, NONE = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("net", "expected"),
    [
        ({}, {0: BOTH, 3: BOTH, 5: VALUE, 9: VALUE, 10: BOTH}),
        ({"policy_keys": ("arm/joints", "touch")}, {0: BOTH, 3: VALUE, 5: VALUE, 10: BOTH}),
        ({"policy_keys": ("arm.speed",)}, {2: VALUE, 3: BOTH, 4: BOTH, 5: VALUE, 10: VALUE}),
        ({"policy_keys": ("arm", "privileged_state")}, {0: BOTH, 4: BOTH, 5: BOTH, 10: VALUE}),
        ({"value_keys": ("touch", "camera")}, {0: POLICY, 4: POLICY, 5: NONE, 10: BOTH}),
    ],
)
def test_keys_choose_columns_of_the_joined_vector(net, expected, normalize):
    spec, config = spec_of(ROBOT), config_of(normalize=normalize, **net)
    assert {c: sees(config, spec, "vector", c) for c in expected} == expected


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        ({}, BOTH),
        ({"policy_keys": ("arm",)}, VALUE),
        ({"value_keys": ("arm",)}, POLICY),
        ({"policy_keys": ("camera",), "value_keys": ("camera",)}, BOTH),
    ],
)
def test_keys_choose_images_as_well(net, expected):
    assert sees(config_of(**net), spec_of(ROBOT), "camera") == expected


def test_a_single_vector_can_be_divided_too():
    spec = spec_of(Dict(privileged_state=Box(-1, 1, (2,)), state=Box(-1, 1, (3,))))
    config = config_of()
    assert [sees(config, spec, "", i) for i in range(5)] == [VALUE] * 2 + [BOTH] * 3


def test_without_keys_the_parameters_are_those_of_the_whole_observation():
    spec = spec_of(Dict(a=Box(-1, 1, (2,)), b=Box(-1, 1, (3,))))
    shapes = jax.eval_shape(make_policy(config_of(), spec).init, jax.random.key(0))
    for torso in ("actor_torso", "critic_torso"):
        assert shapes[torso]["Dense_0"]["kernel"].shape == (5, 8)


@pytest.mark.parametrize(
    ("net", "says"),
    [
        ({"policy_keys": ("arm/jonts",)}, r"policy_keys has 'arm.jonts'.*mean arm.joints\?"),
        ({"value_keys": ("image",)}, r"value_keys has 'image'.*it shows .*camera"),
        ({"shared": True}, "net.shared needs the same .* privileged_state; use --net.no-shared"),
        ({"symbols": ("camra=3",)}, r"symbols has 'camra=3'.*did you mean camera\?"),
        ({"symbols": ("camera=3,4",)}, "has 3 channels there; give one count, or 3"),
        ({"symbols": ("camera",)}, "must be NAME=COUNT"),
        ({"symbols": ("camera=1",)}, "at least 2"),
        ({"symbols": ("camera=4,x,5",)}, "must be NAME=COUNT"),
    ],
)
def test_bad_keys_are_answered_with_the_remedy(net, says):
    with pytest.raises(ConfigError, match=says):
        make_policy(config_of(**net), spec_of(ROBOT))


def test_shared_works_where_both_see_the_same():
    keys = ("arm", "camera")
    config = config_of(shared=True, policy_keys=keys, value_keys=keys)
    assert sees(config, spec_of(ROBOT), "vector", 0) == BOTH
    assert sees(config, spec_of(ROBOT), "vector", 5) == NONE


# ---------------------------------------------------------------------------------------------
# Ids and symbols


def test_one_hot_by_hand():
    np.testing.assert_array_equal(one_hot(jnp.array([[0, 2]]), (3,)), [[1, 0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(one_hot(jnp.array([[1, 2]]), (2, 3)), [[1, 0, 0, 1]])
    np.testing.assert_array_equal(one_hot(jnp.array([[1, 0]]), (2,)), [[1, 0]])
    np.testing.assert_array_equal(one_hot(jnp.array([[7]]), (3,)), [[0, 0, 0]])


def test_one_hot_stays_float32_under_x64():
    with jax.enable_x64(True):
        assert one_hot(jnp.array([[0, 1]]), (3,)).dtype == jnp.float32


@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_planes_have_the_cell_where_it_was(first):
    grid = np.zeros((1, 5, 5, 2), np.uint8)
    grid[0, 1, 3] = (2, 4)
    given = grid.transpose(0, 3, 1, 2) if first else grid
    found = np.asarray(planes(jnp.asarray(given), (3, 6)))
    assert found.shape == (1, 5, 5, 9)
    assert np.flatnonzero(found[0, 1, 3]).tolist() == [2, 3 + 4]
    assert np.flatnonzero(found[0, 0, 0]).tolist() == [0, 3]


def test_the_symbols_of_minigrid_are_known_and_its_text_is_not_seen():
    spec = spec_of(MiniGrid, "MiniGrid-Empty-5x5-v0")
    image = spec.parts["image"]
    assert (image.kind, image.values, image.dtype) == ("ids", (11, 6, 4), np.uint8)
    assert spec.left_out == ("mission",)
    shapes = jax.eval_shape(make_policy(config_of(), spec).init, jax.random.key(0))
    assert shapes["actor_torso"]["image"]["Conv_0"]["kernel"].shape == (3, 3, 11 + 6 + 4, 16)
    assert shapes["actor_torso"]["vector"]["Dense_0"]["kernel"].shape == (4, 8)


def test_symbols_of_other_images_can_be_given():
    config = config_of(symbols=("camera=4",))
    shapes = jax.eval_shape(make_policy(config, spec_of(ROBOT)).init, jax.random.key(0))
    assert shapes["actor_torso"]["camera"]["Conv_0"]["kernel"].shape[2] == 3 * 4
    single = EnvSpec(spec_of(ROBOT).parts["camera"], spec_of(ROBOT).action)
    config = config_of(symbols=("obs=4,5,6",))
    shapes = jax.eval_shape(make_policy(config, single).init, jax.random.key(0))
    assert shapes["actor_torso"]["Conv_0"]["kernel"].shape[2] == 4 + 5 + 6


@pytest.mark.parametrize(
    ("space", "torso", "kernel"),
    [
        (Box(0, 9, (9, 9), np.int32), "auto", ("Conv_0", (3, 3, 10, 16))),
        (Box(0, 5, (6, 3, 3), np.int32), "auto", ("Conv_0", (2, 2, 36, 16))),
        (gym.spaces.MultiBinary((4, 4, 31)), "auto", ("Conv_0", (2, 2, 31, 16))),
        (Box(0, 9, (9, 9), np.int32), "mlp", ("mlp/Dense_0", (810, 8))),
        (gym.spaces.MultiDiscrete([3, 4]), "auto", ("mlp/Dense_0", (7, 8))),
        (gym.spaces.MultiDiscrete([3, 400]), "auto", ("Embed_0", (403, 16))),
        (Box(0.0, 1.0, (12, 12, 5)), "auto", ("Conv_0", (3, 3, 5, 16))),
        (Box(0, 255, (40, 40), np.uint8), "auto", ("Conv_0", (8, 8, 1, 32))),
    ],
    ids=str,
)
def test_every_kind_gets_the_encoder_that_fits(space, torso, kernel):
    spec = spec_of(space)
    policy = make_policy(config_of(torso=torso), spec)
    shapes: Any = jax.eval_shape(policy.init, jax.random.key(0))["actor_torso"]
    path, shape = kernel
    for name in path.split("/"):
        shapes = shapes[name]
    assert next(x for k, x in shapes.items() if k != "bias").shape == shape
    assert sees(config_of(torso=torso), spec, "") == BOTH


def test_each_of_several_ids_has_its_own_vectors():
    spec = spec_of(gym.spaces.MultiDiscrete([100, 100]))
    obs = jnp.array([[1, 2], [2, 1]], spec.parts[""].dtype)
    logits, _ = answers(config_of(), spec, obs)
    assert not np.allclose(logits[0], logits[1])


def test_normalising_ids_is_refused():
    config = replace(config_of(), env=EnvConfig(id="Some-v0", normalize_obs=True))
    with pytest.raises(ConfigError, match="normalize_obs is for vectors; Some-v0 gives ids"):
        make_policy(config, spec_of(gym.spaces.MultiDiscrete([3, 4])))


# ---------------------------------------------------------------------------------------------
# The log line


@pytest.mark.parametrize(
    ("space", "env_id", "line"),
    [
        (
            MiniGrid,
            "MiniGrid-Empty-5x5-v0",
            "image 7x7x3 -> small CNN on one-hot symbols; direction -> one-hot 4; "
            "mission -> left out",
        ),
        (
            ROBOT,
            "x",
            "camera 12x12x3 -> small CNN; arm.joints, arm.speed -> numbers; "
            "privileged_state -> numbers (value only); touch -> numbers",
        ),
        (Box(-1, 1, (4,)), "x", "4 numbers -> MLP"),
        (Box(0, 255, (84, 84, 4), np.uint8), "x", "image 84x84x4 -> Nature CNN"),
        (gym.spaces.MultiDiscrete([3, 400]), "x", "ids 2 -> MLP on embeddings of 16"),
        (
            Dict(board=gym.spaces.MultiBinary((4, 4, 31)), action_mask=gym.spaces.MultiBinary(3)),
            "x",
            "board 4x4x31 -> small CNN on 0/1 planes; action_mask -> mask of 3 actions",
        ),
        (
            Dict(step_count=Discrete(121), x=Box(0, 5, (3,), np.int32)),
            "x",
            "x 3 -> MLP on one-hot; step_count -> number / 120",
        ),
    ],
)
def test_the_log_says_what_the_networks_see(space, env_id, line):
    assert describe(config_of(env_id), spec_of(space, env_id)) == line

"""What a policy chooses for every kind of action space, and how masks fit it."""

from __future__ import annotations

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.config import ConfigError
from spmdrl.envs.actions import action_space, check_actions, to_env_action

Box = gym.spaces.Box


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("space", "nvec", "choice", "sent"),
    [
        (Box(0, 5, (2,), np.int32), (6, 6), [0, 5], [0, 5]),
        (Box(np.array([-1, 2]), np.array([1, 9]), dtype=np.int16), (3, 8), [0, 7], [-1, 9]),
        (Box(1, 2, (2, 2), np.int64), (2, 2, 2, 2), [0, 1, 1, 0], [[1, 2], [2, 1]]),
        (gym.spaces.MultiBinary(3), (2, 2, 2), [1, 0, 1], [1, 0, 1]),
        (gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 3, 4, 5), [1, 2, 3, 4], [[1, 2], [3, 4]]),
    ],
    ids=str,
)
def test_integers_of_any_form_are_choices(space, nvec, choice, sent, xp):
    ours = action_space(space, "Some-v0", dtype=np.int32)
    assert (ours.kind, ours.nvec, ours.shape) == ("multi_discrete", nvec, (len(nvec),))
    found = np.asarray(to_env_action(ours, xp.asarray([choice], np.int32), xp))
    np.testing.assert_array_equal(found, [sent])
    check_actions(ours, 1, found)
    assert space.contains(found[0].astype(space.dtype))


def test_the_environments_type_of_action_is_kept():
    assert action_space(Box(0, 20, (2,), np.int16), "x").dtype == np.int16
    assert action_space(gym.spaces.Discrete(3), "x", dtype=np.float64).dtype == np.float64
    sent = to_env_action(
        action_space(gym.spaces.Discrete(3), "x", (), np.float64), np.array([2]), np
    )
    assert (sent.dtype, sent.tolist()) == (np.float64, [2.0])


def test_integers_without_useful_bounds_are_refused():
    with pytest.raises(ConfigError, match="range of 4294967296, and 4096 is the most"):
        action_space(Box(-(2**31), 2**31 - 1, (2,), np.int32), "Some-v0")


@pytest.mark.parametrize(
    "space", [gym.spaces.Dict(a=gym.spaces.Discrete(2)), gym.spaces.Tuple([gym.spaces.Discrete(2)])]
)
def test_other_actions_are_refused(space):
    with pytest.raises(ConfigError, match=r"Some-v0 has actions .* a wrapper"):
        action_space(space, "Some-v0")


@pytest.mark.parametrize(
    ("low", "high", "clipped"),
    [
        (-1.0, 1.0, [-1.0, 1.0]),
        (2.2e-308, 1.7e308, [-5.0, 5.0]),  # the smallest positive number, meant as the lowest
        (-1.7e308, 1.7e308, [-5.0, 5.0]),
        (0.0, 1.7e308, [0.0, 5.0]),
        (1e-38, 1.0, [1e-38, 1.0]),  # a true upper bound: the lower one may be true as well
    ],
)
def test_bounds_that_nobody_meant_do_not_clip(low, high, clipped):
    ours = action_space(Box(low, high, (2,), np.float64), "Some-v0")
    sent = to_env_action(ours, np.array([[-5.0, 5.0]]), np)
    np.testing.assert_array_equal(sent, [clipped])
    check_actions(ours, 1, sent)


# ---------------------------------------------------------------------------------------------
# Masks


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (gym.spaces.Discrete(4), (4,)),
        (gym.spaces.MultiDiscrete([3, 2]), (5,)),
        (Box(0, 5, (2,), np.int32), (2, 6)),  # agents, and the choices of each
        (Box(0, 20, (10,), np.int32), (10, 21)),
    ],
    ids=str,
)
def test_a_mask_with_an_entry_for_each_choice_leaves_the_actions_alone(space, mask):
    with_mask, without = action_space(space, "x", mask), action_space(space, "x")
    assert (with_mask.kind, with_mask.nvec) == (without.kind, without.nvec)
    assert sum(with_mask.nvec) == np.prod(mask)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_a_mask_over_combinations_makes_them_one_choice(xp):
    space = Box(np.array([0, 5, 0]), np.array([3, 6, 2]), dtype=np.int32)
    ours = action_space(space, "Some-v0", (4, 2, 3))
    assert (ours.kind, ours.nvec, ours.shape, ours.joint) == ("discrete", (24,), (), (4, 2, 3))
    everything = np.asarray(to_env_action(ours, xp.arange(24), xp))
    check_actions(ours, 24, everything)
    mask = np.zeros((4, 2, 3), bool)
    mask[2, 1, 0] = True
    allowed = everything[np.flatnonzero(mask)[0]]
    np.testing.assert_array_equal(allowed, [2, 6, 0])
    assert len(np.unique(everything, axis=0)) == 24
    with pytest.raises(ValueError, match="outside of"):
        check_actions(ours, 1, np.array([[4, 5, 0]], np.int32))


@pytest.mark.parametrize(
    ("space", "mask", "says"),
    [
        (gym.spaces.Discrete(4), (5,), r"mask of shape \(5,\) for actions of \(4,\) choices"),
        (gym.spaces.MultiDiscrete([3, 2]), (2, 3), "it must have 5 entries, or the shape"),
        (gym.spaces.MultiDiscrete([300, 200]), (300, 200), "60000 combinations"),
        (Box(-1.0, 1.0, (4,)), (4,), "actions are not choices"),
    ],
    ids=str,
)
def test_a_mask_that_does_not_fit_is_refused(space, mask, says):
    with pytest.raises(ConfigError, match=says):
        action_space(space, "Some-v0", mask)

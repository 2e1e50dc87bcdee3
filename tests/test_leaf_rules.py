"""What is made of every kind of leaf, by its space and its name; one row of the documented table
each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.config import ConfigError
from spmdrl.envs.leaf_rules import leaf_of

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
MultiBinary, MultiDiscrete = gym.spaces.MultiBinary, gym.spaces.MultiDiscrete
MAX, MIN = np.iinfo(np.int32).max, np.iinfo(np.int32).min


class Mission(gym.Space[Any]):
    """A text of MiniGrid's own class."""


@dataclass(frozen=True)
class Row:
    """A leaf, and the part that it must become."""

    name: str
    space: Any
    kind: str
    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, ...] = ()
    role: str = "part"


def row(name: str, space: Any, kind: str, shape: Any, dtype: str, values: Any = ()) -> Row:
    role = "numbers" if kind == "vector" else "mask" if kind == "mask" else "part"
    return Row(name, space, kind, shape, dtype, values, role)


def floats(low: float, high: float, *shape: int) -> Any:
    return Box(low, high, shape, np.float32)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Any:
    return Box(low, high, shape, dtype)


def pixels(*shape: int) -> Any:
    return ints(0, 255, *shape, dtype=np.uint8)


ROWS = {
    "floats": row("x", floats(-1, 1, 3), "vector", (3,), "float32"),
    "one float": row("x", floats(-1, 1), "vector", (1,), "float32"),
    "a small table": row("", floats(-9, 9, 5, 5), "vector", (5, 5), "float32"),
    "bytes, a picture": row("x", pixels(84, 84, 3), "image", (84, 84, 3), "uint8"),
    "bytes, one plane": row("x", pixels(16, 12), "image", (16, 12, 1), "uint8"),
    "bytes, a small table": row("x", pixels(7, 12), "vector", (7, 12), "float32"),
    "bytes in a row": row("ram", pixels(128), "vector", (128,), "float32"),
    "stacked pictures": row("", pixels(4, 20, 30, 3), "image", (20, 30, 12), "uint8"),
    "stacked, channels first": row("", pixels(4, 3, 20, 30), "image", (12, 20, 30), "uint8"),
    "floats, a picture": row("x", floats(0, 1, 12, 12, 5), "image", (12, 12, 5), "float32"),
    "floats, one plane": row("x", floats(0, 1, 16, 16), "image", (16, 16, 1), "float32"),
    "floats, no bounds": row("x", floats(-np.inf, 1, 16, 16), "vector", (16, 16), "float32"),
    "floats, no real bounds": row(
        "x", floats(-3e38, 3e38, 12, 12, 5), "vector", (12, 12, 5), "float32"
    ),
    "few integers": row("x", ints(-1, 9, 4), "ids", (4,), "uint8", (11,)),
    "various integers": row(
        "x", Box(np.array([0, 1]), np.array([3, 2]), dtype=np.int64), "ids", (2,), "uint8", (4, 2)
    ),
    "a board": row("x", ints(-1, 9, 9, 9), "ids", (9, 9), "uint8", (11,)),
    "a byte board": row("x", ints(0, 4, 9, 9, 2, dtype=np.uint8), "ids", (9, 9, 2), "uint8", (5,)),
    "amounts": row("x", ints(0, 60, 21), "vector", (21,), "float32"),
    "integers, no bounds": row("x", ints(MIN, MAX, 4, 4), "vector", (4, 4), "float32"),
    "choices": row("x", MultiDiscrete([3, 500]), "ids", (2,), "int32", (3, 500)),
    "choices in a table": row("x", MultiDiscrete([[3, 5], [2, 2]]), "ids", (2, 2), "uint8", (5,)),
    "bits": row("x", MultiBinary(4), "vector", (4,), "float32"),
    "a table of bits": row("x", MultiBinary((20, 20)), "vector", (20, 20), "float32"),
    "planes of bits": row("x", MultiBinary((4, 4, 31)), "ids", (4, 4, 31), "uint8", (2,)),
    "bool box": row("x", Box(0, 1, (3,), bool), "vector", (3,), "float32"),
    "a choice": row("x", Discrete(4), "vector", (4,), "float32"),
    "a choice of many": row("x", Discrete(500), "ids", (1,), "int32", (500,)),
    "the only choice": row("", Discrete(500), "vector", (500,), "float32"),
    "a counter": row("step_count", Discrete(121), "vector", (1,), "float32"),
    "a large number": row("x", Discrete(10**6), "vector", (1,), "float32"),
    "a mask": row("a/action_mask", MultiBinary((3, 4)), "mask", (12,), "bool"),
    "a mask of bytes": row("action_mask", ints(0, 1, 4, dtype=np.int8), "mask", (4,), "bool"),
    "something of that name": row("action_mask", floats(-1, 1, 4), "vector", (4,), "float32"),
    "a number called mission": row("mission", Discrete(4), "vector", (4,), "float32"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_leaf_is_read_as_what_it_is(name):
    expected = ROWS[name]
    leaf = leaf_of(expected.name, expected.space, "Some-v0")
    part = leaf.part
    found = (leaf.role, part.kind, part.shape, str(part.dtype), part.values)
    wanted = (expected.role, expected.kind, expected.shape, expected.dtype, expected.values)
    assert found == wanted


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_read_has_the_declared_shape_and_type_and_range(name, xp):
    space = ROWS[name].space
    leaf = leaf_of(ROWS[name].name, space, "Some-v0")
    space.seed(1)
    sample = np.stack([space.sample() for _ in range(3)])
    read = np.asarray(leaf.read(xp.asarray(sample), xp))
    assert read.shape == (3, *leaf.part.shape)
    assert read.dtype == leaf.part.dtype
    if leaf.part.kind == "ids":
        assert (read < np.asarray(leaf.part.values)).all()
    if leaf.part.kind == "image" and leaf.part.dtype == np.float32:
        assert 0 <= read.min() < 0.2
        assert 0.8 < read.max() <= 1


@pytest.mark.parametrize(
    ("name", "space", "shown", "read"),
    [
        ("x", ints(-1, 9, 2), [[-1, 9]], [[0, 10]]),
        ("x", ints(-1, 9, 2), [[-7, 99]], [[0, 10]]),  # outside of the declared range
        ("x", ints(100, 400, 2), [[100, 400]], [[0, 1]]),
        ("x", pixels(2), [[0, 255]], [[0, 1]]),
        ("x", Discrete(3, start=5), [6], [[0, 1, 0]]),
        ("steps", Discrete(101, start=0), [25], [[0.25]]),
        ("x", Discrete(101, start=7), [9], [[2]]),
        ("x", MultiDiscrete([3, 4], start=[1, 2]), [[3, 2]], [[2, 0]]),
        ("x", MultiBinary(2), [[True, False]], [[1, 0]]),
        ("action_mask", MultiBinary((2, 2)), [[[True, False], [False, True]]], [[1, 0, 0, 1]]),
    ],
)
def test_numbers_by_hand(name, space, shown, read):
    found = leaf_of(name, space, "Some-v0").read(np.asarray(shown), np)
    np.testing.assert_allclose(found, read, atol=1e-6)


def test_a_float_picture_is_scaled_by_its_bounds():
    leaf = leaf_of("x", floats(-2, 6, 5, 5, 2), "Some-v0")
    read = leaf.read(np.full((1, 5, 5, 2), 4.0), np)
    np.testing.assert_allclose(read, 0.75)


def test_stacked_pictures_keep_every_frame_in_its_channels():
    frames = np.arange(2 * 5 * 6 * 3).reshape(1, 2, 5, 6, 3).astype(np.uint8)
    read = leaf_of("", pixels(2, 5, 6, 3), "x").read(frames, np)
    np.testing.assert_array_equal(read[0, :, :, :3], frames[0, 0])
    np.testing.assert_array_equal(read[0, :, :, 3:], frames[0, 1])


@pytest.mark.parametrize("space", [pixels(512), gym.spaces.Text(20), Mission()], ids=str)
def test_text_is_left_out(space):
    assert leaf_of("mission", space, "x").role == "left out"


@pytest.mark.parametrize(
    "space", [gym.spaces.Sequence(Discrete(3)), Mission(), gym.spaces.Graph(Discrete(2), None)]
)
def test_what_no_rule_reads_is_refused_by_its_name(space):
    with pytest.raises(ConfigError, match=r"Some-v0 has observations .* at arm/x, which"):
        leaf_of("arm/x", space, "Some-v0")

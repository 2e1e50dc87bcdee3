"""Tests check the shapes in annotations, of the packages that pyproject.toml names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from spmdrl.acting.steps import accumulate
from spmdrl.algos.returns import gae
from spmdrl.learning.minibatches import permutations
from spmdrl.nets import moments
from tests.children import ROOT

ROWS = jnp.zeros((4, 3))
ENDS = jnp.zeros((4, 3), bool)
# A function of every package, and arguments of which only the last is wrong: it would be repeated
# without a word, or is of another type.
WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "spmdrl.acting": (accumulate, (jnp.zeros(3), ROWS, 0.9, ENDS[:, :1])),
    "spmdrl.algos": (gae, (ROWS, ROWS, ROWS, ROWS, jnp.zeros(1))),
    "spmdrl.learning": (permutations, (jnp.zeros((2, 5), jnp.int32),)),
    "spmdrl.nets": (moments.power_sums, (moments.init(()), ROWS, ENDS[:, :1])),
}


@pytest.mark.parametrize("package", WRONG)
def test_a_wrong_argument_is_refused(package):
    function, arguments = WRONG[package]
    with pytest.raises(TypeCheckError, match=rf"parameters of {package}\."):
        function(*arguments)


def test_every_package_of_the_list_is_tried():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    (listed,) = [word for word in options["addopts"] if word.startswith("--jaxtyping-packages=")]
    *packages, checker = listed.partition("=")[2].split(",")
    assert (set(packages), checker) == (set(WRONG), "beartype.beartype")

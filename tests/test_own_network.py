"""A network of the user's own: docs/own_network.md word for word, trust, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdrl
from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig, load, own_code
from spmdrl.nets import make_policy
from spmdrl.nets import policy as nets_policy
from spmdrl.nets.describe import describe
from spmdrl.nets.torsos import as_numbers
from spmdrl.parallel.platforms import likes
from spmdrl.runtime.consent import Consent, bring_code
from spmdrl.runtime.provenance import find_code, needs_code
from spmdrl.runtime.validate import check_extras, validate
from spmdrl.types import ActionSpace, EnvSpec, ObsPart
from tests.children import ROOT
from tests.own_commands import refuses, succeeds
from tests.pages import python_blocks, written

PAGE = (ROOT / "docs" / "own_network.md").read_text()
BLOCKS = python_blocks(PAGE)
SMALL = ("--total-steps", 256, "--env.num-envs", 4, "--algo.num-steps", 32, "--log.panel", "off")

NETWORKS = """
from flax import linen as nn


class Two(nn.Module):
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.hidden[0])(x.reshape(len(x), -1)))


def made(width=3):
    return nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(width)])


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(x)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]


class Pair(nn.Module):
    def __call__(self, x):
        return x, x


class Broken(nn.Module):
    def __call__(self, x):
        return x @ x


class Asking(nn.Module):
    depth: int

    def __call__(self, x):
        return x


number = 3
"""


@pytest.fixture
def networks(tmp_path, monkeypatch) -> Path:
    """The module `their_nets`, beside nothing but itself."""
    (tmp_path / "their_nets.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_nets", raising=False)
    return tmp_path


def policy_of(torso: str, obs: ObsPart | dict[str, ObsPart], **net):
    config = Config(net=NetConfig(torso=torso, hidden=(5,), **net))
    return make_policy(config, EnvSpec(obs=obs, action=DISCRETE)), config


DISCRETE = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(4,))
NUMBERS = ObsPart((4,), np.dtype(np.float32))
IMAGE = ObsPart((3, 12, 12), np.dtype(np.uint8))


def shapes(policy) -> dict:
    return jax.tree.map(lambda x: x.shape, jax.eval_shape(policy.init, jax.random.key(0)))


def test_it_stands_where_a_torso_would_and_is_given_what_it_asks_for(networks):
    policy, config = policy_of("their_nets:Two", NUMBERS)
    found = shapes(policy)
    assert found["actor_torso"] == {"Two_0": {"Dense_0": {"kernel": (4, 5), "bias": (5,)}}}
    assert found["critic_torso"] == found["actor_torso"]
    assert found["policy_head"]["kernel"][0] == 5
    spec = EnvSpec(obs=NUMBERS, action=DISCRETE)
    assert describe(config, spec) == "4 numbers -> their_nets:Two"


def test_a_function_serves_as_well(networks):
    policy, _ = policy_of("their_nets:made", NUMBERS, width=7, shared=True)
    assert shapes(policy)["torso"]["Dense_0"]["kernel"] == (4, 7)


def test_of_images_and_numbers_it_gets_the_images(networks):
    policy, _ = policy_of("their_nets:Two", {"camera": IMAGE, "vector": NUMBERS})
    found = shapes(policy)["actor_torso"]
    assert found["camera"]["Two_0"]["Dense_0"]["kernel"] == (3 * 12 * 12, 5)
    assert set(found["vector"]) == {"Dense_0"}


def test_of_numbers_beside_a_mask_it_gets_the_numbers(networks):
    mask = ObsPart((4,), np.dtype(bool), kind="mask")
    policy, _ = policy_of("their_nets:Two", {"vector": NUMBERS, "action_mask": mask})
    assert "Two_0" in shapes(policy)["actor_torso"]["vector"]


@pytest.mark.parametrize("core", ["none", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_long_sequence_of_images_gives_what_single_steps_give(networks, core, monkeypatch):
    few = dataclasses.replace(likes("cpu"), image_rows=2)
    monkeypatch.setattr(nets_policy, "likes", lambda platform: few)
    policy, _ = policy_of("their_nets:Two", IMAGE, core=core, core_size=3)
    params = policy.init(jax.random.key(1))
    variables = {"params": params, "obs_stats": {}}
    obs = jax.random.randint(jax.random.key(2), (4, 2, 3, 12, 12), 0, 255).astype(jnp.uint8)
    first = jnp.zeros((4, 2), bool)
    carry = policy.initial_carry(2)
    _, together, _ = policy.unroll(variables, carry, obs, first)
    steps = []
    for t in range(4):
        carry, out, _ = policy.apply(variables, carry, obs[t], first[t])
        steps.append(out)
    np.testing.assert_allclose(together, np.stack(steps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "shape", "values"),
    [
        (IMAGE, (2, 12, 12, 3), [1.0]),
        (ObsPart((12, 12, 3), np.dtype(np.uint8)), (2, 12, 12, 3), [1.0]),
        (NUMBERS, (2, 4), [255.0]),
        (ObsPart((5, 5), np.dtype(np.int8), kind="ids", values=(3,)), (2, 5, 5, 3), [0.0, 1.0]),
        (ObsPart((2,), np.dtype(np.int8), kind="ids", values=(3, 4)), (2, 7), [0.0, 1.0]),
        (ObsPart((2,), np.dtype(np.int16), kind="ids", values=(500,)), (2, 2), [1]),
    ],
)
def test_what_it_is_shown(part, shape, values):
    level = 1 if part.kind == "ids" else 255
    seen = as_numbers(part, jnp.full((2, *part.shape), level, part.dtype))
    assert seen.shape == shape
    assert sorted(set(np.asarray(seen).ravel().tolist())) == values
    assert seen.dtype == (np.int32 if part.values == (500,) else np.float32)


@pytest.mark.parametrize(
    ("torso", "said"),
    [
        ("their_nets:Normed", r"keeps batch_stats, .* LayerNorm in the place of BatchNorm"),
        ("their_nets:Dropped", r"failed on float32\[N, 4\], which CartPole-v1 gives: Inv.*their_"),
        ("their_nets:Flat", r"returns float32\[N\], but must return one array .*\[N, features\]"),
        ("their_nets:Pair", "returns a tuple, but must"),
        ("their_nets:Broken", r"failed on float32\[N, 4\].*TypeError.*their_nets\.py, line \d+"),
        ("their_nets:Asking", "Asking failed on .*missing 1 required .*'depth'"),
        ("their_nets:Tow", "their_nets has no Tow; did you mean Two"),
        ("their_nets:number", "is 3, but must be a class or a function"),
    ],
)
def test_what_cannot_be_a_torso_is_answered_in_one_line(networks, torso, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        policy_of(torso, NUMBERS)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("torso", "said"),
    [
        ("natur_cnn", "net.torso is 'natur_cnn', but must be auto, .*did you mean nature_cnn"),
        ("their nets:Two", "but must be auto, mlp, .* or package.module:Class"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(torso, said):
    with pytest.raises(ConfigError, match=said):
        validate(Config(net=NetConfig(torso=torso)))


def test_a_module_that_is_nowhere_is_refused_before_jax_is_loaded(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("from spmdrl.config import Config\nconfig = Config()\n")
    config = load([str(file), "--net.torso", "nowhere_at_all:Two"])
    with pytest.raises(ConfigError, match=r"no module nowhere_at_all; put nowhere_at_all\.py bes"):
        check_extras(config)


def test_a_config_file_is_not_executed_twice(tmp_path):
    file = tmp_path / "once_only.py"
    file.write_text("count = []\ncount.append(1)\nclass Net: pass\n")
    module = own_code.execute(file)
    assert own_code.find("once_only:Net", "net.torso") is module.Net
    assert "once_only" not in sys.modules


def test_a_strangers_network_is_not_imported_without_consent(networks, tmp_path):
    config = Config(net=NetConfig(torso="their_nets:Two"))
    assert needs_code(config)
    assert not needs_code(Config())
    with pytest.raises(ConfigError, match=r"the network 'their_nets:Two'; to import.*--trust"):
        bring_code(config, None, "runs/x", Consent(command="spmdrl evaluate runs/x"))
    assert "their_nets" not in sys.modules
    both = Config(net=config.net, env=EnvConfig(id="m:Env", backend="gymnasium"))
    with pytest.raises(ConfigError, match="environment 'm:Env' and the network 'their_nets:Two'"):
        bring_code(both, None, "runs/x", Consent())
    plain = tmp_path / "plain.py"
    plain.write_text("from spmdrl.config import Config\nconfig = Config()\n")
    with pytest.raises(ConfigError, match=r"which .*plain\.py does not name"):
        bring_code(config, None, "runs/x", Consent(config=str(plain)))
    assert "their_nets" in [source.name for source in find_code(config).modules]


# ---------------------------------------------------------------------------------------------
# The page


def test_every_block_of_python_on_the_page_is_a_file():
    assert PAGE.count("```python\n") == len(BLOCKS) == 3


@pytest.mark.slow
def test_the_page_word_for_word_on_two_ranks_and_on_one(tmp_path, monkeypatch):
    page = written(BLOCKS, tmp_path / "page")
    commands = re.findall(r"^python -m spmdrl\.(\w+) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "evaluate"]
    sizes = (*SMALL, "--env.num-envs", 8, "--sync.deterministic", "--sync.shards", 4)
    more = {"train": sizes, "evaluate": ("--episodes", 4)}
    said = [succeeds(name, *words.split(), *more[name], cwd=page) for name, words in commands]
    assert "4 numbers -> my_network:Residual" in said[0]
    run = page / "runs" / "residual"
    assert json.loads((run / "code.json").read_text())["needed"]
    assert json.loads((run / "eval.json").read_text())["episodes"] == 4
    succeeds("train", page / "my_network.py", *sizes, "--run-dir", "one", cwd=tmp_path)
    sums = [
        json.loads((folder / "summary.json").read_text())["params_sha256"]
        for folder in (run, tmp_path / "one")
    ]
    assert sums[0] == sums[1]
    assert "the network 'my_network:Residual' from" in refuses("evaluate", run, cwd=tmp_path)
    with pytest.raises(ConfigError, match=r"uses the network .*, trust=True\)"):
        spmdrl.load(run)
    monkeypatch.chdir(page)
    scope: dict[str, Any] = {}
    exec(BLOCKS["play.py"], scope)
    assert scope["policy"](np.zeros((3, 4), np.float32)).shape == (3,)


@pytest.mark.slow
def test_the_image_network_of_the_page_trains(tmp_path):
    page = written(BLOCKS, tmp_path / "page")
    short = (*SMALL, "--algo.num-steps", 16, "--algo.epochs", 1, "--total-steps", 64)
    said = succeeds("train", page / "my_frames.py", *short, "--run-dir", "run", cwd=tmp_path)
    assert "image 4x84x84 -> my_frames:Frames" in said

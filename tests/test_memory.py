"""Policies with memory: the network, and learning from sequences."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig
from spmdrl.envs.view import make_view
from spmdrl.nets import make_policy
from spmdrl.nets.policy import variables_of
from spmdrl.nets.torsos import ImpalaResnet
from spmdrl.runtime.validate import validate
from spmdrl.types import ActionSpace, EnvSpec, ObsPart

FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
VECTOR = EnvSpec(ObsPart((3,), FLOAT), ActionSpace("discrete", (), np.dtype(np.int32), nvec=(4,)))
FRAMES = EnvSpec(
    ObsPart((4, 84, 84), BYTE), ActionSpace("discrete", (), np.dtype(np.int32), nvec=(6,))
)
SMALL_FRAMES = dataclasses.replace(FRAMES, obs=ObsPart((12, 12, 3), BYTE))


def config_of(**net) -> Config:
    return Config(net=NetConfig(**net), algo=Ppo(num_steps=8, minibatches=2))


def made(shown: EnvSpec, **net):
    config = config_of(**net)
    spec = make_view(config, shown).spec
    policy = make_policy(config, spec)
    params = jax.jit(policy.init)(jax.random.key(0))
    return policy, variables_of(params, None), spec


def random_obs(spec: EnvSpec, *rows: int):
    rng = np.random.default_rng(3)

    def draw(part):
        if part.dtype == BYTE:
            return jnp.asarray(rng.integers(0, 256, (*rows, *part.shape)), jnp.uint8)
        return jnp.asarray(rng.normal(size=(*rows, *part.shape)), jnp.float32)

    if isinstance(spec.obs, ObsPart):
        return draw(spec.obs)
    return {name: draw(part) for name, part in spec.obs.items()}


def test_the_published_network_has_the_published_number_of_parameters():
    net = {"torso": "impala_resnet", "core": "lstm", "core_size": 256, "shared": True}
    config = config_of(**net, last_action=True, last_reward=True)
    policy = make_policy(config, make_view(config, FRAMES).spec)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_623_511


CASES: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "lstm": (VECTOR, {"core": "lstm", "core_size": 16}),
    "gru, shared": (VECTOR, {"core": "gru", "core_size": 16, "shared": True}),
    "history": (VECTOR, {"core": "lstm", "core_size": 8, "last_action": True, "last_reward": True}),
    "history alone": (VECTOR, {"last_action": True}),
    "pictures": (SMALL_FRAMES, {"core": "lstm", "core_size": 8, "shared": True}),
    "resnet": (SMALL_FRAMES, {"torso": "impala_resnet", "core": "gru", "core_size": 8}),
}


@pytest.mark.parametrize(
    "case", [*list(CASES)[:-1], pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_an_unroll_equals_its_steps_one_by_one(case):
    shown, net = CASES[case]
    policy, variables, spec = made(shown, **net)
    steps, envs = 8, 16
    obs = random_obs(spec, steps, envs)
    first = jnp.asarray(np.random.default_rng(1).random((steps, envs)) < 0.2)
    carry = policy.initial_carry(envs)
    after, dist_params, value = jax.jit(policy.unroll)(variables, carry, obs, first)
    apply = jax.jit(policy.apply)
    for t in range(steps):
        row = jax.tree.map(lambda x, t=t: x[t], obs)
        carry, one, v = apply(variables, carry, row, first[t])
        np.testing.assert_allclose(one, dist_params[t], atol=2e-5)
        np.testing.assert_allclose(v, value[t], atol=2e-5)
    for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_what_was_before_an_episode_does_not_matter():
    policy, variables, _ = made(VECTOR, core="lstm", core_size=16)
    obs = random_obs(VECTOR, 8)
    dirty = jax.tree.map(lambda x: x + 5.0, policy.initial_carry(8))
    first = jnp.ones(8, bool)
    clean = policy.apply(variables, policy.initial_carry(8), obs, first)
    found = policy.apply(variables, dirty, obs, first)
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert not np.array_equal(policy.apply(variables, dirty, obs, ~first)[1], clean[1])


class PlainResnet(nn.Module):
    """The same network of flax's own parts."""

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32) / 255
        for section, channels in enumerate((16, 32, 32)):
            conv = partial(nn.Conv, channels, (3, 3))
            x = conv(name=f"s{section}_conv")(x)
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for block in range(2):
                inner = x
                for layer in range(2):
                    inner = conv(name=f"s{section}_{block}_{layer}")(nn.relu(inner))
                x = x + inner
        x = nn.relu(x)
        return nn.relu(nn.Dense(256, name="dense")(x.reshape(x.shape[0], -1)))


def plainly_named(params):
    found = {"dense": params["dense"]}
    for section in range(3):
        inside = params[f"section_{section}"]
        found[f"s{section}_conv"] = inside["conv"]
        for block in range(2):
            for layer in range(2):
                name = f"s{section}_{block}_{layer}"
                found[name] = inside[f"block_{block}_conv_{layer}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 4], ids=["whole", "in chunks"])
@pytest.mark.parametrize("method", ["matmul", "xla"])
def test_the_resnet_equals_plain_convolutions_in_values_and_gradients(method, at_once):
    x = random_obs(SMALL_FRAMES, 8)
    ours, theirs = ImpalaResnet(method, at_once=at_once), PlainResnet()
    params = jax.jit(ours.init)(jax.random.key(0), x[:1])["params"]
    weights = jnp.sin(jnp.arange(8 * 256.0)).reshape(8, 256)

    def loss(apply, params):
        return jnp.sum(apply({"params": params}, x) * weights)

    def expected(params):
        return loss(theirs.apply, plainly_named(params))

    found, wanted = (
        jax.jit(jax.value_and_grad(f))(params) for f in (partial(loss, ours.apply), expected)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_truncated_gradients_end_at_the_borders():
    whole, cut = (made(VECTOR, core="lstm", core_size=8, bptt=n) for n in (0, 4))
    obs = random_obs(VECTOR, 8, 2)
    first = jnp.zeros((8, 2), bool)

    def last_value(policy, obs):
        variables = whole[1]
        return policy.unroll(variables, policy.initial_carry(2), obs, first)[2][-1].sum()

    reaches = [
        np.abs(jax.jit(jax.grad(partial(last_value, made[0])))(obs)).sum((1, 2)) > 0
        for made in (whole, cut)
    ]
    assert reaches[0].tolist() == [True] * 8
    assert reaches[1].tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ({"bptt": 3}, "net.bptt 3 does not divide algo.num_steps 8; nearest: 2, 4"),
        ({"core_size": 0}, "net.core_size is 0, but must be at least 1"),
        ({"width": 0}, "net.width is 0, but must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(net, message):
    with pytest.raises(ConfigError, match=message):
        validate(config_of(core="lstm", **({"core_size": 8} | net)))


def test_whole_environments_must_divide_among_the_minibatches():
    config = dataclasses.replace(
        config_of(core="lstm"), env=EnvConfig(num_envs=64), algo=Ppo(minibatches=3)
    )
    with pytest.raises(ConfigError, match=r"num_envs 64 is not divisible by algo.minibatches 3"):
        validate(config, size=2)

"""Networks with fewer digits: what they are allowed to touch, and what stays float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig
from spmdrl.nets import make_policy, moments
from spmdrl.nets.policy import variables_of
from spmdrl.runtime.build import build_trainer
from spmdrl.types import ActionSpace, EnvSpec, ObsPart

DISCRETE = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(4,))
VECTOR = ObsPart((5,), np.dtype(np.float32))
IMAGE = ObsPart((36, 36, 4), np.dtype(np.uint8))
IDS = ObsPart((3,), np.dtype(np.int32), kind="ids", values=(7,))
TORSOS = {
    "mlp": (VECTOR, NetConfig()),
    "two torsos": (VECTOR, NetConfig(shared=False, hidden=(16,))),
    "ids": (IDS, NetConfig()),
    "lstm": (VECTOR, NetConfig(core="lstm", core_size=8)),
    "nature": (IMAGE, NetConfig(torso="nature_cnn", shared=True)),
    "nature, xla": (IMAGE, NetConfig(torso="nature_cnn", shared=True, conv="xla")),
    "small": (IMAGE, NetConfig(torso="small_cnn", shared=True)),
    "resnet": (IMAGE, NetConfig(torso="impala_resnet", shared=True)),
}


def with_net(config, **net):
    return dataclasses.replace(config, net=dataclasses.replace(config.net, **net))


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


def equations(jaxpr, name):
    """All of that name, those inside of others too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, name)


def gradient_of(net, part):
    """Of a sum of squares of everything that the network answers."""
    policy = make_policy(Config(net=net), EnvSpec(part, DISCRETE))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params = jax.tree.map(lambda s: 0.1 * rng.standard_normal(s.shape, np.float32), shapes)
    obs = (
        rng.integers(0, 7, (6, *part.shape))
        if part.kind == "ids"
        else 100 * rng.random((6, *part.shape))
    )
    seen = jnp.asarray(obs.astype(part.dtype))

    def loss(params):
        carry, *answers = policy.apply(
            variables_of(params, moments.init(part.shape)), policy.initial_carry(6), seen,
            jnp.zeros(6, bool),
        )  # fmt: skip
        assert dtypes((carry, answers)) == {"float32"}
        return sum((x**2).sum() for x in answers)

    return loss, params


SLOW = {"resnet"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TORSOS]
)
def test_only_the_torsos_compute_in_bfloat16(name):
    part, net = TORSOS[name]
    few, many = dataclasses.replace(net, dtype="bfloat16"), net
    gradients = {}
    for chosen in (few, many):
        loss, params = gradient_of(chosen, part)
        assert dtypes(params) == {"float32"}
        gradients[chosen.dtype] = jax.jit(jax.grad(loss))(params)
        traced = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
        products = [*equations(traced, "dot_general"), *equations(traced, "conv_general_dilated")]
        rough = [e for e in products if e.invars[0].aval.dtype == jnp.bfloat16]
        heads = [e for e in products if e.invars[0].aval.dtype == jnp.float32]
        assert bool(rough) is (chosen is few)
        assert all(e.invars[1].aval.dtype == jnp.bfloat16 for e in rough)
        assert len(heads) >= 4  # policy and value, there and back
    assert dtypes(gradients) == {"float32"}
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in gradients.values()]
    difference = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
    assert 1e-5 < difference < 0.08  # bfloat16 has eight bits, and these networks up to 17 layers


CARTPOLE = Config(
    env=EnvConfig(id="CartPole-v1", num_envs=8),
    algo=Ppo(num_steps=16, epochs=2, minibatches=2),
)


@pytest.mark.slow
def test_an_update_in_bfloat16_keeps_its_state_in_float32():
    states = {}
    for dtype in ("float32", "bfloat16"):
        trainer = build_trainer(with_net(CARTPOLE, dtype=dtype))
        rollout, _ = trainer.collect()
        assert dtypes((rollout.log_prob, rollout.value)) == {"float32"}
        before = dtypes(trainer.state)
        report = trainer.learn(rollout)
        assert np.isfinite(list(report.metrics.values())).all()
        assert dtypes(trainer.state) == before == {"float32", "int32"}
        states[dtype] = jax.device_get(trainer.state.params)
    pairs = zip(*(jax.tree.leaves(s) for s in states.values()), strict=True)
    distances = [np.abs(a - b).max() for a, b in pairs]
    assert 0 < max(distances) < 5e-3  # four steps of the optimiser


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_every_product_of_an_update_has_the_precision_asked_for(precision):
    trainer = build_trainer(with_net(CARTPOLE, matmul_precision=precision))
    rollout, _ = trainer.collect()
    traced = jax.make_jaxpr(trainer.update)(trainer.state, rollout, trainer.update_key)
    found = {e.params["precision"] for e in equations(traced.jaxpr, "dot_general")}
    wanted = getattr(jax.lax.Precision, precision.upper())
    assert found == ({None} if precision == "default" else {(wanted, wanted)})


@pytest.mark.slow
def test_the_wide_layer_of_images_has_it_too():
    config = Config(
        env=EnvConfig(id="Pong-v5", num_envs=2),
        net=NetConfig(shared=True, conv="matmul", matmul_precision="highest"),
        algo=Ppo(num_steps=32, epochs=1, minibatches=1),
    )
    trainer = build_trainer(config)
    rollout, _ = trainer.collect()
    traced = jax.make_jaxpr(trainer.update)(trainer.state, rollout, trainer.update_key)
    products = list(equations(traced.jaxpr, "dot_general"))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert len(products) > 10
    assert {e.params["precision"] for e in products} == {highest}

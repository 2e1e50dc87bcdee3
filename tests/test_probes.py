"""Probe environments, whose values and best actions are known, learned by every algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Appo, Impala, Ppo
from spmdrl.config import AlgoConfig, Config, EnvConfig, NetConfig, OptimConfig
from spmdrl.nets.policy import variables_of
from spmdrl.runtime.build import build_trainer
from tests.a2c import A2c

GAMMA = 0.5


@dataclass(frozen=True)
class SequencePpo(Ppo):
    """PPO on minibatches of whole environments."""

    selects = "sequences"


ALGORITHMS: dict[str, AlgoConfig] = {
    "ppo": Ppo(gamma=GAMMA, epochs=4, minibatches=2, entropy_coef=0.0),
    "sequences": SequencePpo(gamma=GAMMA, epochs=4, minibatches=2, entropy_coef=0.0),
    "a2c": A2c(gamma=GAMMA, entropy_coef=0.0),
    "impala": Impala(gamma=GAMMA, minibatches=2, entropy_coef=0.0),
    "appo": Appo(gamma=GAMMA, epochs=4, minibatches=2, entropy_coef=0.0),
}
TWO_TORSOS = NetConfig(hidden=(16,))
VALUES = {
    "Constant": {0.0: 1.0},
    "Dependent": {-1.0: -1.0, 1.0: 1.0},
    "Discounting": {0.0: GAMMA, 1.0: 1.0},
    "Ending": {0.0: 1 + GAMMA + GAMMA**2, 1 / 3: 1 + GAMMA, 2 / 3: 1.0},
    "Limit": {0.0: 1 / (1 - GAMMA)},
}
ACTIONS = {"Action": {0.0: 1}, "Matching": {-1.0: 0, 1.0: 1}}


@pytest.fixture(scope="module", autouse=True)
def _programs_of_the_same_shape_compile_once(tmp_path_factory):
    """All probes have the same programs, so the first one's are found in jax's cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def learned(probe: str, algo: AlgoConfig, net: NetConfig) -> Any:
    """`(probability of action 1, value)` of an observation, after training."""
    updates = 60 if algo.epochs > 1 else 240  # one gradient each
    env_id = f"spmdrl.envs.probes:Probe{probe}-v0"
    config = Config(
        total_steps=16 * 24 * updates,
        env=EnvConfig(id=env_id, backend="gymnasium", num_envs=16),
        net=net,
        algo=replace(algo, num_steps=24),
        optim=OptimConfig(lr=1e-2, lr_schedule="linear"),
    )
    trainer = build_trainer(config)
    for _ in range(updates):
        report = trainer.learn(trainer.collect()[0])
        assert not report.nonfinite.any()
    trainer.collector.close()
    state, policy = jax.device_get(trainer.state), trainer.learner.policy

    def answer(seen: float) -> tuple[float, float]:
        variables = variables_of(state.params, state.obs_moments)
        _, logits, value = policy.apply(variables, (), jnp.float32([[seen]]), jnp.zeros(1, bool))
        return float(jax.nn.softmax(logits)[0, 1]), float(value[0])

    return answer


def check(probe: str, answer: Any) -> None:
    for seen, value in VALUES.get(probe, {}).items():
        np.testing.assert_allclose(answer(seen)[1], value, atol=0.12, err_msg=f"value of {seen}")
    for seen, action in ACTIONS.get(probe, {}).items():
        probability = answer(seen)[0] if action == 1 else 1 - answer(seen)[0]
        assert probability > 0.9, f"seen {seen}, wanted {action}, probability {probability}"


# Seconds each, and many: `uv run pytest` tries some of PPO's, `-m slow` all others.
FIRST = ("ppo", ("Constant", "Action", "Limit"))


def cases() -> Iterator[Any]:
    for algo, probe in itertools.product(ALGORITHMS, [*VALUES, *ACTIONS]):
        is_first = algo == FIRST[0] and probe in FIRST[1]
        yield pytest.param(algo, probe, marks=() if is_first else pytest.mark.slow)


@pytest.mark.parametrize(("algo", "probe"), list(cases()))
def test_what_is_known_is_learned(algo, probe):
    check(probe, learned(probe, ALGORITHMS[algo], TWO_TORSOS))


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["Discounting", "Matching"])
def test_one_torso_learns_it_too(probe):
    check(probe, learned(probe, ALGORITHMS["ppo"], replace(TWO_TORSOS, shared=True)))


@pytest.mark.slow
def test_without_memory_the_second_step_is_a_coin():
    """Whatever it does there is right for one cue and wrong for the other."""
    answer = learned("Memory", ALGORITHMS["ppo"], TWO_TORSOS)
    assert answer(-1.0)[1] + answer(1.0)[1] == pytest.approx(0.0, abs=0.2)


@pytest.mark.slow
def test_the_probes_can_fail():
    """A wrong discount is seen by the probe that is there for it, and by no other."""
    wrong = replace(ALGORITHMS["ppo"], gamma=0.9)
    check("Dependent", learned("Dependent", wrong, TWO_TORSOS))
    with pytest.raises(AssertionError, match="value of 0"):
        check("Discounting", learned("Discounting", wrong, TWO_TORSOS))

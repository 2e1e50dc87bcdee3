"""What a policy sees of its environments: entries, frames, its last action and reward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig
from spmdrl.envs import make_env
from spmdrl.envs.view import make_view
from spmdrl.types import ActionSpace, EnvSpec, ObsPart, TimeStep

FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
CHOICES = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(3,))
CARTPOLE = Config(env=EnvConfig(id="CartPole-v1", num_envs=8), algo=Ppo(num_steps=64))


def with_(config, net=None, **env):
    net = NetConfig(**(net or {}))
    return dataclasses.replace(config, env=dataclasses.replace(config.env, **env), net=net)


def answer(obs, reward=0.0, over=False):
    flag = np.array([over])
    return TimeStep(obs, np.array([reward], np.float32), flag, np.zeros(1, bool), flag)


def test_without_any_option_everything_stays_as_it_is():
    shown = EnvSpec(ObsPart((4,), FLOAT), CHOICES)
    assert make_view(CARTPOLE, shown).is_plain
    assert make_view(CARTPOLE, shown).spec == shown


@pytest.mark.parametrize("xp", [np, jnp])
def test_last_action_and_reward_by_hand(xp):
    shown = EnvSpec(ObsPart((1,), FLOAT), CHOICES)
    view = make_view(with_(CARTPOLE, net={"last_action": True, "last_reward": True}), shown)
    one = np.ones((1, 1), np.float32)
    seen = view.first(one, xp)
    assert seen["last_action"].tolist() == [[0, 0, 0]]
    assert seen["last_reward"].tolist() == [[0]]
    no, yes = np.array([False]), np.array([True])
    step = view.apply(seen, no, np.array([2], np.int32), answer(2 * one, 7.0, over=True), xp)
    assert step.obs["obs"].tolist() == [[2]]
    assert step.obs["last_action"].tolist() == [[0, 0, 1]]
    assert step.obs["last_reward"].tolist() == [[1]]  # clipped
    step = view.apply(step.obs, yes, np.array([1], np.int32), answer(3 * one), xp)
    assert step.obs["last_action"].tolist() == [[0, 0, 0]]  # a new episode: nothing done yet
    assert step.obs["last_reward"].tolist() == [[0]]


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6, 1)], ids=["first", "last"])
@pytest.mark.parametrize("xp", [np, jnp])
def test_frames_by_hand(xp, shape):
    shown = EnvSpec(ObsPart(shape, BYTE), CHOICES)
    view = make_view(with_(CARTPOLE, frame_stack=3), shown)

    def frame(number):
        return np.full((1, *shape), number, np.uint8)

    def numbers(seen):
        axis = 1 if shape[0] == 1 else 3
        return np.unique(np.moveaxis(np.asarray(seen), axis, 0).reshape(3, -1), axis=1)[:, 0]

    no, act = np.array([False]), np.array([0], np.int32)
    seen = view.first(frame(5), xp)
    assert numbers(seen).tolist() == [5, 5, 5]
    seen = view.apply(seen, no, act, answer(frame(6)), xp).obs
    seen = view.apply(seen, no, act, answer(frame(7), over=True), xp).obs
    assert numbers(seen).tolist() == [5, 6, 7]
    seen = view.apply(seen, ~no, act, answer(frame(9)), xp).obs
    assert numbers(seen).tolist() == [9, 9, 9]
    assert view.spec.parts[""].shape == ((3, 6, 6) if shape[0] == 1 else (6, 6, 3))


def test_chosen_entries_are_those_of_the_environment():
    whole, part = (make_env(with_(CARTPOLE, **k), range(2)) for k in ({}, {"observe": (0, 2)}))
    assert part.spec.parts[""].shape == (2,)
    np.testing.assert_array_equal(part.reset(), whole.reset()[:, [0, 2]])
    for env in (whole, part):
        env.send(np.array([0, 1], np.int32))
    np.testing.assert_array_equal(part.recv().obs, whole.recv().obs[:, [0, 2]])
    for env in (whole, part):
        env.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"observe": (0, 7)}, "env.observe 7: CartPole-v1 has entries 0 to 3"),
        ({"frame_stack": 2}, "env.frame_stack stacks images, and CartPole-v1 gives none"),
        ({"id": "Pong-v5", "observe": (0,)}, "env.observe chooses entries of a vector"),
    ],
)
def test_what_does_not_fit_is_refused(env, message):
    with pytest.raises(ConfigError, match=message):
        make_env(with_(CARTPOLE, **env), range(2))


def test_the_compiled_rollout_sees_what_python_sees():
    from spmdrl.runtime.build import build_trainer

    config = with_(
        CARTPOLE, net={"last_action": True, "last_reward": True}, num_envs=8, observe=(0, 2)
    )
    trainer = build_trainer(config)
    rollout, _ = trainer.collect()
    env = make_env(config, range(8))
    seen = [env.reset()]
    for action in np.asarray(rollout.action):
        env.send(action)
        seen.append(env.recv().obs)
    env.close()
    expected = jax.tree.map(lambda *x: np.stack(x), *seen)
    assert (~np.asarray(rollout.valid)).any(), "no episode ended: nothing was tested"
    for name, x in rollout.obs.items():
        np.testing.assert_array_equal(np.asarray(x), expected[name][:-1])
    np.testing.assert_array_equal(rollout.last_obs["last_action"], expected["last_action"][-1])

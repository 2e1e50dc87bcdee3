"""A trained policy in its environments: what evaluating and recording have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # they bring flax, and input is checked before that is loaded
    from spmdrl.envs.base import EnvBatch
    from spmdrl.nets import Policy
    from spmdrl.types import TimeStep

__all__ = ["PlayedStep", "make_choice", "make_chooser", "play_steps"]


class PlayedStep(NamedTuple):
    """One step of B environments."""

    obs: np.ndarray  # what the policy saw
    action: np.ndarray  # as the policy gave it
    answer: TimeStep
    valid: np.ndarray  # False where the environment reset itself and ignored the action


def make_chooser(
    policy: Policy, variables: Any, deterministic: bool, seed: int
) -> Callable[..., Any]:
    """`choose(carry, obs, first, ids, t) -> (carry, action)`, compiled."""
    return functools.partial(make_choice(policy, deterministic, seed), variables)


def make_choice(policy: Policy, deterministic: bool, seed: int) -> Callable[..., Any]:
    """`choose(variables, carry, obs, first, ids, t) -> (carry, action)`, compiled once for all
    variables.

    Sampled actions draw their noise by the environment's id, whoever its neighbours are.
    """
    import jax

    key = jax.random.key(seed)

    def choose(
        variables: Any, carry: Any, obs: Any, first: Any, ids: Any, t: Any
    ) -> tuple[Any, Any]:
        carry, dist_params, _ = policy.apply(variables, carry, obs, first)
        if deterministic:
            return carry, policy.dist.mode(dist_params)
        now = jax.random.fold_in(key, t)
        noise = jax.vmap(lambda g: policy.dist.noise(jax.random.fold_in(now, g), ()))(ids)
        return carry, policy.dist.sample(dist_params, noise)

    return jax.jit(choose)


def play_steps(
    env: EnvBatch, policy: Policy, choose: Callable[..., Any], ids: Sequence[int], max_steps: int
) -> Iterator[PlayedStep]:
    """Step the environments from their first reset on, until the caller has seen enough."""
    count = env.num_envs
    obs, carry, rows = env.reset(), policy.initial_carry(count), np.asarray(ids, np.int32)
    first, resetting = np.ones(count, bool), np.zeros(count, bool)
    for t in range(max_steps):
        carry, action = choose(carry, obs, first, rows, np.int32(t))
        action = np.asarray(action)
        env.send(action)
        answer = env.recv()
        yield PlayedStep(obs, action, answer, ~resetting)
        obs, first, resetting = answer.obs, resetting, answer.terminated | answer.truncated

"""Rollouts as one compiled program with the simulator inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.acting.steps import (
    ActorState,
    Steps,
    act,
    draw_noise,
    finish_rollout,
    initial_state,
    make_row,
    next_state,
    score_rollout,
)
from spmdrl.config import Config
from spmdrl.envs.base import EnvBatch
from spmdrl.envs.view import ViewedBatch
from spmdrl.nets.policy import Policy
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.placement import in_shards
from spmdrl.types import Array, Obs, Rollout

__all__ = ["CompiledActor", "collect_all"]

Part = tuple[Rollout, dict[str, Array]]


class CompiledActor:
    """One device's environments, T steps per call.

    The handle of a simulator outside of jax is part of the compiled program, so no two actors can
    share one. A pure one is arrays, which the actor's state holds between two calls.
    """

    description = "in one compiled program, simulator included"

    def __init__(self, config: Config, policy: Policy, env: EnvBatch, ids: Array, shards: int):
        xla = env.xla()
        assert xla is not None
        self.env, self.env_ids, self.num_envs = env, ids, env.num_envs
        self._device = next(iter(ids.devices()))
        self.saves_envs, self._handle = xla.pure, jax.device_put(xla.handle, self._device)
        step_envs = partial(in_shards, xla.step, shards) if xla.pure else xla.step
        self.place(initial_state(env, policy).replace(envs=xla.handle if xla.pure else ()))

        def collect(
            handle: Any, variables: Any, before: ActorState, key: Array, update: Array
        ) -> Any:
            noise = draw_noise(policy, key, update, ids, config.algo.num_steps)

            def step(loop: Any, noise_t: Array) -> tuple[Any, Steps]:
                handle, s = loop
                carry, action, dist_params, value = act(
                    policy, shards, variables, s.carry, s.obs, s.first, noise_t
                )
                handle, answer = step_envs(handle, action)
                if isinstance(env, ViewedBatch):
                    answer = env.view.apply(s.obs, s.resetting, action, answer, jnp)
                row = make_row(s, action, dist_params, value, answer)
                return (handle, next_state(s, carry, answer)), row

            (handle, after), steps = jax.lax.scan(step, (handle, before), noise)
            scores = score_rollout(policy, shards, variables, steps)
            return handle, *finish_rollout(config, ids, before, steps, scores, after)

        self._collect = jax.jit(collect) if xla.pure else private_jit(collect)

    def step(self, action: np.ndarray) -> Obs:
        """Step the environments with given actions; the observations."""
        self.env.send(action)
        return self.env.recv().obs

    def hint(self) -> str:
        """See `EnvBatch`."""
        return self.env.hint()

    def close(self) -> None:
        self.env.close()

    def place(self, state: ActorState) -> None:
        # On the device from the start: the compiled program would be made twice otherwise.
        state = jax.device_put(state, self._device)
        self._keep(state.envs if self.saves_envs else self._handle, state)

    def _keep(self, handle: Any, state: ActorState) -> None:
        self._handle = handle
        self.state = state.replace(envs=handle) if self.saves_envs else state

    def collect(self, variables: Any, key: Array, update: Array) -> Part:
        with jax.enable_x64(self.env.needs_x64):
            before = self.state.replace(envs=())  # it goes its own way, as the handle
            out = self._collect(self._handle, variables, before, key, update)
        handle, state, rollout, episodes = out
        self._keep(handle, state)
        return rollout, episodes


def collect_all(actors: Sequence[CompiledActor], inputs: Sequence[Any]) -> list[Part]:
    """A rollout of every actor; dispatched one after the other, they run side by side."""
    return [actor.collect(*given) for actor, given in zip(actors, inputs, strict=True)]

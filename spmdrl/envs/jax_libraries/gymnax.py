"""gymnax, from 1.0 on: classic control, bsuite, MinAtar and others."""

from __future__ import annotations

from typing import Any

import gymnax

from spmdrl.config import ConfigError
from spmdrl.envs.jax_libraries.spaces import from_gymnax
from spmdrl.envs.jax_protocol import Answer

__all__ = ["GymnaxEnv", "make", "names"]


def names() -> list[str]:
    return list(gymnax.registered_envs)


def make(name: str, options: dict[str, Any]) -> GymnaxEnv:
    """Options are fields of the environment's parameters, or arguments of its constructor."""
    fields = vars(gymnax.make(name)[1])
    own = {key: options.pop(key) for key in list(options) if key in fields}
    env, params = gymnax.make(name, **options)
    return GymnaxEnv(env, params.replace(**own))


class GymnaxEnv:
    """See `JaxEnv`. The time limit is among the parameters, and truncation is told apart."""

    def __init__(self, env: Any, params: Any):
        self._env, self._params, self.options = env, params, vars(params)
        self.episode_limit = getattr(params, "max_steps_in_episode", None)
        self.observation_space = from_gymnax(env.observation_space(params))
        self.action_space = from_gymnax(env.action_space(params))
        if not hasattr(env, "is_truncated"):
            raise ConfigError("this gymnax is too old: spmdrl needs 1.0 or newer")

    def reset(self, key: Any) -> tuple[Any, Any]:
        return self._env.reset_env(key, self._params)

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        obs, state, reward, ended, _ = self._env.step_env(key, state, action, self._params)
        return obs, state, reward, ended, self._env.is_truncated(state, self._params)

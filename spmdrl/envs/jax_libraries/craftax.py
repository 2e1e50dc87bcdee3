"""Craftax and Craftax-Classic, symbolic and from pixels."""

from __future__ import annotations

from typing import Any

from craftax.craftax_env import make_craftax_env_from_name

from spmdrl.envs.jax_libraries.spaces import from_gymnax
from spmdrl.envs.jax_protocol import Answer

__all__ = ["CraftaxEnv", "make", "names"]


def names() -> list[str]:
    return [f"Craftax{kind}-v1" for kind in ("-Symbolic", "-Pixels")] + [
        f"Craftax-Classic{kind}-v1" for kind in ("-Symbolic", "-Pixels")
    ]


def make(name: str, options: dict[str, Any]) -> CraftaxEnv:
    """Options are fields of the environment's parameters, such as max_timesteps."""
    env = make_craftax_env_from_name(name, auto_reset=False)
    return CraftaxEnv(env, env.default_params.replace(**options))


class CraftaxEnv:
    """See `JaxEnv`. Craftax has one flag for death and time limit: a state at time 0 tells which
    of them it was."""

    def __init__(self, env: Any, params: Any):
        self._env, self._params, self.options = env, params, vars(params)
        self.episode_limit = params.max_timesteps
        self.observation_space = from_gymnax(env.observation_space(params))
        self.action_space = from_gymnax(env.action_space(params))

    def reset(self, key: Any) -> tuple[Any, Any]:
        return self._env.reset_env(key, self._params)

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        obs, state, reward, done, _ = self._env.step_env(key, state, action, self._params)
        ended = self._env.is_terminal(state.replace(timestep=0), self._params)
        return obs, state, reward, ended, done & ~ended

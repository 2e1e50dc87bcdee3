"""envpool: thousands of ids simulated by C++ threads, in synchronous mode.

Public names: `EnvpoolBatch`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdrl.config import ConfigError, suggest
from spmdrl.envs import base
from spmdrl.types import EnvSpec, TimeStep


class EnvpoolBatch:
    """See `base.EnvBatch`."""

    def __init__(self, env_id: str, seeds: Sequence[int], threads: int, options: dict[str, Any]):
        import envpool

        self.num_envs = len(seeds)
        try:
            self.pool = envpool.make_gymnasium(
                env_id, num_envs=len(seeds), seed=list(seeds), num_threads=threads, **options
            )
        except TypeError as error:  # an option that this environment does not have
            known = envpool.make_spec(env_id)._config_keys
            wrong = sorted(set(options) - set(known))
            detail = f"; {wrong[0]}{suggest(wrong[0], known)}" if wrong else f": {error}"
            raise ConfigError(f"env.options do not fit {env_id}{detail}") from error
        with warnings.catch_warnings():  # gymnasium complains of envpool's float64 bounds
            warnings.simplefilter("ignore")
            self._obs_space: Any = self.pool.observation_space
            action = base.action_space(self.pool.action_space, env_id)
        self.spec = EnvSpec(*base.obs_spec(self._obs_space, env_id), action)
        # Atari under episodic_life: a lost life is `terminated`, the end of the game is in info.
        self.needs_x64 = action.dtype == np.float64
        self._game_over_in_info = "info:terminated" in self.pool._state_keys
        self._raw_reward_in_info = "info:reward" in self.pool._state_keys

    def reset(self) -> np.ndarray:
        obs, _ = self.pool.reset()
        return base.flatten_obs(self._obs_space, obs, np)

    def send(self, action: np.ndarray) -> None:
        action = base.to_env_action(self.spec.action, action, np)
        base.check_actions(self.spec.action, self.num_envs, action)
        self.pool.send(action)

    def recv(self) -> TimeStep:
        return self._time_step(self.pool.recv(), np)

    def xla(self) -> base.XlaStep | None:
        import jax
        import jax.numpy as jnp

        with jax.enable_x64(self.needs_x64):
            handle, _, _, pool_step = self.pool.xla()

        def step(handle: Any, action: Any) -> tuple[Any, TimeStep]:
            action = base.to_env_action(self.spec.action, action, jnp)
            handle, answer = pool_step(handle, action)
            return handle, self._time_step(answer, jnp)

        return base.XlaStep(handle, step)

    def render(self) -> np.ndarray:
        """An RGB frame of the first environment; needs the option render_mode="rgb_array"."""
        frames: Any = self.pool.render()
        return frames[0]

    def close(self) -> None:
        self.pool.close()

    def _time_step(self, answer: Any, xp: Any) -> TimeStep:
        obs, reward, terminated, truncated, info = answer
        if self._raw_reward_in_info:
            reward = info["reward"]
        over = info["terminated"].astype(bool) if self._game_over_in_info else terminated
        return TimeStep(
            obs=base.flatten_obs(self._obs_space, obs, xp),
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            episode_over=over | truncated,
        )

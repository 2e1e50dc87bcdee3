"""Any registered Gymnasium environment, also "package.module:Id-v0"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.envs import actions, observations
from spmdrl.types import EnvSpec, Obs, TimeStep

__all__ = ["GymnasiumBatch"]


class GymnasiumBatch:
    """See `base.EnvBatch`; with several threads each environment runs in a process of its own."""

    def __init__(self, env_id: str, seeds: Sequence[int], threads: int, options: dict[str, Any]):
        self.num_envs = len(seeds)
        self.needs_x64 = False
        self._seeds: Any = list(seeds)
        self._in_processes = threads > 1 and len(seeds) > 1
        mode = "async" if self._in_processes else "sync"
        self.envs: Any = gym.make_vec(env_id, len(seeds), vectorization_mode=mode, **options)
        self._obs_space = self.envs.single_observation_space
        action = actions.action_space(self.envs.single_action_space, env_id)
        self.spec = EnvSpec(observations.obs_spec(self._obs_space, env_id), action)

    def reset(self) -> Obs:
        obs, _ = self.envs.reset(seed=self._seeds)
        return observations.read_obs(self._obs_space, obs, np)

    def send(self, action: np.ndarray) -> None:
        action = actions.to_env_action(self.spec.action, action, np)
        actions.check_actions(self.spec.action, self.num_envs, action)
        self._action = action
        if self._in_processes:
            self.envs.step_async(action)

    def recv(self) -> TimeStep:
        if self._in_processes:
            obs, reward, terminated, truncated, _ = self.envs.step_wait()
        else:
            obs, reward, terminated, truncated, _ = self.envs.step(self._action)
        return TimeStep(
            obs=_copied(observations.read_obs(self._obs_space, obs, np)),
            reward=np.asarray(reward, np.float32),
            terminated=np.asarray(terminated, bool),
            truncated=np.asarray(truncated, bool),
            episode_over=np.asarray(terminated | truncated, bool),
        )

    def xla(self) -> None:
        return None

    def render(self) -> np.ndarray:
        frames: Any = self.envs.render()
        return frames[0]

    def close(self) -> None:
        self.envs.close()


def _copied(obs: Obs) -> Obs:
    """gymnasium fills the same arrays at the next step."""
    return {k: x.copy() for k, x in obs.items()} if isinstance(obs, dict) else obs.copy()

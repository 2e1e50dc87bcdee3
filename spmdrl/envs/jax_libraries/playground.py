"""MuJoCo Playground: robots and the DeepMind Control Suite, simulated by MJX."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from mujoco_playground import registry

from spmdrl.envs.jax_libraries.brax import BraxEnv
from spmdrl.envs.jax_libraries.spaces import unbounded

__all__ = ["make", "names"]


def names() -> list[str]:
    return list(registry.ALL_ENVS)


def make(name: str, options: dict[str, Any]) -> BraxEnv:
    """Options are fields of the environment's config, such as episode_length.

    Its default, Warp, simulates on NVIDIA cards only: `impl` warp asks for that.
    """
    config = registry.get_default_config(name)
    config.update({"impl": "jax"} | options if "impl" in config else options)
    env = registry.load(name, config=config)
    seen = _observations(env.observation_size)
    return BraxEnv(env, seen, config.episode_length, config.to_dict())


def _observations(size: Any) -> gym.Space[Any]:
    """One vector, or several by name, of which one may be for the critic only."""
    if isinstance(size, int):
        return unbounded((size,))
    shapes = {key: (n,) if isinstance(n, int) else tuple(n) for key, n in size.items()}
    return gym.spaces.Dict({key: unbounded(shape) for key, shape in shapes.items()})

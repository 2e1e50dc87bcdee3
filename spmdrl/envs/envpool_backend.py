"""envpool: thousands of ids simulated by C++ threads, in synchronous mode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmdrl.config import ConfigError, suggest
from spmdrl.envs import actions, base, observations
from spmdrl.envs.envpool_loading import load_envpool
from spmdrl.types import EnvSpec, Obs, TimeStep

__all__ = ["EnvpoolBatch", "has_64_bit_arrays", "without_effect"]


class EnvpoolBatch:
    """See `base.EnvBatch`."""

    def __init__(self, env_id: str, seeds: Sequence[int], threads: int, options: dict[str, Any]):
        envpool = load_envpool(env_id)
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
            action = actions.action_space(self.pool.action_space, env_id)
        self.spec = EnvSpec(observations.obs_spec(self._obs_space, env_id), action)
        self.needs_x64 = has_64_bit_arrays(self.pool.spec)
        # Atari under episodic_life: a lost life is `terminated`, the end of the game is in info.
        self._game_over_in_info = "info:terminated" in self.pool._state_keys
        self._raw_reward_in_info = "info:reward" in self.pool._state_keys

    def reset(self) -> Obs:
        obs, _ = self.pool.reset()
        return observations.read_obs(self._obs_space, obs, np)

    def send(self, action: np.ndarray) -> None:
        action = actions.to_env_action(self.spec.action, action, np)
        actions.check_actions(self.spec.action, self.num_envs, action)
        self.pool.send(action)

    def recv(self) -> TimeStep:
        return self._time_step(self.pool.recv(), np)

    def xla(self) -> base.XlaStep | None:
        import jax
        import jax.numpy as jnp

        with jax.enable_x64(self.needs_x64):
            handle, _, _, with_effect = self.pool.xla()
        pool_step = without_effect(with_effect)

        def step(handle: Any, action: Any) -> tuple[Any, TimeStep]:
            action = actions.to_env_action(self.spec.action, action, jnp)
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
            obs=observations.read_obs(self._obs_space, obs, xp),
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            episode_over=over | truncated,
        )


def has_64_bit_arrays(spec: Any) -> bool:
    """Whether anything that the compiled step takes or returns has 64-bit numbers.

    Without x64 jax declares buffers of half the size for them, and envpool writes past their ends.
    Info fields count: they are results of the compiled call too, whether anybody reads them or not.
    """
    arrays = [*spec.state_array_spec.values(), *spec.action_array_spec.values()]
    dtypes = [np.dtype(array.dtype) for array in arrays]
    return any(dtype.kind in "iuf" and dtype.itemsize == 8 for dtype in dtypes)


def without_effect(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same calls in the compiled program, without jax's note that they have an effect.

    jax starts programs with effects through Python, which costs every rollout half a millisecond.
    The handle, which goes from step to step, keeps the order without it.
    """
    import jax

    def call(*args: Any) -> Any:
        structure = jax.tree.structure(jax.eval_shape(step, *args))
        return jax.tree.unflatten(structure, _step_primitive().bind(*args, step=step))

    return call


@functools.cache
def _step_primitive() -> Any:
    import jax
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def shapes(*args: Any, step: Callable[..., Any]) -> list[Any]:
        found = jax.tree.leaves(jax.eval_shape(step, *args))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]

    def lower(context: mlir.LoweringRuleContext, *args: Any, step: Callable[..., Any]) -> Any:
        leaves = lambda *given: jax.tree.leaves(step(*given))  # noqa: E731
        return mlir.lower_fun(leaves, multiple_results=True)(context, *args)

    primitive = Primitive("envpool_step")
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, lower)
    return primitive

"""envpool: thousands of ids simulated by C++ threads, in synchronous mode."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from spmdrl.config import ConfigError, suggest
from spmdrl.envs import actions, base, observations
from spmdrl.envs.envpool_loading import load_envpool
from spmdrl.types import Obs, TimeStep

__all__ = [
    "EnvpoolBatch", "check_players", "declared", "has_64_bit_arrays", "make_pool", "pool_reader",
    "without_effect",
]  # fmt: skip


class EnvpoolBatch:
    """See `base.EnvBatch`."""

    def __init__(self, env_id: str, seeds: Sequence[int], threads: int, options: dict[str, Any]):
        self.num_envs = len(seeds)
        # The declared arrays first: some refusals concern environments that would hang if made.
        spec = declared(env_id, options)
        check_players(spec, env_id)
        self.reader = pool_reader(spec, env_id)
        self.spec = self.reader.spec
        self.needs_x64 = has_64_bit_arrays(spec)
        self.pool = make_pool(env_id, seeds, threads, options)
        # Atari under episodic_life: a lost life is `terminated`, the end of the game is in info.
        self._game_over_in_info = "info:terminated" in self.pool._state_keys
        self._raw_reward_in_info = "info:reward" in self.pool._state_keys

    def reset(self) -> Obs:
        obs, info = self.pool.reset()
        return self.reader.read(obs, np, info)

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

    def spaces(self) -> tuple[Any, Any]:
        with warnings.catch_warnings():  # as in `make_pool`
            warnings.simplefilter("ignore")
            return self.pool.observation_space, self.pool.action_space

    def hint(self) -> str:
        return ""

    def close(self) -> None:
        self.pool.close()

    def _time_step(self, answer: Any, xp: Any) -> TimeStep:
        obs, reward, terminated, truncated, info = answer
        if self._raw_reward_in_info:
            reward = info["reward"]
        over = info["terminated"].astype(bool) if self._game_over_in_info else terminated
        return TimeStep(
            obs=self.reader.read(obs, xp, info),
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            episode_over=over | truncated,
        )


def make_pool(env_id: str, seeds: Sequence[int], threads: int, options: dict[str, Any]) -> Any:
    with explained(env_id):
        pool = load_envpool(env_id).make_gymnasium(
            env_id, num_envs=len(seeds), seed=list(seeds), num_threads=threads, **options
        )
    with warnings.catch_warnings():  # gymnasium complains of envpool's float64 bounds, once
        warnings.simplefilter("ignore")
        _ = pool.observation_space, pool.action_space
    return pool


def declared(env_id: str, options: dict[str, Any]) -> Any:
    """The specification of the arrays; nothing is simulated for it."""
    try:
        with explained(env_id):
            return load_envpool(env_id).make_spec(env_id, **options)
    except TypeError as error:  # an option that this environment does not have
        known = load_envpool(env_id).make_spec(env_id)._config_keys
        wrong = sorted(set(options) - set(known))
        detail = f"; {wrong[0]}{suggest(wrong[0], known)}" if wrong else f": {error}"
        raise ConfigError(f"env.options do not fit {env_id}{detail}") from error


@contextlib.contextmanager
def explained(env_id: str) -> Iterator[None]:
    """With envpool's reason where an environment cannot be made here: a library is missing."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"env.id {env_id} cannot be made here: {reason}") from error


# They declare one player, and the process crashes while their game waits for the others.
DOOM_FOR_SEVERAL = frozenset({"Cig-v1", "MultiDuel-v1"})


def check_players(spec: Any, env_id: str) -> None:
    config = dict(zip(spec._config_keys, spec._config_values, strict=True))
    players = "several" if env_id in DOOM_FOR_SEVERAL else config.get("max_num_players", 1)
    if players != 1:
        raise ConfigError(
            f"env.id {env_id} is for {players} players; spmdrl trains one agent per environment, "
            "so choose an environment for one player"
        )


def pool_reader(spec: Any, env_id: str) -> observations.Reader:
    """From the declared arrays alone: no environment has to be made for it."""
    states = spec.state_array_spec.items()
    masks = {
        key.removeprefix("info:"): tuple(n for n in array.shape if n != -1)
        for key, array in states
        if key.startswith("info:") and np.dtype(array.dtype) == bool
    }
    (*_, accepted) = spec.action_array_spec.values()
    with warnings.catch_warnings():  # gymnasium complains of envpool's float64 bounds
        warnings.simplefilter("ignore")
        seen, chosen = spec.gymnasium_observation_space, button_space(spec)
        return observations.make_reader(seen, chosen, env_id, masks, np.dtype(accepted.dtype))


def button_space(spec: Any) -> Any:
    """ViZDoom declares an unbounded box for buttons, which are pressed or not.

    Its option use_combined_action makes one choice among sensible combinations instead.
    """
    space = spec.gymnasium_action_space
    is_doom = "use_combined_action" in spec._config_keys and isinstance(space, gym.spaces.Box)
    return gym.spaces.MultiBinary(space.shape) if is_doom else space


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

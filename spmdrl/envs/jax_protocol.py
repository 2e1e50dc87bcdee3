"""What an environment written in JAX has, and one such environment made safe to compile.

An environment of one's own is a class with these members; `env.id` names it as "my_module:MyEnv".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.envs.leaves import leaf_spaces, leaf_values

__all__ = ["Answer", "JaxEnv", "Simulator"]

Answer = tuple[Any, Any, Any, Any, Any]  # obs, state, reward, terminated, truncated


class JaxEnv(Protocol):
    """ONE environment as pure functions; batches, resets and time limits are made around it.

    A state is any tree of arrays. `step` never starts a new episode by itself: what it is asked
    after an end is thrown away. Optional are `time_limit: int`, after which episodes are truncated,
    and `render(state) -> uint8 [height, width, 3]`, outside of compiled programs. An observation
    may hold a boolean "action_mask" of the actions that are allowed.
    """

    observation_space: Any  # of gymnasium.spaces
    action_space: Any

    def reset(self, key: Any) -> tuple[Any, Any]:
        """`(obs, state)` at the start of an episode."""
        ...

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        """`(obs, state, reward, terminated, truncated)`; each key is given only once."""
        ...


MEMBERS = ("observation_space", "action_space", "reset", "step")


class Simulator:
    """A `JaxEnv` whose states and observations have one form, as loops of a program need.

    Forms are found by tracing, so whatever does not fit is a ConfigError before anything is
    compiled.
    """

    def __init__(self, env: JaxEnv, env_id: str):
        missing = [name for name in MEMBERS if not hasattr(env, name)]
        if missing:
            raise ConfigError(f"env.id {env_id} is no JAX environment: it has no {missing[0]}")
        self.env, self._id = env, env_id
        self.time_limit: int | None = getattr(env, "time_limit", None)
        key = jax.ShapeDtypeStruct((2,), np.uint32)
        found = jax.eval_shape(self._first, key)
        self._state_form = found[1]  # with typed keys, where the environment has any
        self.form = jax.eval_shape(_plain, found)
        self._check_space()

    def _first(self, key: Any) -> tuple[Any, Any]:
        first = self.env.reset(key)
        if not (isinstance(first, tuple) and len(first) == 2):
            raise ConfigError(f"env.id {self._id}: reset must return (obs, state)")
        return jax.tree.map(jnp.asarray, first)

    def reset(self, key: Any) -> tuple[Any, Any]:
        return self._fitted(self._first(key), "reset")

    def step(self, key: Any, state: Any, action: Any) -> Answer:
        answer = self.env.step(key, self._typed(state), action)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise ConfigError(
                f"env.id {self._id}: step must return (obs, state, reward, terminated, truncated)"
            )
        obs, state, *rest = answer
        obs, state = self._fitted((obs, state), "step")
        reward, terminated, truncated = map(self._scalar, rest)
        return (
            obs,
            state,
            reward.astype(np.float32),
            terminated.astype(bool),
            truncated.astype(bool),
        )

    def _scalar(self, x: Any, dtype: Any) -> Any:
        x = jnp.asarray(x)
        if x.shape != ():
            raise ConfigError(
                f"env.id {self._id}: reward, terminated and truncated must be single numbers, but "
                f"step returned one of shape {x.shape}"
            )
        return x.astype(dtype)

    def render(self, state: Any) -> np.ndarray:
        frame: Any = self.env.render(self._typed(state))  # type: ignore[attr-defined]
        return np.asarray(frame, np.uint8)

    @property
    def renders(self) -> bool:
        return hasattr(self.env, "render")

    # -- forms

    def _fitted(self, found: Any, where: str) -> Any:
        """`(obs, state)` in the form of the first reset's.

        Loops want exactly it; environments mix Python's numbers with arrays.
        """
        found = _plain(jax.tree.map(jnp.asarray, found))
        wanted, got = jax.tree.structure(self.form), jax.tree.structure(found)
        if wanted != got:
            raise ConfigError(
                f"env.id {self._id}: {where} returns an (obs, state) of another structure than "
                f"reset: {got} instead of {wanted}"
            )
        named, wanted_leaves = jax.tree.leaves_with_path(found), jax.tree.leaves(self.form)
        fitted = [self._leaf(p, x, f) for (p, x), f in zip(named, wanted_leaves, strict=True)]
        return jax.tree.unflatten(wanted, fitted)

    def _leaf(self, path: Any, x: Any, form: Any) -> Any:
        if x.shape != form.shape or not np.can_cast(x.dtype, form.dtype, "same_kind"):
            name = ("obs", "state")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ConfigError(
                f"env.id {self._id}: {name} is {x.dtype}{list(x.shape)} after a step, but "
                f"{form.dtype}{list(form.shape)} after a reset; make them the same"
            )
        return x.astype(form.dtype)

    def _typed(self, state: Any) -> Any:
        """Keys as the environment knows them; outside of it they are plain numbers."""
        return jax.tree.map(
            lambda x, form: jax.random.wrap_key_data(x) if _is_key(form) else x,
            state, self._state_form,
        )  # fmt: skip

    def _check_space(self) -> None:
        space = self.env.observation_space
        if isinstance(space, Mapping) and not isinstance(self.form[0], Mapping):
            raise ConfigError(f"env.id {self._id}: observation_space is a dict, reset's obs is not")
        spaces, values = leaf_spaces(space), leaf_values(space, self.form[0])
        for name, leaf in spaces.items():
            if tuple(values[name].shape) != tuple(leaf.shape):
                where = f"observation_space[{name!r}]" if name else "observation_space"
                raise ConfigError(
                    f"env.id {self._id}: {where} has shape "
                    f"{tuple(leaf.shape)}, but reset shows {tuple(values[name].shape)}"
                )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(tree: Any) -> Any:
    """Typed keys as their numbers, which a checkpoint can hold."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)

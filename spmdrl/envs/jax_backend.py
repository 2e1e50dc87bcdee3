"""Environments written in JAX: libraries by small adapters, own classes by a protocol.

The whole batch is one tree of arrays, environments first, so it can live in a compiled program on
any device, and a checkpoint holds it as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdrl.config import ConfigError
from spmdrl.envs import actions, base, jax_libraries
from spmdrl.envs.jax_protocol import Simulator
from spmdrl.envs.observations import make_reader
from spmdrl.types import Obs, TimeStep

__all__ = ["JaxBatch", "JaxStepper", "env_keys", "stepper"]

# Environments that are reset together. Every topology resets as many at once, so that a row's
# arithmetic, and with it every bit, is the same on each.
AT_ONCE = 8
TAG = 0x656E7673  # keeps these keys apart from all others that derive from the run's seed

Handle = dict[str, Any]


class JaxBatch:
    """See `base.EnvBatch`. `env.options.reset = "cached"` begins all episodes of an environment
    with its very first state, as Brax does."""

    needs_x64 = False

    def __init__(
        self,
        env_id: str,
        seed: int,
        generation: int,
        env_ids: Sequence[int],
        options: dict[str, Any],
    ):
        options = dict(options)
        drawn, resets = options.pop("render_mode", None), options.pop("reset", "new")
        if resets not in ("new", "cached"):
            raise ConfigError(f"env.options reset is {resets!r}, but must be new or cached")
        self._stepper = stepper(env_id, json.dumps(options, sort_keys=True), resets == "cached")
        if drawn and not self._stepper.simulator.renders:
            raise ConfigError(f"env.id {env_id} cannot be drawn: it has no render(state)")
        self.spec, self.num_envs = self._stepper.spec, len(env_ids)
        self._obs, self._handle = self._stepper.start(env_keys(seed, generation, env_ids))
        self._first = self._obs, self._handle

    def reset(self) -> Obs:
        self._obs, self._handle = self._first
        return jax.tree.map(np.asarray, self._obs)

    def send(self, action: np.ndarray) -> None:
        known = actions.to_env_action(self.spec.action, action, np)
        actions.check_actions(self.spec.action, self.num_envs, known)
        self._handle, self._answer = self._stepper.step(self._handle, action)

    def recv(self) -> TimeStep:
        return jax.tree.map(np.asarray, self._answer)

    def xla(self) -> base.XlaStep:
        return base.XlaStep(self._first[1], self._stepper.trace_step, pure=True)

    def render(self) -> np.ndarray:
        state = jax.tree.map(lambda x: x[0], self._handle["state"])
        return self._stepper.simulator.render(state)

    @property
    def env(self) -> Any:
        """The `JaxEnv` that all of them are."""
        return self._stepper.simulator.env

    def spaces(self) -> tuple[Any, Any]:
        return self.env.observation_space, self.env.action_space

    def hint(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to end: there are only arrays."""


def env_keys(seed: int, generation: int, env_ids: Sequence[int]) -> Any:
    """One key per global id, whoever owns it; plain numbers `[B, 2]`, as every library takes them.

    A generation may be negative.
    """
    root = jax.random.fold_in(jax.random.PRNGKey(seed), TAG)
    made = jax.random.fold_in(root, np.uint32(generation % 2**32))
    return jax.vmap(lambda g: jax.random.fold_in(made, g))(np.asarray(env_ids, np.int32))


@functools.cache
def stepper(env_id: str, options: str, cached: bool) -> JaxStepper:
    """Of each kind one, with its compiled programs, for all batches of this process."""
    env = jax_libraries.make(env_id, json.loads(options))
    return JaxStepper(Simulator(env, env_id), env_id, cached)


class JaxStepper:
    """Steps any number of environments, which reset themselves on the step after an end.

    A handle holds the environments' `state`, their `key`, how many keys they have used (`count`),
    their `time` in the episode, and whether the next step is a reset (`resetting`).
    """

    def __init__(self, simulator: Simulator, env_id: str, cached: bool = False):
        self.simulator, self._cached = simulator, cached
        env = simulator.env
        self._reader = make_reader(env.observation_space, env.action_space, env_id)
        self.spec = self._reader.spec
        self.start, self.step = jax.jit(self.trace_start), jax.jit(self.trace_step)

    def trace_start(self, key: Any) -> tuple[Obs, Handle]:
        """The first observations, and a handle."""
        n = len(key)
        blank = jax.tree.map(lambda f: jnp.zeros((n, *f.shape), f.dtype), self.simulator.form)
        nothing, everybody = jnp.zeros(n, np.int32), jnp.ones(n, bool)
        obs, state = self.reset_rows(key, nothing, everybody, blank)
        handle = {
            "state": state, "key": key, "count": nothing + 1, "time": nothing,
            "resetting": ~everybody,
        }  # fmt: skip
        if self._cached:
            handle["first"] = (obs, state)
        return self._reader.read(obs, jnp), handle

    def trace_step(self, handle: Handle, action: Any) -> tuple[Handle, TimeStep]:
        """One step of all of them, as part of a larger program."""
        key, count, due = handle["key"], handle["count"], handle["resetting"]
        action = actions.to_env_action(self.spec.action, action, jnp)
        obs, state, reward, terminated, truncated = jax.vmap(self.simulator.step)(
            _keys_now(key, count), handle["state"], action
        )
        time = jnp.where(due, 0, handle["time"] + 1)
        if self.simulator.time_limit is not None:
            truncated = truncated | (time >= self.simulator.time_limit)
        terminated = terminated & ~due
        truncated = truncated & ~due & ~terminated
        over = terminated | truncated
        if self._cached:
            obs, state = _where(due, handle["first"], (obs, state))
        else:
            obs, state = self.reset_rows(key, count, due, (obs, state))
        answer = TimeStep(
            obs=self._reader.read(obs, jnp),
            reward=jnp.where(due, np.float32(0), reward),
            terminated=terminated,
            truncated=truncated,
            episode_over=over,
        )
        after = {"state": state, "count": count + 1, "time": time, "resetting": over}
        return handle | after, answer

    def reset_rows(self, key: Any, count: Any, due: Any, tree: Any) -> Any:
        """`(obs, state)` with new episodes in the rows that are due.

        A `where` would reset every row in every step. This costs as much as there are resets, a
        few at once, and nothing where none is due; their keys too are only made here.
        """
        n = len(due)

        def some(loop: Any) -> Any:
            left, tree = loop
            rows = jnp.nonzero(left, size=AT_ONCE, fill_value=n)[0]  # n is no row: it is dropped
            keys = _keys_now(*(x.at[rows].get(mode="clip") for x in (key, count)))
            new = jax.vmap(self.simulator.reset)(keys)
            tree = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), tree, new)
            return left.at[rows].set(False, mode="drop"), tree

        return jax.lax.while_loop(lambda loop: loop[0].any(), some, (due, tree))[1]


def _keys_now(key: Any, count: Any) -> Any:
    return jax.vmap(jax.random.fold_in)(key, count)


def _where(rows: Any, new: Any, old: Any) -> Any:
    def choose(x: Any, y: Any) -> Any:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)

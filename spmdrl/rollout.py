"""Parameters in, a rollout out: a policy steps this rank's environments.

Each local device has its own batch of environments and its own compiled functions.
Where the simulator can be called from a compiled program, T steps are one program; elsewhere a
Python loop alternates inference and simulation. Both compute the same. Public names:
`Collector`, `ActorState`, `Episodes`, `transform_reward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from spmdrl.checkpoint import CheckpointError, from_named, to_named
from spmdrl.config import Config
from spmdrl.envs import make_env
from spmdrl.envs.base import EnvBatch
from spmdrl.mesh import join, on_device
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.shards import in_shards, rollout_specs, split_ids
from spmdrl.types import Array, Carry, EnvSpec, Rollout, TimeStep, TrainState


class ActorState(struct.PyTreeNode):
    """Where B environments are between two rollouts."""

    obs: Array
    first: Bool[Array, B]  # obs starts an episode
    resetting: Bool[Array, B]  # the next step is the automatic reset
    carry: Carry
    discounted_return: Float[Array, B]  # of the transformed rewards, for their normaliser
    episode_return: Float[Array, B]  # raw
    episode_length: Int[Array, B]


class Steps(struct.PyTreeNode):
    """T time-major rows as they come out of the stepping, before anything is derived."""

    obs: Array
    first: Array
    valid: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array  # raw
    terminated: Array
    truncated: Array
    episode_over: Array


@dataclass(frozen=True)
class Episodes:
    """Games that ended in one rollout, in order of time and then of environment id."""

    step: np.ndarray
    env_id: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


def transform_reward(kind: str, reward: Array) -> Array:
    """The rewards that are learned from; reported returns stay raw."""
    if kind == "sign":
        return jnp.sign(reward)
    if kind == "abs_one":
        return jnp.clip(reward, -1.0, 1.0)
    if kind == "soft_asymmetric":
        squeezed = jnp.tanh(reward / 5.0)
        return jnp.where(reward < 0, 0.3 * squeezed, squeezed) * 5.0
    return reward


# ---------------------------------------------------------------------------------------------
# Pieces shared by both ways of stepping


def draw_noise(policy: Policy, key: Array, env_ids: Array, num_steps: int) -> Array:
    """`[T, B, ...]` noise of a whole rollout, keyed by the global environment id."""
    draw = jax.vmap(lambda g: policy.dist.noise(jax.random.fold_in(key, g), (num_steps,)))
    return jnp.swapaxes(draw(env_ids), 0, 1)


def act(
    policy: Policy,
    shards: int,
    variables: Any,
    carry: Carry,
    obs: Array,
    first: Array,
    noise: Array,
) -> tuple[Carry, Array, Array, Array]:
    """`(carry, action, log_prob, value)` of one step."""

    def of_rows(carry: Carry, obs: Array, first: Array, noise: Array) -> Any:
        carry, dist_params, value = policy.apply(variables, carry, obs, first)
        action = policy.dist.sample(dist_params, noise)
        return carry, action, policy.dist.log_prob(dist_params, action), value

    return in_shards(of_rows, shards, carry, obs, first, noise)


def accumulate(
    start: Array, x: Float[Array, "T B"], discount: float, ends: Bool[Array, "T B"]
) -> tuple[Array, Float[Array, "T B"]]:
    """`y_t = x_t + discount y_{t-1}`, from 0 again after each end; last y and all y."""

    def step(y: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        x, end = row
        y = x + discount * y
        return jnp.where(end, 0.0, y), y

    return jax.lax.scan(step, start, (x, ends), unroll=8)


def finish_rollout(
    config: Config, env_ids: Array, before: ActorState, steps: Steps, after: ActorState
) -> tuple[ActorState, Rollout, dict[str, Array]]:
    """Derive what learning and reporting need from the raw rows."""
    raw = jnp.where(steps.valid, steps.reward, 0.0)
    reward = transform_reward(config.env.reward, raw)
    ends = steps.terminated | steps.truncated
    discounted, returns = accumulate(before.discounted_return, reward, config.algo.gamma, ends)
    score, scores = accumulate(before.episode_return, raw, 1.0, steps.episode_over)
    ones = steps.valid.astype(jnp.float32)
    length, lengths = accumulate(
        before.episode_length.astype(jnp.float32), ones, 1.0, steps.episode_over
    )
    after = after.replace(
        discounted_return=discounted,
        episode_return=score,
        episode_length=length.astype(jnp.int32),
    )
    rollout = Rollout(
        obs=steps.obs,
        first=steps.first,
        action=steps.action,
        log_prob=steps.log_prob,
        value=steps.value,
        reward=reward,
        discounted_return=returns,
        terminated=steps.terminated,
        truncated=steps.truncated,
        valid=steps.valid,
        last_obs=after.obs,
        last_first=after.first,
        carry=before.carry,
        last_carry=after.carry,
        env_ids=env_ids,
    )
    return after, rollout, {"over": steps.episode_over, "score": scores, "length": lengths}


# ---------------------------------------------------------------------------------------------
# One compiled program with the simulator inside


class ScanActor:
    """One device's environments, T steps to a call.

    The simulator's handle is part of the compiled program, so no two actors can share one.
    """

    def __init__(self, config: Config, policy: Policy, env: EnvBatch, ids: Array, shards: int):
        xla = env.xla()
        assert xla is not None
        self.env, self.env_ids = env, ids
        self._device = next(iter(ids.devices()))
        self._handle = jax.device_put(xla.handle, self._device)
        self.place(initial_state(env, policy))

        def collect(handle: Any, variables: Any, before: ActorState, key: Array) -> Any:
            noise = draw_noise(policy, key, ids, config.algo.num_steps)

            def step(loop: Any, noise_t: Array) -> tuple[Any, Steps]:
                handle, s = loop
                carry, action, log_prob, value = act(
                    policy, shards, variables, s.carry, s.obs, s.first, noise_t
                )
                handle, answer = xla.step(handle, action)
                row = make_row(s, action, log_prob, value, answer)
                return (handle, next_state(s, carry, answer)), row

            (handle, after), steps = jax.lax.scan(step, (handle, before), noise)
            return handle, *finish_rollout(config, ids, before, steps, after)

        self._collect = jax.jit(collect)

    def place(self, state: ActorState) -> None:
        # On the device from the start: the compiled program would be made twice otherwise.
        self.state = jax.device_put(state, self._device)

    def collect(self, variables: Any, key: Array) -> tuple[Rollout, dict[str, Array]]:
        with jax.enable_x64(self.env.needs_x64):
            out = self._collect(self._handle, variables, self.state, key)
        self._handle, self.state, rollout, episodes = out
        return rollout, episodes


def initial_state(env: EnvBatch, policy: Policy) -> ActorState:
    n = env.num_envs
    return ActorState(
        obs=env.reset(),
        first=np.ones(n, bool),
        resetting=np.zeros(n, bool),
        carry=policy.initial_carry(n),
        discounted_return=np.zeros(n, np.float32),
        episode_return=np.zeros(n, np.float32),
        episode_length=np.zeros(n, np.int32),
    )


def make_row(s: ActorState, action: Any, log_prob: Any, value: Any, answer: TimeStep) -> Steps:
    return Steps(
        obs=s.obs,
        first=s.first,
        valid=~s.resetting,
        action=action,
        log_prob=log_prob,
        value=value,
        reward=answer.reward,
        terminated=answer.terminated,
        truncated=answer.truncated,
        episode_over=answer.episode_over,
    )


def next_state(s: ActorState, carry: Carry, answer: TimeStep) -> ActorState:
    return s.replace(
        obs=answer.obs,
        first=s.resetting,  # after the reset row comes a first observation
        resetting=answer.terminated | answer.truncated,
        carry=carry,
    )


# ---------------------------------------------------------------------------------------------
# Inference and simulation in turn, from Python


class LoopActor:
    """One device's environments, a step to a call."""

    def __init__(self, config: Config, policy: Policy, env: EnvBatch, ids: Array, shards: int):
        self.env, self.env_ids = env, ids
        self.state = initial_state(env, policy)
        num_steps = config.algo.num_steps

        def act_at(
            variables: Any, carry: Carry, obs: Array, first: Array, noise: Array, t: Array
        ) -> Any:
            return act(policy, shards, variables, carry, obs, first, noise[t])

        self._noise = jax.jit(lambda key: draw_noise(policy, key, ids, num_steps))
        self._act = jax.jit(act_at)
        self._finish = jax.jit(
            lambda before, steps, after: finish_rollout(config, ids, before, steps, after)
        )

    def place(self, state: ActorState) -> None:
        self.state = jax.tree.map(np.asarray, state)

    def start(self, variables: Any, key: Array) -> None:
        self._variables, self._noise_now = variables, self._noise(key)
        self._before, self._rows = self.state, None

    def think(self, t: int) -> None:
        """Dispatch inference for step t; returns before it is done."""
        s = self.state
        self._thought = self._act(
            self._variables, s.carry, s.obs, s.first, self._noise_now, np.int32(t)
        )

    def send(self) -> None:
        """Wait for the inference and start the simulation."""
        carry, *answers = self._thought
        self._decision = [np.asarray(x) for x in answers]
        self._carry = carry
        self.env.send(self._decision[0])

    def receive(self, t: int, num_steps: int) -> None:
        """Wait for the simulation and keep the row."""
        answer = self.env.recv()
        action, log_prob, value = self._decision
        row = make_row(self.state, action, log_prob, value, answer)
        if self._rows is None:
            self._rows = jax.tree.map(
                lambda x: np.empty((num_steps, *x.shape), np.asarray(x).dtype), row
            )
        for name in Steps.__dataclass_fields__:
            getattr(self._rows, name)[t] = getattr(row, name)
        self.state = next_state(self.state, self._carry, answer)

    def finish(self) -> tuple[Rollout, dict[str, Array]]:
        self.state, rollout, episodes = self._finish(self._before, self._rows, self.state)
        self.place(self.state)
        return rollout, episodes


class Stopwatch:
    """Seconds spent under each name since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


# ---------------------------------------------------------------------------------------------
# All devices of this rank


class Collector:
    """The environments of this rank, spread over its devices."""

    def __init__(
        self,
        config: Config,
        make_policy: Callable[[EnvSpec], Policy],
        mesh: Mesh,
        ids: range,
        threads: int,
        shards: int,
    ):
        self._config, self._mesh, self._make_policy = config, mesh, make_policy
        self._devices = list(mesh.local_devices)
        self._threads = max(1, threads // len(self._devices))
        self._shards = shards
        self._blocks = [ids[p.start : p.stop] for p in split_ids(len(ids), len(self._devices))]
        self._actions: list[np.ndarray] = []
        self.watch = Stopwatch()
        self.actors: list[Any] = []  # all ScanActor or all LoopActor
        self.renew(generation=0)

    def renew(self, generation: int) -> None:
        """Make all environments anew; episodes under way are cut."""
        self.close()
        self._actions = []
        self.actors = [
            self._make_actor(device, ids, generation)
            for device, ids in zip(self._devices, self._blocks, strict=True)
        ]

    def _make_actor(self, device: jax.Device, ids: range, generation: int) -> ScanActor | LoopActor:
        env = make_env(self._config, ids, self._threads, generation)
        self.spec = env.spec
        self.policy = self._make_policy(env.spec)
        local_ids = jax.device_put(np.asarray(ids, np.int32), device)
        if env.xla() is not None and device.platform == "cpu":
            return ScanActor(self._config, self.policy, env, local_ids, self._shards)
        return LoopActor(self._config, self.policy, env, local_ids, self._shards)

    @property
    def way(self) -> str:
        """How rollouts are made, for the log."""
        if isinstance(self.actors[0], ScanActor):
            return "in one compiled program, simulator included"
        return "step by step from Python"

    # -- stepping

    def collect(self, state: TrainState, key: Array) -> tuple[Rollout, Episodes]:
        """T steps of every environment with the given parameters."""
        variables = variables_of(state.params, state.obs_moments)
        copies = [on_device((variables, key), device) for device in self._devices]
        if isinstance(self.actors[0], ScanActor):
            parts = [a.collect(v, k) for a, (v, k) in zip(self.actors, copies, strict=True)]
        else:
            parts = self._collect_in_turn(copies)
        rollout = self._join([part for part, _ in parts])
        episodes = self._episodes([jax.tree.map(np.asarray, e) for _, e in parts])
        self._remember([np.asarray(part.action) for part, _ in parts])
        return rollout, episodes

    def _collect_in_turn(self, copies: Sequence[Any]) -> list[tuple[Rollout, dict[str, Array]]]:
        num_steps = self._config.algo.num_steps
        for actor, (variables, key) in zip(self.actors, copies, strict=True):
            actor.start(variables, key)
        self.watch.start()
        for t in range(num_steps):
            for actor in self.actors:
                actor.think(t)
            for actor in self.actors:
                actor.send()
            self.watch.lap("inference")
            for actor in self.actors:
                actor.receive(t, num_steps)
            self.watch.lap("env")
        return [actor.finish() for actor in self.actors]

    def _join(self, parts: Sequence[Rollout]) -> Rollout:
        def join_field(spec: Any, *xs: Any) -> Any:
            axis = len(spec) - 1
            return jax.tree.map(lambda *leaf: join(leaf, self._mesh, axis), *xs)

        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        return jax.tree.map(join_field, rollout_specs(), *parts, is_leaf=is_spec)

    def _episodes(self, parts: Sequence[dict[str, np.ndarray]]) -> Episodes:
        over, score, length = (
            np.concatenate([part[name] for part in parts], axis=1)
            for name in ("over", "score", "length")
        )
        t, b = np.nonzero(over)
        ids = np.concatenate([np.asarray(a.env_ids) for a in self.actors])
        return Episodes(t, ids[b], score[t, b], length[t, b].astype(np.int64))

    # -- what a checkpoint keeps; environments along the first axis

    def named_state(self) -> dict[str, np.ndarray]:
        """The actors' state by name."""
        states = [jax.tree.map(np.asarray, actor.state) for actor in self.actors]
        return to_named(jax.tree.map(lambda *x: np.concatenate(x), *states))

    def take_actions(self) -> np.ndarray:
        """`[B, steps, ...]` actions since the last call, or since the environments were made."""
        taken, self._actions = self._actions, []
        if not taken:
            return np.empty((sum(map(len, self._blocks)), 0), np.uint8)
        # In C order: safetensors writes the memory as it lies.
        return np.ascontiguousarray(np.concatenate(taken, axis=1))

    def _remember(self, parts: Sequence[np.ndarray]) -> None:
        if self._config.checkpoint.envs == "fresh":
            return
        actions = np.concatenate(parts, axis=1).swapaxes(0, 1)
        space = self.spec.action
        if space.kind != "box" and max(space.nvec) <= 256:
            actions = actions.astype(np.uint8)
        self._actions.append(actions)

    def replay(self, actions: np.ndarray, named: dict[str, np.ndarray]) -> None:
        """Bring new environments to where the old ones were; `named` says where that was."""
        start = 0
        for actor in self.actors:
            rows = slice(start, start + actor.env.num_envs)
            start = rows.stop
            obs = actor.state.obs
            for t in range(actions.shape[1]):
                actor.env.send(widen(actions[rows, t]))
                obs = actor.env.recv().obs
            state = from_named(actor.state, {k: v[rows] for k, v in named.items()})
            if not np.array_equal(obs, state.obs):
                raise CheckpointError(
                    "the environments did not repeat themselves: their observation differs from "
                    "the saved one. Add --checkpoint.envs fresh to go on with new episodes"
                )
            actor.place(state)

    def close(self) -> None:
        for actor in self.actors:
            actor.env.close()


def widen(actions: np.ndarray) -> np.ndarray:
    """Stored actions as a policy gives them."""
    return actions.astype(np.int32) if actions.dtype == np.uint8 else actions

"""One device's environments, stepped by a policy.

Where the simulator can be called from a compiled program, T steps are one program (`ScanActor`);
elsewhere a Python loop alternates inference and simulation (`LoopActor`). Both compute the same.
Public names: `ActorState`, `ScanActor`, `LoopActor`, `transform_reward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from spmdrl.config import Config
from spmdrl.envs.base import EnvBatch
from spmdrl.nets.policy import Policy
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.mesh import AXIS
from spmdrl.parallel.placement import in_shards, split_envs
from spmdrl.types import Array, Carry, Rollout, TimeStep


class ActorState(struct.PyTreeNode):
    """Where B environments are between two rollouts."""

    obs: Array
    first: Bool[Array, "B"]  # obs starts an episode
    resetting: Bool[Array, "B"]  # the next step is the automatic reset
    carry: Carry
    discounted_return: Float[Array, "B"]  # of the transformed rewards, for their normaliser
    episode_return: Float[Array, "B"]  # raw
    episode_length: Int[Array, "B"]


class Steps(struct.PyTreeNode):
    """T time-major rows as they come out of the stepping, before anything is derived."""

    obs: Array
    first: Array
    valid: Array
    action: Array
    dist_params: Array
    value: Array | None  # None: the critic looks back when all rows are there
    reward: Array  # raw
    terminated: Array
    truncated: Array
    episode_over: Array


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


def draw_noise(policy: Policy, key: Array, update: Array, env_ids: Array, num_steps: int) -> Array:
    """`[T, B, ...]` noise of a whole rollout, keyed by update and global environment id."""
    key = jax.random.fold_in(key, update)
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
) -> tuple[Carry, Array, Array, Array | None]:
    """`(carry, action, dist_params, value)` of one step."""

    def of_rows(carry: Carry, obs: Array, first: Array, noise: Array) -> Any:
        carry, dist_params, value = policy.apply(variables, carry, obs, first)
        action = policy.dist.sample(dist_params, noise)
        return carry, action, dist_params, None if policy.critic_apart else value

    return in_shards(of_rows, shards, carry, obs, first, noise)


LOOK_BACK_ROWS = 4096  # at once: large matrix products, and temporaries that stay small


def look_back(
    policy: Policy, shards: int, variables: Any, steps: Steps
) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
    """`(log_prob, value)` of all rows: what no step had to wait for."""

    def values(obs: Array, first: Array) -> Array:
        at_once = max(1, LOOK_BACK_ROWS // first.shape[1])
        judge = lambda row: policy.apply(variables, (), *row)[2]  # noqa: E731
        return jax.lax.map(judge, (obs, first), batch_size=at_once)

    def of_shard(steps: Steps) -> tuple[Array, Array]:
        value = values(steps.obs, steps.first) if steps.value is None else steps.value
        return policy.dist.log_prob(steps.dist_params, steps.action), value

    if shards == 1:
        return of_shard(steps)
    found = jax.lax.map(of_shard, split_envs(P(None, AXIS), steps, shards))
    return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), found)


def accumulate(
    start: Array, x: Float[Array, "T B"], discount: float, ends: Bool[Array, "T B"]
) -> tuple[Array, Float[Array, "T B"]]:
    """`y_t = x_t + discount y_{t-1}`, from 0 again after each end; last y and all y."""

    def step(y: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        x, end = row
        y = x + discount * y
        return jnp.where(end, 0.0, y), y

    return jax.lax.scan(step, start, (x, ends))


def finish_rollout(
    config: Config,
    env_ids: Array,
    before: ActorState,
    steps: Steps,
    opinions: tuple[Array, Array],
    after: ActorState,
) -> tuple[ActorState, Rollout, dict[str, Array]]:
    """Derive what learning and reporting need from the raw rows and what was thought of them."""
    log_prob, value = opinions
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
        log_prob=log_prob,
        value=value,
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
        self.env, self.env_ids, self.num_envs = env, ids, env.num_envs
        self._device = next(iter(ids.devices()))
        self._handle = jax.device_put(xla.handle, self._device)
        self.place(initial_state(env, policy))

        def collect(
            handle: Any, variables: Any, before: ActorState, key: Array, update: Array
        ) -> Any:
            noise = draw_noise(policy, key, update, ids, config.algo.num_steps)

            def step(loop: Any, noise_t: Array) -> tuple[Any, Steps]:
                handle, s = loop
                carry, action, dist_params, value = act(
                    policy, shards, variables, s.carry, s.obs, s.first, noise_t
                )
                handle, answer = xla.step(handle, action)
                row = make_row(s, action, dist_params, value, answer)
                return (handle, next_state(s, carry, answer)), row

            (handle, after), steps = jax.lax.scan(step, (handle, before), noise)
            opinions = look_back(policy, shards, variables, steps)
            return handle, *finish_rollout(config, ids, before, steps, opinions, after)

        self._collect = private_jit(collect)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Step the environments with given actions; the observations."""
        self.env.send(action)
        return self.env.recv().obs

    def close(self) -> None:
        self.env.close()

    def place(self, state: ActorState) -> None:
        # On the device from the start: the compiled program would be made twice otherwise.
        self.state = jax.device_put(state, self._device)

    def collect(
        self, variables: Any, key: Array, update: Array
    ) -> tuple[Rollout, dict[str, Array]]:
        with jax.enable_x64(self.env.needs_x64):
            out = self._collect(self._handle, variables, self.state, key, update)
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


def make_row(s: ActorState, action: Any, dist_params: Any, value: Any, answer: TimeStep) -> Steps:
    return Steps(
        obs=s.obs,
        first=s.first,
        valid=~s.resetting,
        action=action,
        dist_params=dist_params,
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
    """One device's environments, a step to a call, in one or two halves.

    While one half is simulated, the device can think for the other. What crosses between host and
    device does so by explicit calls, so that jax's transfer guard finds what should not.
    """

    def __init__(
        self, config: Config, policy: Policy, envs: Sequence[EnvBatch], ids: Array, shards: int
    ):
        self.env_ids, self.num_envs = ids, len(ids)
        self._device = next(iter(ids.devices()))
        size, num_steps = len(ids) // len(envs), config.algo.num_steps
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(envs))]

        def noise(key: Array, update: Array) -> list[Array]:
            whole = draw_noise(policy, key, update, ids, num_steps)
            return [whole[:, cut] for cut in cuts]

        def act_at(
            variables: Any, carry: Carry, obs: Array, first: Array, noise: Array, t: Array
        ) -> Any:
            return act(policy, max(1, shards // len(envs)), variables, carry, obs, first, noise[t])

        self._noise, act_compiled = jax.jit(noise), jax.jit(act_at)
        self.halves = [
            Half(env, cut, act_compiled, self._device) for env, cut in zip(envs, cuts, strict=True)
        ]
        self.place(_side_by_side([initial_state(env, policy) for env in envs]))

        def finish(variables: Any, before: ActorState, steps: Steps, after: ActorState) -> Any:
            opinions = look_back(policy, shards, variables, steps)
            return finish_rollout(config, ids, before, steps, opinions, after)

        self._finish = jax.jit(finish)
        self._rows_of = partial(empty_rows, num_steps, self.num_envs)

    def place(self, state: ActorState) -> None:
        self.state = jax.tree.map(np.asarray, state)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Step the environments with given actions; the observations."""
        for half in self.halves:
            half.env.send(action[half.rows])
        return np.concatenate([half.env.recv().obs for half in self.halves])

    def start(self, variables: Any, key: Array, update: Array) -> None:
        self._variables = variables
        self._steps: Steps | None = None
        for half, noise in zip(self.halves, self._noise(key, update), strict=True):
            half.start(jax.tree.map(lambda x, h=half: x[h.rows], self.state), variables, noise)

    def receive(self, half: Half, t: int) -> None:
        """Wait for the half's simulation and keep the row."""
        row = half.receive()
        if self._steps is None:
            self._steps = self._rows_of(row)
        for room, x in zip(jax.tree.leaves(self._steps), jax.tree.leaves(row), strict=True):
            room[t, half.rows] = x

    def finish(self) -> tuple[Rollout, dict[str, Array]]:
        after = _side_by_side([jax.device_get(half.state) for half in self.halves])
        parts = jax.device_put((self.state, self._steps, after), self._device)
        state, rollout, episodes = self._finish(self._variables, *parts)
        self.place(jax.device_get(state))
        return rollout, episodes

    def close(self) -> None:
        for half in self.halves:
            half.env.close()


class Half:
    """Environments that are stepped together, and where they are."""

    def __init__(self, env: EnvBatch, rows: slice, act: Any, device: jax.Device):
        self.env, self.rows, self._act, self._device = env, rows, act, device

    def start(self, state: ActorState, variables: Any, noise: Array) -> None:
        carry = jax.device_put(state.carry, self._device)
        self.state, self._variables, self._noise = state.replace(carry=carry), variables, noise

    def think(self, t: int) -> None:
        """Dispatch inference for step t; returns before it is done."""
        s = self.state
        obs, first, now = jax.device_put((s.obs, s.first, np.int32(t)), self._device)
        self._thought = self._act(self._variables, s.carry, obs, first, self._noise, now)

    def send(self) -> None:
        """Wait for the inference and start the simulation."""
        self._carry, *answers = self._thought
        self._decision = jax.device_get(answers)
        self.env.send(self._decision[0])

    def receive(self) -> Steps:
        """Wait for the simulation."""
        answer = self.env.recv()
        action, dist_params, value = self._decision
        row = make_row(self.state, action, dist_params, value, answer)
        self.state = next_state(self.state, self._carry, answer)
        return row


def empty_rows(num_steps: int, num_envs: int, row: Steps) -> Steps:
    """Room for a rollout of rows like this one."""
    return jax.tree.map(
        lambda x: np.empty((num_steps, num_envs, *np.shape(x)[1:]), np.asarray(x).dtype), row
    )


def _side_by_side(states: Sequence[ActorState]) -> ActorState:
    return jax.tree.map(lambda *x: np.concatenate(x), *states)

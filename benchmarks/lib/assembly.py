"""The trainer taken apart: the only module here that knows how one is put together.

It imports jax, so import it only after `prepare_process`, which makes the settings that jax reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmdrl.acting.actors import act, draw_noise
from spmdrl.acting.collector import Collector
from spmdrl.config import Config, SyncConfig
from spmdrl.envs import make_env
from spmdrl.envs.envpool_backend import without_effect
from spmdrl.learning.stages import (
    Learner,
    apply_gradient,
    begin,
    gradient_sums,
    moment_sums,
    prepare,
    prepared_specs,
)
from spmdrl.learning.update import init_train_state, make_optimizer, make_update
from spmdrl.nets import make_policy
from spmdrl.nets.policy import variables_of
from spmdrl.parallel import mpi
from spmdrl.parallel.gather import gather_rollout, share_model
from spmdrl.parallel.mesh import local_devices, make_mesh, replicate, settle
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.sync import broadcast_tree, make_grad_sync
from spmdrl.parallel.topology import cores
from spmdrl.parallel.world import World
from spmdrl.runtime.loop import run_mesh
from spmdrl.runtime.session import start_jax_distributed
from spmdrl.types import ActionSpace, EnvSpec, Rollout

__all__ = [
    "Exchange",
    "allreduced_bytes",
    "broadcast_call",
    "calls_of_iteration",
    "made_up_rollout",
    "make_env",
    "random_actions",
    "start_jax_distributed",
    "sum_call",
    "traced_update",
    "update_alone",
    "vector_spec",
    "without_effect",
]

Call = Callable[[], Any]


# ---------------------------------------------------------------------------------------------
# Made-up data


def random_actions(space: ActionSpace, steps: int, envs: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (steps, envs, *space.shape)
    if space.kind == "box":
        assert space.low is not None
        assert space.high is not None
        return rng.uniform(space.low, space.high, shape).astype(space.dtype)
    return (rng.integers(space.nvec, size=(*shape, len(space.nvec))).reshape(shape)
            + space.start).astype(space.dtype)  # fmt: skip


def made_up_rollout(spec: EnvSpec, steps: int, envs: int) -> Rollout:
    """Random numbers: how long an update takes does not depend on what it learns."""
    rng = np.random.default_rng(0)

    def obs(*shape: int) -> np.ndarray:
        whole = (*shape, *spec.obs_shape)
        if spec.is_image:
            return rng.integers(256, size=whole, dtype=np.uint8)
        return rng.standard_normal(whole, np.float32)

    def floats() -> np.ndarray:
        return rng.standard_normal((steps, envs), np.float32)

    no = np.zeros((steps, envs), bool)
    action = random_actions(spec.action, steps, envs)
    action = action.astype(np.float32 if spec.action.kind == "box" else np.int32)
    return Rollout(
        obs=obs(steps, envs), first=no, action=action - spec.action.start, log_prob=floats() - 1,
        value=floats(), reward=floats(), discounted_return=floats(), terminated=no, truncated=no,
        valid=~no, last_obs=obs(envs), last_first=no[0], carry=(), last_carry=(),
        env_ids=np.arange(envs, dtype=np.int32),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# One rank on one device


def update_alone(config: Config) -> Callable[[], dict[str, Any]]:
    """The trainer's own update, again and again on one rollout; each call returns its metrics."""
    spec = make_env(config, [0], 1).spec
    mesh, policy = make_mesh(local_devices(1)), make_policy(config, spec)
    update = make_update(config, policy, make_grad_sync(config.sync, World(), 1), mesh)
    key = jax.random.PRNGKey(0)
    first_obs = np.zeros(spec.obs_shape, spec.obs_dtype)
    state = init_train_state(config, policy, spec, key, first_obs)
    rollout = made_up_rollout(spec, config.algo.num_steps, config.env.num_envs)
    rollout, key = replicate((rollout, key), mesh)
    states = [settle(replicate(state, mesh), mesh)]

    def call() -> dict[str, Any]:
        new, metrics = update(states.pop(), rollout, key)  # the old state is given away
        states.append(new)
        return jax.block_until_ready(metrics)

    return call


def calls_of_iteration(config: Config) -> dict[str, Call]:
    """Collecting and updating, and the parts of both, each compiled by itself."""
    parts = _Parts(config)
    return {
        "collect": lambda: parts.collector.collect(parts.state, parts.key)[0],
        "env": parts.simulate(),
        "infer": parts.infer(),
        "update": parts.update(),
        **parts.learn(),
    }


class _Parts:
    """The pieces of an iteration, with a rollout to learn from."""

    def __init__(self, config: Config):
        self.config = config
        self.mesh = make_mesh(local_devices(1))
        self.sync = make_grad_sync(config.sync, World(), 1)
        ids = range(config.env.num_envs)
        self.collector = Collector(config, partial(make_policy, config), self.mesh, ids, cores(), 1)
        self.policy = self.collector.policy
        key = jax.random.PRNGKey(0)
        state = init_train_state(config, self.policy, self.collector.spec, key)
        self.state, self.key = replicate((state, key), self.mesh)
        self.rollout, _ = self.collector.collect(self.state, self.key)
        self.learner = Learner(config, self.policy, make_optimizer(config), self.sync, 1)

    def sharded(self, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
        )

    def simulate(self) -> Call:
        """The same number of steps with constant actions and no policy."""
        env = make_env(self.config, range(self.config.env.num_envs), cores())
        env.reset()
        action = np.asarray(self.rollout.action)[0]

        def steps() -> None:
            for _ in range(self.config.algo.num_steps):
                env.send(action)
                env.recv()

        return steps

    def infer(self) -> Call:
        """T steps of the policy inside one program, without an environment."""
        num_steps, state, rollout = self.config.algo.num_steps, self.state, self.rollout
        variables = variables_of(state.params, state.obs_moments)

        def steps(variables: Any, obs: Any, first: Any, key: Any) -> Any:
            noise = draw_noise(self.policy, key, state.step, rollout.env_ids, num_steps)

            def step(now: Any, noise_t: Any) -> Any:
                obs, total = now  # a new observation each time, or XLA would compute it once
                _, _, *outputs = act(self.policy, 1, variables, (), obs, first, noise_t)
                total += sum(x.sum() for x in jax.tree.leaves(outputs))
                return (jnp.roll(obs, 1, axis=-1), total), None

            return jax.lax.scan(step, (obs, 0.0), noise)[0]

        compiled = jax.jit(steps)
        return lambda: compiled(variables, rollout.last_obs, rollout.last_first, self.key)

    def learn(self) -> dict[str, Call]:
        learner, add = self.learner, self.sync.in_step
        rows, prep = rollout_specs(), prepared_specs()

        def prepare_all(state: Any, rollout: Any, key: Any) -> Any:
            sums = add(moment_sums(learner, state, rollout), None)
            prepared, partial_sums = prepare(learner, state, rollout, key, sums)
            return prepared, add(partial_sums, sums)

        prepare_of = self.sharded(prepare_all, (P(), rows, P()), (prep, P()))
        prepared, advantages = prepare_of(self.state, self.rollout, self.key)
        gradient_of = self.sharded(
            lambda *of: add(gradient_sums(learner, *of), None), (P(), rows, prep, P()), P()
        )
        progress = replicate(begin(self.state), self.mesh)
        total = gradient_of(progress, self.rollout, prepared, advantages["powers"])
        apply_of = jax.jit(lambda p, g: apply_gradient(learner, p, g))
        return {
            "prepare": lambda: prepare_of(self.state, self.rollout, self.key),
            "gradient": lambda: gradient_of(progress, self.rollout, prepared, advantages["powers"]),
            "apply": lambda: apply_of(progress, total),
        }

    def update(self) -> Call:
        update = make_update(self.config, self.policy, self.sync, self.mesh)
        copy = jax.jit(lambda s: jax.tree.map(lambda x: x + 0, s))
        return lambda: update(copy(self.state), self.rollout, self.key)  # the state is donated


# ---------------------------------------------------------------------------------------------
# Several ranks: what travels between them, without any computing


def vector_spec(obs_shape: tuple[int, ...] = (4,), obs_dtype: str = "float32") -> EnvSpec:
    """CartPole's actions with the observations asked for."""
    action = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(2,))
    return EnvSpec(obs_shape, np.dtype(obs_dtype), action)


def tiny_state(config: Config) -> Any:
    """A train state of tiny numbers, which many sums over the ranks leave finite."""
    spec, key = vector_spec(), jax.random.PRNGKey(0)
    policy = make_policy(config, spec)
    shapes = jax.eval_shape(lambda: init_train_state(config, policy, spec, key))
    return jax.tree.map(lambda x: np.full(x.shape, 1e-12, x.dtype), shapes)


class Exchange:
    """The trainer's three ways to learn together, for one config and arrays of its shapes."""

    def __init__(self, config: Config, world: World):
        self.config, self.world, self.mesh = config, world, run_mesh(config)
        self.state = tiny_state(config)

    @property
    def params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.state.params))

    def gradients(self, minibatches: int, flat: bool = False) -> Call:
        """All minibatches' sums in one compiled loop, as in the update; `flat` joins the arrays."""
        sync = make_grad_sync(self.config.sync, self.world, 1)
        params = self.state.params
        if flat:
            params = np.concatenate([x.ravel() for x in jax.tree.leaves(params)])
        params = replicate(params, self.mesh)

        def add(tree: Any, _: None) -> Any:
            return sync.in_step(jax.tree.map(lambda x: x[None], tree), tree), None

        def update(tree: Any) -> Any:
            return jax.lax.scan(add, tree, length=minibatches)[0]

        call = jax.jit(
            jax.shard_map(update, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        )
        return lambda: jax.block_until_ready(call(params))

    def rollout_to_root(self, spec: EnvSpec, steps: int, envs: int) -> Call:
        rollout = jax.tree.map(jnp.asarray, made_up_rollout(spec, steps, envs))
        return lambda: jax.block_until_ready(gather_rollout(self.world, self.mesh, rollout))

    def model_from_root(self) -> Call:
        state = replicate(self.state, self.mesh)
        return lambda: jax.block_until_ready(share_model(self.world, self.mesh, state))


def allreduced_bytes(call: Call) -> list[int]:
    """Sizes of the allreduces that are traced while `call` runs for the first time."""
    traced: list[int] = []
    own = mpi.allreduce_after

    def counted(flat: Any, earlier: Any) -> Any:
        traced.append(flat.size * flat.dtype.itemsize)
        return own(flat, earlier)

    mpi.allreduce_after = counted
    try:
        call()
    finally:
        mpi.allreduce_after = own
    return traced


def traced_update(config: Config, world: World, envs: int) -> Any:
    """The program of the trainer's whole update, as jax traces it."""
    mesh, spec = run_mesh(config), vector_spec()
    sync = make_grad_sync(config.sync, world, 1)
    update = make_update(config, make_policy(config, spec), sync, mesh)
    rollout = made_up_rollout(spec, config.algo.num_steps, envs)
    arguments = tiny_state(config), rollout, jax.random.PRNGKey(0)
    return jax.make_jaxpr(update)(*(replicate(a, mesh) for a in arguments)).jaxpr


def sum_call(world: World, size: int, calls: int) -> Call:
    """The trainer's sum of a gradient of `size` bytes in two arrays, packing included.

    Several in one program, as in an update: what it costs to start a program is not the network's.
    """
    add = make_grad_sync(SyncConfig(), world, 1).in_step

    def one(tree: Any, _: None) -> tuple[Any, None]:
        return jax.tree.map(lambda x: x[None], add(tree, tree)), None

    all_of_them = jax.jit(lambda tree: jax.lax.scan(one, tree, length=calls)[0])
    tree = [jnp.zeros((1, size // 8)), jnp.zeros((1, size // 8))]
    return lambda: jax.block_until_ready(all_of_them(tree))


def broadcast_call(world: World, size: int) -> Call:
    tree = {"params": np.zeros(size // 4, np.float32)}
    return lambda: broadcast_tree(world, tree)

"""The trainer taken apart: the only module here that knows how one is put together.

It imports jax, so import it only after `prepare_process`, which makes the settings that jax reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmdrl.acting.steps import act, draw_noise
from spmdrl.config import Config, SyncConfig
from spmdrl.envs import make_env
from spmdrl.envs.envpool_backend import without_effect
from spmdrl.learning.stages import make_learner
from spmdrl.learning.state import init_train_state
from spmdrl.learning.update import (
    APPLY,
    GRADIENT,
    MOMENTS,
    PREPARE,
    Staged,
    Update,
    begin,
    make_update,
)
from spmdrl.nets import make_policy
from spmdrl.nets.policy import variables_of
from spmdrl.parallel import mpi
from spmdrl.parallel.gather import broadcast_tree, gather_rollout, share_model
from spmdrl.parallel.mesh import commit, local_devices, make_mesh, replicate
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.topology import cores
from spmdrl.parallel.world import World
from spmdrl.runtime.build import build_trainer, run_mesh
from spmdrl.runtime.handshake import start_jax_distributed
from spmdrl.types import ActionSpace, EnvSpec, ObsPart, Report, Rollout

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

    def obs(*shape: int) -> Any:
        def numbers(x: np.ndarray) -> np.ndarray:
            if x.dtype == np.uint8:
                return rng.integers(256, size=x.shape, dtype=np.uint8)
            return rng.standard_normal(x.shape, np.float32)

        return jax.tree.map(numbers, spec.zeros(*shape))

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


def update_of(config: Config, spec: EnvSpec, world: World, mesh: Any) -> Update:
    """The trainer's update without its environments."""
    platform = mesh.local_devices[0].platform
    sync = make_grad_sync(config.sync, world, len(mesh.local_devices))
    policy = make_policy(config, spec, platform)
    return make_update(make_learner(config, policy, sync, platform, spec.has_image), mesh)


def update_alone(config: Config) -> Callable[[], Report]:
    """The trainer's own update, again and again on one rollout; each call returns its report."""
    spec, mesh = make_env(config, [0], 1).spec, make_mesh(local_devices(1))
    update, key = update_of(config, spec, World(), mesh), jax.random.PRNGKey(0)
    state = init_train_state(config, make_policy(config, spec), spec, key, spec.zeros())
    rollout = made_up_rollout(spec, config.algo.num_steps, config.env.num_envs)
    rollout, key = replicate((rollout, key), mesh)
    states = [commit(replicate(state, mesh), mesh)]

    def call() -> Report:
        new, report = update(states.pop(), rollout, key)  # the old state is given away
        states.append(new)
        return jax.block_until_ready(report)

    return call


def calls_of_iteration(config: Config) -> dict[str, Call]:
    """Collecting and updating, and the parts of both, each compiled by itself."""
    parts = _Parts(config)
    return {
        "collect": lambda: parts.trainer.collect()[0],
        "env": parts.simulate(),
        "infer": parts.infer(),
        "update": parts.update(),
        **parts.learn(),
    }


class _Parts:
    """The pieces of an iteration, with a rollout to learn from."""

    def __init__(self, config: Config):
        self.config = config
        self.trainer = build_trainer(config, threads=cores())
        self.rollout, _ = self.trainer.collect()

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
        num_steps, rollout = self.config.algo.num_steps, self.rollout
        state, policy = self.trainer.state, self.trainer.learner.policy
        variables = variables_of(state.params, state.obs_moments)

        def steps(variables: Any, obs: Any, first: Any, key: Any) -> Any:
            noise = draw_noise(policy, key, state.step, rollout.env_ids, num_steps)

            def step(now: Any, noise_t: Any) -> Any:
                obs, total = now  # a new observation each time, or XLA would compute it once
                _, _, *outputs = act(policy, 1, variables, (), obs, first, noise_t)
                total += sum(x.sum() for x in jax.tree.leaves(outputs))
                return (jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1), obs), total), None

            return jax.lax.scan(step, (obs, 0.0), noise)[0]

        compiled, key = jax.jit(steps), self.trainer.act_key
        return lambda: compiled(variables, rollout.last_obs, rollout.last_first, key)

    def learn(self) -> dict[str, Call]:
        trainer, rollout, state = self.trainer, self.rollout, self.trainer.state
        run, key = Staged(trainer.learner, trainer.mesh), trainer.update_key
        known: Any = run.place({"none": np.zeros((), np.float32)})
        if trainer.learner.normalizes:
            known = run(MOMENTS, state, rollout)[1]
        prepared, sums = run(PREPARE, state, rollout, key, known)
        progress = run.place(begin(trainer.learner, state))
        vector = run(GRADIENT, progress, rollout, prepared, sums)[1]
        return {
            "prepare": lambda: run(PREPARE, state, rollout, key, known),
            "gradient": lambda: run(GRADIENT, progress, rollout, prepared, sums),
            "apply": lambda: run(APPLY, copied(progress), vector, sums),  # it is donated
        }

    def update(self) -> Call:
        trainer, state = self.trainer, copied(self.trainer.state)
        return lambda: trainer.update(copied(state), self.rollout, trainer.update_key)


@jax.jit
def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


# ---------------------------------------------------------------------------------------------
# Several ranks: what travels between them, without any computing


def vector_spec(obs_shape: tuple[int, ...] = (4,), obs_dtype: str = "float32") -> EnvSpec:
    """CartPole's actions with the observations asked for."""
    action = ActionSpace("discrete", (), np.dtype(np.int32), nvec=(2,))
    return EnvSpec(ObsPart(obs_shape, np.dtype(obs_dtype)), action)


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

    def counted(flat: Any, earlier: Any, comm: Any = None) -> Any:
        traced.append(flat.size * flat.dtype.itemsize)
        return own(flat, earlier, comm)

    mpi.allreduce_after = counted
    try:
        call()
    finally:
        mpi.allreduce_after = own
    return traced


def traced_update(config: Config, world: World, envs: int) -> Any:
    """The program of the trainer's whole update, as jax traces it."""
    mesh, spec = run_mesh(config), vector_spec()
    update = update_of(config, spec, world, mesh)
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

"""Compiles the programs of a run for GPUs that are only described, and says what came out.

Runs in an environment that has jax's CUDA plugin: that compiles without a driver or a device. It
shows what a GPU would do, not how long it would take. `python -m benchmarks.lib.described_gpus
CASE` prints JSON; `benchmarks.gpu_programs` is the command for people.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # the described GPUs are never started

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.lib.hlo import flops, read_program
from spmdrl.acting.step_programs import Programs, blank_answers, make_programs
from spmdrl.acting.stepped import groups_of
from spmdrl.acting.steps import ActorState
from spmdrl.config import Config, load
from spmdrl.learning.stages import Learner, make_learner
from spmdrl.learning.state import init_train_state
from spmdrl.learning.update import Stage, Staged, make_update, run_update, specs_of
from spmdrl.nets import make_policy
from spmdrl.nets.policy import Policy, variables_of
from spmdrl.parallel.mesh import AXIS
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.sync import make_grad_sync
from spmdrl.parallel.world import World
from spmdrl.types import ActionSpace, EnvSpec, ObsPart, TrainState

__all__ = ["SPECS", "Program", "compile_case", "described_mesh"]

# Of a card: what the compiler asks of it.
LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""
CARDS = {
    "A100": (
        "shared_memory_per_core: 167936 core_count: 108 fpus_per_core: 64 "
        "memory_bandwidth: 1555200000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41 "
        "device_memory_size: 42331013120 shared_memory_per_block_optin: 166912 "
        "cuda_compute_capability { major: 8 }",
        "NVIDIA A100-SXM4-40GB",
    ),
    "H100": (
        "shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128 "
        "memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 "
        "device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 "
        "cuda_compute_capability { major: 9 }",
        "NVIDIA H100 80GB HBM3",
    ),
}


def described_mesh(card: str, devices: int) -> Mesh:
    """So many GPUs of one machine."""
    info, title = CARDS[card]
    target = (
        f'gpu_device_info {{ {info} {LIMITS} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{title}"'
    )
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target, topology=f"1x1x{devices}"
    )
    return Mesh(np.array(found.devices), (AXIS,))


# ---------------------------------------------------------------------------------------------
# What the environments show and accept, so that no simulator has to be installed


def _discrete(obs: ObsPart, choices: int) -> EnvSpec:
    return EnvSpec(obs, ActionSpace("discrete", (), np.dtype(np.int32), nvec=(choices,)))


def _continuous(numbers: int, joints: int) -> EnvSpec:
    high = np.ones(joints, np.float32)
    action = ActionSpace("box", (joints,), np.dtype(np.float32), low=-high, high=high)
    return EnvSpec(ObsPart((numbers,), np.dtype(np.float32)), action)


SPECS = {
    "Pong-v5": _discrete(ObsPart((4, 84, 84), np.dtype(np.uint8)), 6),
    "HalfCheetah-v4": _continuous(17, 6),
    "Ant-v4": _continuous(27, 8),
    "CartPole-v1": _discrete(ObsPart((4,), np.dtype(np.float32)), 2),
}

# ---------------------------------------------------------------------------------------------
# The programs of a run, with the shapes of their arguments


class Program(NamedTuple):
    function: Any  # jitted
    arguments: tuple[Any, ...]
    times: int = 1  # calls in one update


class Job:
    """A config on described devices."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh, self.spec = config, mesh, SPECS[config.env.id]
        self.policy: Policy = make_policy(config, self.spec, "gpu")
        self.key = jax.ShapeDtypeStruct((2,), np.uint32)
        self.state: TrainState = jax.eval_shape(
            partial(init_train_state, config, self.policy, self.spec), self.key
        )

    def programs(self, names: list[str]) -> Iterator[tuple[str, Program]]:
        for name in names:
            if name == "staged":
                yield from self.staged()
            else:
                yield name, getattr(self, name)()

    def update(self) -> Program:
        """Fused: one program over all devices."""
        learner, specs = self._learner(World()), (P(), rollout_specs(), P())
        arguments = (self.state, self._rollout(), self.key)
        placed = [self._placed(*pair) for pair in zip(specs, arguments, strict=True)]
        return Program(make_update(learner, self.mesh), tuple(placed))

    def staged(self) -> Iterator[tuple[str, Program]]:
        """The same as one program for each stage, as where MPI adds up between them."""
        learner = self._learner(_TwoRanks())
        recorder = Recorder(learner, self)

        def record(*arguments: Any) -> None:
            run_update(learner, recorder, *arguments)

        jax.eval_shape(record, self.state, self._rollout(), self.key)
        for name, program in recorder.programs.items():
            yield f"staged {name}", program

    def act(self) -> Program:
        """One step of one of the groups that take turns on a device."""
        envs = self._envs
        groups = groups_of(envs, 1)
        program, arguments = self._acting(envs, groups)
        return Program(program, self._on_first(arguments), self.config.algo.num_steps * groups)

    def finish(self) -> Program:
        """Log-probabilities, values and returns after the last step."""
        program, arguments = self._finishing(self._envs)
        return Program(program, self._on_first(arguments))

    # -- shapes, each from the program that makes it

    @property
    def _envs(self) -> int:
        """Of each device."""
        return self.config.env.num_envs // self.mesh.size

    def _learner(self, world: Any) -> Learner:
        sync = make_grad_sync(self.config.sync, world, self.mesh.size)
        return make_learner(self.config, self.policy, sync, "gpu", self.spec.has_image)

    def _acting(self, envs: int, groups: int) -> tuple[Any, tuple[Any, ...]]:
        programs, zeros = self._programs(envs, groups), self.spec.zeros(envs // groups)
        step = jax.ShapeDtypeStruct((), np.int32)
        noise = jax.eval_shape(programs.noise, self.key, step)[0]
        carry = self._carry(envs // groups)
        seen = _shapes(programs.seen.pack((zeros, np.ones(envs // groups, bool))))
        room = jax.eval_shape(programs.room, self._variables, carry, seen, noise)
        return programs.act, (self._variables, carry, room, seen, noise, step, step)

    def _finishing(self, envs: int) -> tuple[Any, tuple[Any, ...]]:
        _, (variables, carry, room, seen, *_) = self._acting(envs, 1)
        programs = self._programs(envs, 1)
        said = blank_answers(self.config.algo.num_steps, envs)
        answers = _shapes(programs.answers.pack(said))
        number = jax.ShapeDtypeStruct((envs,), np.float32)
        before = ActorState(
            obs=(), first=(), resetting=(), carry=carry, discounted_return=number,
            episode_return=number, episode_length=jax.ShapeDtypeStruct((envs,), np.int32),
        )  # fmt: skip
        return programs.finish, (variables, before, *room, answers, [seen], [carry])

    def _programs(self, envs: int, groups: int) -> Programs:
        ids, device = np.arange(envs, dtype=np.int32), self.mesh.devices.flat[0]
        example = (self.spec.zeros(1), np.ones(1, bool))
        return make_programs(self.config, self.policy, example, ids, 1, groups, device)

    def _carry(self, envs: int) -> Any:
        return jax.eval_shape(lambda: self.policy.initial_carry(envs))

    def _rollout(self) -> Any:
        program, arguments = self._finishing(self.config.env.num_envs)
        return jax.eval_shape(program, *arguments)[1]

    @property
    def _variables(self) -> Any:
        return variables_of(self.state.params, self.state.obs_moments)

    def _placed(self, specs: Any, tree: Any) -> Any:
        def place(spec: P, part: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda x: _shape(x, sharding), part)

        return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))

    def _on_first(self, tree: Any) -> Any:
        alone = NamedSharding(Mesh(self.mesh.devices.flat[:1], (AXIS,)), P())
        return jax.tree.map(lambda x: _shape(x, alone), tree)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _shape(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class _TwoRanks(World):
    """Enough of a second rank to be compiled for; nothing is sent."""

    size, thread_level = 2, "single"  # then the sum over ranks is between the programs


class Recorder:
    """Runs the stages of an update on shapes, and keeps each with its arguments."""

    def __init__(self, learner: Learner, job: Job):
        self.programs: dict[str, Program] = {}
        self._job, self._specs = job, specs_of(learner)
        self._staged, self._times = Staged(learner, job.mesh), 1

    def place(self, tree: Any) -> Any:
        return _shapes(tree)

    def __call__(self, stage: Stage, *args: Any, after: Any = None) -> tuple[Any, Any]:
        function = self._staged.compile(stage)
        kinds = [self._specs[kind] for kind in stage.takes]
        placed = [self._job._placed(*pair) for pair in zip(kinds, args, strict=True)]
        name = stage.function.__name__
        self.programs[name] = Program(function, tuple(placed), self._times)
        kept, sums = jax.eval_shape(function, *args)
        # The sum over ranks takes the axis of shards away.
        total = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sums)
        return kept, total

    def repeat(self, step: Callable[..., Any], start: Any, count: int) -> tuple[Any, Any]:
        self._times = count
        progress, report = step(start)
        self._times = 1
        many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), report)
        return progress, many


# ---------------------------------------------------------------------------------------------
# What came out


def describe(program: Program) -> dict[str, Any]:
    """Counts of one call; bytes and operations are those of one device."""
    traced = program.function.trace(*program.arguments)
    compiled = traced.lower().compile()
    work, memory = read_program(compiled.as_text()), compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "times": program.times,
        "launches": work.launches,
        "loops": work.loops,
        "kinds": dict(work.kinds.most_common()),
        "collectives": work.collectives,
        "collective_bytes": work.collective_bytes,
        "copies": work.copies,
        "moved_bytes": work.moved_bytes,
        "flops": flops(traced.jaxpr),
        "argument_bytes": memory.argument_size_in_bytes,
        "reused_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": held - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
    }


def compile_case(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`case` has config, flags, card, devices and the names of the programs."""
    config = load([case["config"], *case["flags"]])
    job = Job(config, described_mesh(case["card"], case["devices"]))
    return {name: describe(program) for name, program in job.programs(case["programs"])}


if __name__ == "__main__":
    print(json.dumps(compile_case(json.loads(sys.argv[1]))))

"""One rollout in, a new train state out: the update, sharded over the local devices.

`run_update` puts the stages in order, once. `Fused` traces them into one compiled program; `Staged`
compiles each and lets the sums over ranks travel between the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdrl.learning.stages import (
    ROWS,
    Learner,
    Prepared,
    Progress,
    apply_gradient,
    finish,
    flat_state,
    gradient_sums,
    moment_sums,
    prepare,
)
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.mesh import on_device, replicate
from spmdrl.parallel.placement import rollout_specs
from spmdrl.types import Array, Report, Rollout, TrainState

__all__ = ["Fused", "Staged", "Update", "make_update", "run_update"]

Update = Callable[[TrainState, Rollout, Array], tuple[TrainState, Report]]


class Stage(NamedTuple):
    """A stage, the kinds of its arguments and of what it keeps; see `specs_of`."""

    function: Callable[..., tuple[Any, Any]]
    takes: tuple[str, ...]
    keeps: str = "same"
    donates: tuple[int, ...] = ()  # arguments whose memory the result may take


MOMENTS = Stage(moment_sums, ("same", "rollout"))
PREPARE = Stage(prepare, ("same", "rollout", "same", "same"), keeps="prepared")
GRADIENT = Stage(gradient_sums, ("same", "rollout", "prepared", "same"))
APPLY = Stage(apply_gradient, ("same", "same", "same"), donates=(0,))
FINISH = Stage(finish, ("same", "same", "prepared", "same", "same"))


def specs_of(learner: Learner) -> dict[str, Any]:
    """Where the environments stand in each kind of argument."""
    same: Any = P()
    prepared = Prepared(ROWS, learner.selector.spec, same, same)
    return {"same": same, "rollout": rollout_specs(), "prepared": prepared}


@runtime_checkable
class Runner(Protocol):
    """How stages are run and their sums added up."""

    def place(self, tree: Any) -> Any: ...
    def __call__(self, stage: Stage, *args: Any, after: Any = None) -> tuple[Any, Any]: ...
    def repeat(self, step: Callable[..., Any], start: Any, count: int) -> tuple[Any, Any]: ...


def run_update(
    learner: Learner, run: Runner, state: TrainState, rollout: Rollout, key: Array
) -> tuple[TrainState, Report]:
    """`after` is the sum before, which must be complete on every rank before the next begins."""
    known: Any = run.place({"none": np.zeros((), np.float32)})
    if learner.normalizes:
        _, known = run(MOMENTS, state, rollout)
    prepared, sums = run(PREPARE, state, rollout, key, known, after=known)

    def step(progress: Progress) -> tuple[Progress, dict[str, Array]]:
        _, vector = run(GRADIENT, progress, rollout, prepared, sums, after=sums)
        return run(APPLY, progress, vector, sums)[0]

    progress, reports = run.repeat(step, run.place(begin(learner, state)), learner.num_gradients)
    before = state if learner.config.lag else None
    return run(FINISH, before, progress, prepared, sums, reports)[0]


def begin(learner: Learner, state: TrainState) -> Progress:
    skipped, index = (np.zeros((), np.int32) for _ in range(2))  # each donated on its own
    state = flat_state(learner, state.replace(behind=()))  # no gradient reads or changes `behind`
    return Progress(state=state, stopped=np.zeros((), bool), skipped=skipped, index=index)


@dataclass(frozen=True)
class Fused:
    """Inside one compiled program."""

    learner: Learner

    def place(self, tree: Any) -> Any:
        return jax.tree.map(jnp.asarray, tree)

    def __call__(self, stage: Stage, *args: Any, after: Any = None) -> tuple[Any, Any]:
        kept, partial_sums = self.learner.run(stage.function, *args)
        empty = not jax.tree.leaves(partial_sums)
        return kept, () if empty else self.learner.sync.in_step(partial_sums, after)

    def repeat(self, step: Callable[..., Any], start: Any, count: int) -> tuple[Any, Any]:
        if self.learner.flat_state:
            return repeat_flat(step, start, count)
        return jax.lax.scan(lambda progress, _: step(progress), start, length=count)


def repeat_flat(
    step: Callable[[Progress], tuple[Progress, Any]], start: Progress, count: int
) -> tuple[Progress, Any]:
    """With all reports of a step as one array: else to write down each is a launch of its own."""
    shapes = jax.eval_shape(step, start)[1]
    _, restore = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    def flat_step(progress: Progress, _: None) -> tuple[Progress, Array]:
        progress, report = step(progress)
        return progress, ravel_pytree(report)[0]

    end, rows = jax.lax.scan(flat_step, start, length=count)
    return end, jax.vmap(restore)(rows)


class Staged:
    """One compiled program per stage, and the sums over ranks between them."""

    def __init__(self, learner: Learner, mesh: Mesh):
        self._learner, self._mesh = learner, mesh
        self._specs = specs_of(learner)
        self._compiled: dict[Stage, Callable[..., Any]] = {}

    def place(self, tree: Any) -> Any:
        return replicate(tree, self._mesh)

    def __call__(self, stage: Stage, *args: Any, after: Any = None) -> tuple[Any, Any]:
        if stage not in self._compiled:
            self._compiled[stage] = self.compile(stage)
        kept, sums = self._compiled[stage](*args)
        between, device = self._learner.sync.between, self._mesh.local_devices[0]
        if between is None or not jax.tree.leaves(sums):
            return kept, sums
        return kept, replicate(between(on_device(sums, device)), self._mesh)

    def compile(self, stage: Stage) -> Callable[..., Any]:
        def on_devices(*args: Any) -> tuple[Any, Any]:
            kept, partial_sums = self._learner.run(stage.function, *args)
            empty = not jax.tree.leaves(partial_sums)
            return kept, () if empty else self._learner.sync.in_step(partial_sums, None)

        ins = tuple(self._specs[kind] for kind in stage.takes)
        outs = (self._specs[stage.keeps], P())
        donates = () if self._learner.config.lag else stage.donates
        return jax.jit(_sharded(on_devices, self._mesh, ins, outs), donate_argnums=donates)

    def repeat(self, step: Callable[..., Any], start: Any, count: int) -> tuple[Any, Any]:
        progress, reports = start, []
        for _ in range(count):
            progress, report = step(progress)
            reports.append(report)
        return progress, jax.tree.map(lambda *x: jnp.stack(x), *reports)


def make_update(learner: Learner, mesh: Mesh) -> Update:
    if learner.sync.between is not None:
        staged = Staged(learner, mesh)
        return lambda state, rollout, key: run_update(
            learner, staged, state, rollout, replicate(key, mesh)
        )

    def update(state: TrainState, rollout: Rollout, key: Array) -> Any:
        return run_update(learner, Fused(learner), state, rollout, key)

    sharded = _sharded(update, mesh, (P(), rollout_specs(), P()), P())
    compiled = private_jit if learner.sync.mpi_in_step else jax.jit
    # The old state's memory becomes the new one's, unless its model acts again.
    return compiled(sharded, donate_argnums=() if learner.config.lag else (0,))


def _sharded(function: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any) -> Callable[..., Any]:
    # check_vma=False: gradients with respect to the replicated parameters stay local, as in
    # pmap; the sum over devices is ours to take, once, together with everything else.
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)

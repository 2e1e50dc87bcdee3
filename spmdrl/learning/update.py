"""One rollout in, a new train state out: the PPO update, sharded over the local devices.

`fused` puts the stages into one compiled program; `staged` compiles each and lets the sums travel
between the calls. Public names: `init_train_state`, `make_optimizer`, `make_update`, `Update`,
`params_sha256`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdrl.config import Config
from spmdrl.learning.stages import (
    Learner,
    Progress,
    apply_gradient,
    begin,
    finish,
    gradient_sums,
    moment_sums,
    no_moments,
    prepare,
    prepared_specs,
)
from spmdrl.nets import moments
from spmdrl.nets.policy import Policy
from spmdrl.parallel.compile_cache import private_jit
from spmdrl.parallel.mesh import on_device, replicate
from spmdrl.parallel.placement import rollout_specs
from spmdrl.parallel.sync import GradSync
from spmdrl.types import Array, EnvSpec, Rollout, TrainState

Update = Callable[[TrainState, Rollout, Array], tuple[TrainState, dict[str, Any]]]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Everything but the learning rate, which follows the update count."""
    optim = config.optim
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.scale_by_adam(optim.adam_b1, optim.adam_b2, optim.adam_eps),
    )


def init_train_state(
    config: Config, policy: Policy, spec: EnvSpec, key: Array, first_obs: np.ndarray | None = None
) -> TrainState:
    """`first_obs` is any observation; the moments count from it, against cancellation."""
    params = policy.init(key)
    obs_moments = moments.init((0,))
    if config.env.normalize_obs:
        obs_moments = moments.init(spec.obs_shape, first_obs)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(config).init(ravel_pytree(params)[0]),
        obs_moments=obs_moments,
        reward_moments=moments.init(()),
        behind=(params, obs_moments) if config.overlap else (),
    )


def params_sha256(params: Any) -> str:
    """Fingerprint of every bit of the parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------
# Putting the stages together


def make_update(config: Config, policy: Policy, sync: GradSync, mesh: Mesh) -> Update:
    shards = config.sync.shards // sync.num_devices if config.sync.deterministic else 1
    learner = Learner(config, policy, make_optimizer(config), sync, shards)
    return _fused(learner, mesh) if sync.between is None else _staged(learner, mesh)


def _fused(learner: Learner, mesh: Mesh) -> Update:
    add = learner.sync.in_step

    def update(state: TrainState, rollout: Rollout, key: Array) -> Any:
        sums = no_moments(learner)
        if learner.normalizes:
            sums = add(moment_sums(learner, state, rollout), None)
        prepared, partial = prepare(learner, state, rollout, key, sums)
        advantages = add(partial, sums)

        def step(progress: Progress, _: None) -> tuple[Progress, dict[str, Array]]:
            partial = gradient_sums(learner, progress, rollout, prepared, advantages["powers"])
            return apply_gradient(learner, progress, add(partial, advantages))

        progress, reports = jax.lax.scan(step, begin(state), length=learner.num_gradients)
        return finish(learner, state, progress, prepared, advantages["fit"], reports)

    # check_vma=False: gradients with respect to the replicated parameters stay local, as in
    # pmap; the sum over devices is ours to take, once, together with everything else.
    sharded = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), rollout_specs(), P()), out_specs=P(), check_vma=False
    )
    compiled = private_jit if learner.sync.mpi_in_step else jax.jit
    return compiled(sharded, donate_argnums=_donated(learner))


def _donated(learner: Learner) -> tuple[int, ...]:
    """The old state's memory becomes the new one's, unless actors still use it."""
    return () if learner.config.overlap else (0,)


def _staged(learner: Learner, mesh: Mesh) -> Update:
    add, between = learner.sync.in_step, learner.sync.between
    assert between is not None
    rows, prep = rollout_specs(), prepared_specs()

    def compiled(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )

    def prepare_stage(state: Any, rollout: Any, key: Any, sums: Any) -> Any:
        prepared, partial = prepare(learner, state, rollout, key, sums)
        return prepared, add(partial, None)

    moments_of = compiled(lambda s, r: add(moment_sums(learner, s, r), None), (P(), rows), P())
    prepare_of = compiled(prepare_stage, (P(), rows, P(), P()), (prep, P()))
    gradient_of = compiled(
        lambda p, r, q, a: add(gradient_sums(learner, p, r, q, a), None),
        (P(), rows, prep, P()),
        P(),
    )
    apply = jax.jit(lambda p, g: apply_gradient(learner, p, g), donate_argnums=_donated(learner))
    finish_of = compiled(
        lambda s, p, q, f, r: finish(learner, s, p, q, f, r), (P(), P(), prep, P(), P()), P()
    )
    device, nothing = mesh.local_devices[0], replicate(no_moments(learner), mesh)

    def total(tree: Any) -> Any:
        return replicate(between(on_device(tree, device)), mesh)

    def update(state: TrainState, rollout: Rollout, key: Array) -> Any:
        key = replicate(key, mesh)
        sums = total(moments_of(state, rollout)) if learner.normalizes else nothing
        prepared, partial = prepare_of(state, rollout, key, sums)
        advantages = total(partial)
        progress, reports = replicate(begin(state), mesh), []
        for _ in range(learner.num_gradients):
            partial = gradient_of(progress, rollout, prepared, advantages["powers"])
            progress, report = apply(progress, total(partial))
            reports.append(report)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *reports)
        before = state if learner.config.overlap else None
        return finish_of(before, progress, prepared, advantages["fit"], stacked)

    return update

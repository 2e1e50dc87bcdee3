"""A trained policy in its environments: what evaluating and recording have in common.

Public names: `find_checkpoint`, `load_model`, `make_chooser`, `play_steps`, `PlayedStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmdrl.config import Config, ConfigError
from spmdrl.runtime.checkpoint import Checkpointer, CheckpointError, from_named, read_snapshot

if TYPE_CHECKING:  # they bring flax, and input is checked before that is loaded
    from spmdrl.envs.base import EnvBatch
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec, TimeStep


class PlayedStep(NamedTuple):
    """One step of B environments."""

    obs: np.ndarray  # what the policy saw
    action: np.ndarray  # as the policy gave it
    answer: TimeStep
    valid: np.ndarray  # False where the environment reset itself and ignored the action


def find_checkpoint(run_dir: Path, step: int | None, best: bool = False) -> Path:
    """The folder of the newest, the best, or a given checkpoint."""
    checkpointer = Checkpointer(run_dir / "checkpoints", keep=1)
    steps = checkpointer.steps()
    if not steps:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    if best and step is None:
        step = checkpointer.best_step()
        if step is None:
            raise ConfigError(
                f"no checkpoint of {run_dir} knows its return, so none is the best; play the newest"
            )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        have = ", ".join(map(str, steps))
        raise ConfigError(f"{run_dir} has no checkpoint of update {wanted}; there are: {have}")
    return checkpointer.path(wanted)


def load_model(config: Config, spec: EnvSpec, checkpoint: Path) -> tuple[Policy, Any]:
    """`(policy, variables)` as trained; the observation moments are those of the checkpoint."""
    import jax
    import jax.numpy as jnp

    from spmdrl.nets import make_policy, moments
    from spmdrl.nets.policy import variables_of

    policy = make_policy(config, spec)
    shape = spec.obs_shape if config.env.normalize_obs else (0,)
    template = jax.eval_shape(
        lambda: {"params": policy.init(jax.random.key(0)), "obs_moments": moments.init(shape)}
    )
    try:
        model = from_named(template, read_snapshot(checkpoint).arrays["params"])
    except CheckpointError as error:
        raise ConfigError(
            f"{checkpoint} cannot be played ({error}); name another one with --checkpoint"
        ) from error
    model = jax.tree.map(jnp.asarray, model)
    return policy, variables_of(model["params"], model["obs_moments"])


def make_chooser(
    policy: Policy, variables: Any, deterministic: bool, seed: int
) -> Callable[..., Any]:
    """`choose(carry, obs, first, ids, t) -> (carry, action)`, compiled.

    Sampled actions draw their noise by the environment's id, whoever its neighbours are.
    """
    import jax

    key = jax.random.key(seed)

    def choose(carry: Any, obs: Any, first: Any, ids: Any, t: Any) -> tuple[Any, Any]:
        carry, dist_params, _ = policy.apply(variables, carry, obs, first)
        if deterministic:
            return carry, policy.dist.mode(dist_params)
        now = jax.random.fold_in(key, t)
        noise = jax.vmap(lambda g: policy.dist.noise(jax.random.fold_in(now, g), ()))(ids)
        return carry, policy.dist.sample(dist_params, noise)

    return jax.jit(choose)


def play_steps(
    env: EnvBatch, policy: Policy, choose: Callable[..., Any], ids: Sequence[int], max_steps: int
) -> Iterator[PlayedStep]:
    """Step the environments from their first reset on, until the caller has seen enough."""
    count = env.num_envs
    obs, carry, rows = env.reset(), policy.initial_carry(count), np.asarray(ids, np.int32)
    first, resetting = np.ones(count, bool), np.zeros(count, bool)
    for t in range(max_steps):
        carry, action = choose(carry, obs, first, rows, np.int32(t))
        action = np.asarray(action)
        env.send(action)
        answer = env.recv()
        yield PlayedStep(obs, action, answer, ~resetting)
        obs, first, resetting = answer.obs, resetting, answer.terminated | answer.truncated

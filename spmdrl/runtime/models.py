"""Trained models out of run directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config, ConfigError, parse_json
from spmdrl.runtime.checkpoint import (
    MANIFEST,
    Checkpointer,
    CheckpointError,
    from_named,
    read_snapshot,
)
from spmdrl.runtime.files import read_plain

if TYPE_CHECKING:  # they bring flax, and input is checked before that is loaded
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec

__all__ = ["describe_checkpoint", "find_checkpoint", "load_model"]


def find_checkpoint(run_dir: Path, which: str = "latest") -> Path:
    """The folder of the latest or best checkpoint, or of that of update `which`."""
    if which not in ("latest", "best") and not which.isdecimal():
        raise ConfigError(f"--checkpoint is {which!r}, but must be latest, best or an update")
    checkpointer = Checkpointer(run_dir / "checkpoints", keep=1)
    steps = checkpointer.steps()
    if not steps:
        raise ConfigError(f"{run_dir} has no checkpoint yet")
    if which == "latest":
        return checkpointer.path(steps[-1])
    if which == "best":
        return checkpointer.path(_best(checkpointer, run_dir))
    if int(which) not in steps:
        have = ", ".join(map(str, steps))
        raise ConfigError(f"{run_dir} has no checkpoint of update {which}; there are: {have}")
    return checkpointer.path(int(which))


def _best(checkpointer: Checkpointer, run_dir: Path) -> int:
    step = checkpointer.best_step()
    if step is None:
        raise ConfigError(
            f"no checkpoint in {run_dir} has a recorded return; use --checkpoint latest"
        )
    return step


def describe_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Which one it is, as JSON."""
    try:
        manifest = parse_json(read_plain(checkpoint / MANIFEST))
        return {"path": str(checkpoint), "update": manifest["step"], "sha256": manifest["sha256"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{checkpoint} is damaged ({error!r}); name another one with --checkpoint"
        ) from error


def load_model(config: Config, spec: EnvSpec, checkpoint: Path) -> tuple[Policy, Any]:
    """`(policy, variables)` as trained; the observation moments are those of the checkpoint."""
    import jax
    import jax.numpy as jnp

    from spmdrl.nets import make_policy, moments
    from spmdrl.nets.policy import variables_of

    policy = make_policy(config, spec)
    template = jax.eval_shape(
        lambda: {
            "params": policy.init(jax.random.key(0)),
            "obs_moments": moments.of_observations(config.env.normalize_obs, spec),
        }
    )
    try:
        model = from_named(template, read_snapshot(checkpoint).arrays["params"])
    except CheckpointError as error:
        raise ConfigError(
            f"{checkpoint} cannot be played ({error}); name another one with --checkpoint"
        ) from error
    model = jax.tree.map(jnp.asarray, model)
    return policy, variables_of(model["params"], model["obs_moments"])

"""Begin with the parameters of another run: `--init-from RUN_DIR[:CHECKPOINT]`.

Parameters and observation moments are taken over, reward moments too where both runs normalise
rewards. The optimiser, the schedules and the count of steps begin anew, so everything that does not
change the network may be another: the learning rate, the number of environments, the task.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config, ConfigError
from spmdrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    Snapshot,
    from_named,
    read_snapshot,
)
from spmdrl.runtime.files import write_json
from spmdrl.runtime.models import find_checkpoint
from spmdrl.runtime.rundir import read_run

if TYPE_CHECKING:
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec

__all__ = ["INIT_FILE", "check_init_from", "initial_model", "read_source", "source_of"]

INIT_FILE = "init.json"  # in the new run: where its first parameters came from
REWARD = "reward_moments/"


def source_of(text: str) -> Path:
    """The checkpoint's folder that RUN_DIR[:CHECKPOINT] names, by default the latest."""
    run_dir, colon, which = text.rpartition(":")
    if not colon or not (which in ("latest", "best") or which.isdecimal()):
        run_dir, which = text, "latest"
    try:
        read_run(run_dir)
        return find_checkpoint(Path(run_dir), which)
    except ConfigError as error:
        raise ConfigError(f"init_from {text}: {error}") from error


def check_init_from(config: Config) -> None:
    """Raise ConfigError if the other run is not there; a run that has begun does not need it."""
    begins = config.restart or not _has_begun(config.run_dir)
    if config.init_from is not None and begins:
        source_of(config.init_from)


def _has_begun(run_dir: str | Path | None) -> bool:
    return run_dir is not None and bool(Checkpointer(Path(run_dir) / "checkpoints", 1).steps())


def read_source(config: Config, run_dir: Path) -> Snapshot | None:
    """What this run begins with, written down; None if it begins by itself or has begun."""
    if config.init_from is None or _has_begun(run_dir):
        return None
    source = source_of(config.init_from)
    try:
        snapshot = read_snapshot(source)
    except CheckpointError as error:
        raise ConfigError(f"init_from {config.init_from}: {source} is damaged ({error})") from error
    about = {"checkpoint": str(source), "params_sha256": snapshot.meta.get("params_sha256")}
    write_json(run_dir / INIT_FILE, {"init_from": config.init_from, **about})
    return snapshot


def initial_model(config: Config, policy: Policy, spec: EnvSpec, source: Snapshot) -> Any:
    """`params`, `obs_moments` and `reward_moments` for the first state.

    Raises ConfigError if the other run's network is not this one's.
    """
    import jax

    from spmdrl.nets import moments

    normalizes = config.env.normalize_obs
    template = jax.eval_shape(
        lambda: {
            "params": policy.init(jax.random.key(0)),
            "obs_moments": moments.of_observations(normalizes, spec),
        }
    )
    try:
        model = from_named(template, source.arrays["params"])
    except CheckpointError as error:
        raise ConfigError(
            f"init_from {config.init_from}: {error}. The network, its inputs and its outputs must "
            "be those of the other run: net, env.normalize_obs, and shapes of observations and "
            "actions"
        ) from error
    rewards = {k: v for k, v in source.arrays.get("learner", {}).items() if k.startswith(REWARD)}
    if not config.env.normalize_reward or not rewards:
        return model | {"reward_moments": moments.init(())}
    blank = {"reward_moments": moments.init(())}
    return model | from_named(blank, rewards)

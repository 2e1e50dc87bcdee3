"""Learn from recorded episodes: `python -m spmdrl.clone DATA_DIR --run-dir OUT`.

Behaviour cloning: the recorded run's networks maximise the likelihood of the recorded actions. What
is written is a run directory, so that `spmdrl.evaluate`, `spmdrl.record` and `spmdrl.runs` work on
it as on any other.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from spmdrl.cli import EXIT_INTERRUPTED, answer_errors, complain
from spmdrl.config import EXIT_FAULT, Config, ConfigError, LogConfig
from spmdrl.episodes import Batches, Recording, obs_in, open_recording
from spmdrl.options import CodeOptions, check_positive, given_words, parse
from spmdrl.parallel.process import prepare_process
from spmdrl.parallel.topology import Topology
from spmdrl.runtime.checkpoint import Checkpointer, Snapshot, to_named
from spmdrl.runtime.consent import bring_code, trust_words
from spmdrl.runtime.evaluation import play, spread, summarize, write_result
from spmdrl.runtime.files import write_json
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.logger import Logger
from spmdrl.runtime.provenance import Code, code_from_json
from spmdrl.runtime.rundir import CLONE_MARK, close_run, open_run, write_status
from spmdrl.runtime.spaces import write_spaces
from spmdrl.runtime.validate import validate
from spmdrl.runtime.watchdog import Watchdog, report_fault

if TYPE_CHECKING:
    from spmdrl.nets import Policy
    from spmdrl.types import EnvSpec, Moments

__all__ = ["Options", "clone", "main", "observation_moments"]


@dataclass(frozen=True)
class Options(CodeOptions):
    """Train a policy to act as in recorded episodes (behaviour cloning).

    Writes a run directory that the other commands take like any other, and eval.json in it.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA_DIR")]
    """Recording made by spmdrl.record: a folder, or sqlite:///FILE."""
    run_dir: str
    """Where everything goes; new or empty."""
    epochs: int = 10
    """Passes over the recording."""
    batch_size: int = 256
    """Steps in a batch."""
    lr: float = 1e-3
    """Learning rate, constant; everything else of the optimiser is as in the recorded run."""
    seed: int = 1
    """Seed of the initial parameters and of the order of the steps."""
    eval_episodes: int = 20
    """Episodes played at the end."""


# ---------------------------------------------------------------------------------------------
# Before anything is loaded


def plan(options: Options) -> tuple[Recording, Config]:
    """Check the options and the recording; the config of the run to come. Changes nothing."""
    check_positive(options, "epochs", "batch_size", "eval_episodes")
    out = Path(options.run_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"run_dir {out} exists and is not an empty directory; choose another with --run-dir"
        )
    recording = open_recording(options.data)
    recorded = recording.config
    config = replace(
        recorded,
        run_dir=str(out),
        name="clone",
        seed=options.seed,
        nprocs=1,
        devices=1,
        log=LogConfig(),  # no dashboards of the recorded run, which this machine may not have
        optim=replace(recorded.optim, lr=options.lr, lr_schedule="constant"),
        eval=replace(recorded.eval, episodes=options.eval_episodes),
    )
    validate(config)
    return recording, config


# ---------------------------------------------------------------------------------------------
# Learning


def observation_moments(recording: Recording, spec: EnvSpec) -> Any:
    """Moments of all recorded vectors, in the form in which a policy expects them."""
    parts = {name: part for name, part in spec.parts.items() if part.kind == "vector"}
    found = {name: part_moments(recording, name, part.shape) for name, part in parts.items()}
    return found.get("", found)


def part_moments(recording: Recording, name: str, shape: tuple[int, ...]) -> Moments:
    """Count, mean and squared deviations of one recorded array, summed in float64."""
    from spmdrl.types import Moments

    def total(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        sums = np.zeros(shape, np.float64)
        for episode in recording.episodes:
            arrays = recording.arrays(episode)
            rows = obs_in(arrays)[name][arrays["valid"]]
            sums += function(rows.astype(np.float64)).sum(0)
        return sums

    mean = total(lambda obs: obs) / recording.num_steps
    squares = total(lambda obs: (obs - mean) ** 2)
    count = np.float32(recording.num_steps)
    return Moments(count=count, mean=mean.astype(np.float32), m2=squares.astype(np.float32))


def negative_log_likelihood(
    policy: Policy, params: Any, obs_moments: Any, obs: Any, action: Any
) -> Any:
    """Mean over the batch of -log p(action | observation)."""
    import jax.numpy as jnp

    from spmdrl.nets.policy import variables_of

    rows = action.shape[0]
    _, dist_params, _ = policy.apply(
        variables_of(params, obs_moments), policy.initial_carry(rows), obs, jnp.zeros(rows, bool)
    )
    return -policy.dist.log_prob(dist_params, action).mean()


def make_step(config: Config, policy: Policy, obs_moments: Any) -> tuple[Any, Any]:
    """`(init, step)`: the optimiser's first state, and one compiled gradient step."""
    import jax
    from jax.flatten_util import ravel_pytree

    from spmdrl.learning.optimizer import make_optimizer

    optimizer, lr = make_optimizer(config.optim), config.optim.lr

    def step(params: Any, opt_state: Any, obs: Any, action: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(
            lambda p: negative_log_likelihood(policy, p, obs_moments, obs, action)
        )(params)
        return *optimizer.step(ravel_pytree(grads)[0], opt_state, params, lr), loss

    return optimizer.init, jax.jit(step, donate_argnums=(0, 1))


def run_epoch(step: Any, batches: Batches, params: Any, opt_state: Any) -> tuple[Any, Any, float]:
    """`(params, opt_state, mean loss)` after every recorded step was seen once more."""
    losses, sizes = [], []
    for batch in itertools.islice(batches, len(batches)):
        params, opt_state, loss = step(params, opt_state, batch["obs"], batch["action"])
        losses.append(loss)
        sizes.append(len(batch["action"]))
    mean = float(np.average(np.asarray(losses), weights=sizes))
    if not math.isfinite(mean):
        raise FloatingPointError("the loss is not finite; try a lower --lr")
    return params, opt_state, mean


def clone(
    recording: Recording, config: Config, options: Options, run_dir: Path, logger: Logger
) -> Path:
    """Learn, with a row of metrics and a checkpoint per epoch; the last checkpoint."""
    import jax

    from spmdrl.nets import make_policy, moments

    spec = recording.spec()
    policy = make_policy(config, spec)
    obs_moments = moments.of_observations(False, spec)
    if config.env.normalize_obs:
        obs_moments = observation_moments(recording, spec)
    params = policy.init(jax.random.key(config.seed))
    init, step = make_step(config, policy, obs_moments)
    opt_state = init(params)
    checkpointer = Checkpointer(run_dir / "checkpoints", config.checkpoint.keep)
    batches = Batches(recording, options.batch_size, config.seed)
    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        params, opt_state, loss = run_epoch(step, batches, params, opt_state)
        checkpointer.save(snapshot(epoch, jax.device_get(params), obs_moments))
        seconds = time.perf_counter() - started
        logger.write(row(epoch, options.epochs, recording.num_steps, loss, seconds))
    return checkpointer.path(options.epochs)


def snapshot(epoch: int, params: Any, obs_moments: Any) -> Snapshot:
    from spmdrl.learning.state import params_sha256

    meta = {"step": epoch, "return_mean": None, "params_sha256": params_sha256(params)}
    model = {"params": params, "obs_moments": obs_moments}
    return Snapshot(epoch, {"params": to_named(model)}, meta)


def row(epoch: int, epochs: int, steps: int, loss: float, seconds: float) -> dict[str, Any]:
    return {
        "progress/update": epoch,
        "progress/steps": epoch * steps,
        "progress/eta_s": seconds * (epochs - epoch),
        "perf/sps": steps / seconds,
        "loss/nll": loss,
    }


# ---------------------------------------------------------------------------------------------
# The command


class EpochLines:
    """One line per epoch; see `console.Console`."""

    def __init__(self, epochs: int):
        self._epochs = epochs

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, row: Mapping[str, Any]) -> None:
        print(
            f"epoch {row['progress/update']}/{self._epochs}  loss {row['loss/nll']:.4f}  "
            f"{row['perf/sps']:,.0f} steps/s",
            flush=True,
        )

    def close(self, summary: Mapping[str, Any] | None) -> None: ...


def evaluate_clone(
    config: Config, checkpoint: Path, run_dir: Path, recording: Recording
) -> dict[str, Any]:
    """Play the clone, write eval.json and say how it compares."""
    result = summarize(play(config, checkpoint), config, checkpoint)
    write_result(run_dir, result)
    recorded = np.mean([episode.episode_return for episode in recording.episodes])
    print(f"{config.env.id}: {spread(result)}; the recorded episodes have {recorded:.1f}")
    return result


def run(recording: Recording, config: Config, options: Options, code: Code | None) -> None:
    place = open_run(config, code)
    total = options.epochs * recording.num_steps
    about = asdict(options) | {"data_sha256": recording.fingerprint, "total_steps": total}
    write_json(place.path / CLONE_MARK, about)
    write_spaces(place.path, recording.spec())
    write_status(place.path, "running")
    watchdog = Watchdog(0, 1, place.path / ".heartbeat").start()
    logger = Logger(config, place.path, place.run_id, EpochLines(options.epochs))
    try:
        logger.info(
            f"{config.env.id}: {len(recording.episodes)} episodes, {recording.num_steps:,} steps, "
            f"{options.epochs} epochs in batches of {options.batch_size}"
        )
        started = time.perf_counter()
        checkpoint = clone(recording, config, options, place.path, logger)
        seconds = time.perf_counter() - started
        result = evaluate_clone(config, checkpoint, place.path, recording)
        meta = json.loads((checkpoint / "meta.json").read_text())
        logger.close(
            {
                "epochs": options.epochs,
                "samples": total,
                "wall_s": seconds,
                "sps": total / seconds,
                "episode_return_mean": result["return_mean"],
                "episode_count": result["episodes"],
                "params_sha256": meta["params_sha256"],
            }
        )
        write_status(place.path, "finished")
    except KeyboardInterrupt:
        write_status(place.path, "stopped", "interrupted; what was learned is in its checkpoints")
        logger.close()
        raise
    except BaseException as error:
        write_status(place.path, "failed", f"{type(error).__name__}: {error}")
        logger.close()
        raise
    finally:
        watchdog.stop()
        close_run(place)


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    words = given_words(argv)
    options = parse(Options, "clone", words)
    try:
        recording, config = plan(options)
        recorded = code_from_json(recording.index.get("code"))
        code = bring_code(config, recorded, recording.folder, options.consent("clone", words))
        prepare_process(Topology(), devices=1)
        run(recording, config, options, code)
    except ConfigError:
        raise
    except KeyboardInterrupt:
        said = f"interrupted; {options.run_dir} keeps its last epoch"
        return complain(said, EXIT_INTERRUPTED)
    except Exception as error:
        report_fault(0, 1, "cloning", error)
        return EXIT_FAULT
    print(f"results   {options.run_dir}")
    print(f"evaluate  {suggested('evaluate', options.run_dir, *trust_words(options.run_dir))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

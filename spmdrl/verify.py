"""The same run on every topology, compared: `python -m spmdrl.verify CONFIG.py`.

Trains a few updates on each, and prints how far parameters are from those of one rank on one
device, and whether the first rollout is the same to the bit. With --sync.deterministic every bit of
the parameters must be the same at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from spmdrl.cli import answer_errors, complain
from spmdrl.config import EXIT_FAULT, ConfigError, load
from spmdrl.envs.ids import check_id
from spmdrl.options import ConfigFile, check_positive, parse_with_config
from spmdrl.runtime.trial_runs import train
from spmdrl.runtime.validate import validate

__all__ = ["TOPOLOGIES", "Result", "compare", "main"]

TOLERANCE = 1e-5  # of any parameter after the first update

TOPOLOGIES: dict[str, list[str]] = {
    "1 rank x 1 device": [],
    "1 x 2": ["--devices", "2"],
    "1 x 4": ["--devices", "4"],
    "2 x 1": ["--nprocs", "2"],
    "2 x 2": ["--nprocs", "2", "--devices", "2"],
    "4 x 1": ["--nprocs", "4"],
    "gather, 2 ranks": ["--nprocs", "2", "--sync.strategy", "gather"],
    "gather, 3 ranks": ["--nprocs", "3", "--sync.strategy", "gather"],
    "jax, 2 x 2": ["--nprocs", "2", "--devices", "2", "--sync.strategy", "jax"],
    "1 learner, 2 actors": ["--learners", "1", "--actors", "2"],
    "2 learners, 2 actors": ["--learners", "2", "--actors", "2"],
}


@dataclass(frozen=True)
class Options:
    """Train a few updates of a config on every topology and compare.

    Prints how far the parameters are from those of one rank on one device. All other flags after
    CONFIG.py are fields of the config, such as --env.num-envs 64 --sync.deterministic: see the
    --help of `spmdrl.train`.
    """

    config: ConfigFile
    """Config file, as for `spmdrl.train`."""
    updates: int = 20
    """Updates per run."""


@dataclass(frozen=True)
class Result:
    name: str
    first_difference: float  # largest of any parameter after the first update
    last_difference: float
    same_rollout: bool  # the first one: actions, observations and returns, to the bit
    same_hash: bool
    episode_return: float | None


def check_topologies(words: Sequence[str]) -> None:
    """Raise ConfigError before anything is trained if a topology does not fit the config."""
    for name, extra in TOPOLOGIES.items():
        config = load([*words, *extra])
        check_id(config.env)
        ranks = 1 if config.nprocs == "auto" else config.nprocs
        ranks = config.learners + config.actors if config.learners else ranks
        try:
            validate(config, ranks, max(1, config.devices))
        except ConfigError as error:
            raise ConfigError(f"topology {name}: {error}") from error


def run(config: str, flags: Sequence[str], updates: int, folder: Path) -> Path:
    """Train into the folder, with a checkpoint of every update; raise TrialError if that fails."""
    batch = load([config, *flags]).batch_size
    length = ["--total-steps", str(batch * updates)]
    saves = ["--checkpoint.every", "1", "--checkpoint.keep", str(updates + 1)]
    train([config, *flags, *length, *saves], folder)
    return folder


def difference(a: Path, b: Path) -> float:
    """Largest absolute difference of any parameter of two checkpoints."""
    x, y = (load_file(p / "params.safetensors") for p in (a, b))
    names = [name for name in x if name.startswith("params/")]
    return max(float(np.abs(x[n].astype(np.float64) - y[n]).max(initial=0.0)) for n in names)


def same_first_rollout(a: Path, b: Path) -> bool:
    """Whether every action, the observations reached and the returns so far are the same bits."""
    first = "checkpoints/update-00000001/actors.safetensors"
    actions = "replay/actions-00000001.safetensors"
    replayed = any((run / actions).exists() for run in (a, b))  # else environments are saved
    for name in (actions, first) if replayed else (first,):
        x, y = load_file(a / name), load_file(b / name)
        if any(x[k].tobytes() != y[k].tobytes() for k in x):
            return False
    return True


def compare(
    name: str, run_dir: Path, reference: Path, updates: int, summary: str = "summary.json"
) -> Result:
    first, last = (f"checkpoints/update-{n:08d}" for n in (1, updates))
    mine, theirs = (json.loads((d / summary).read_text()) for d in (run_dir, reference))
    return Result(
        name=name,
        first_difference=difference(run_dir / first, reference / first),
        last_difference=difference(run_dir / last, reference / last),
        same_rollout=same_first_rollout(run_dir, reference),
        same_hash=mine["params_sha256"] == theirs["params_sha256"],
        episode_return=mine["episode_return_mean"],
    )


def holds(result: Result, deterministic: bool) -> bool:
    """Rounding may differ, unless the run is deterministic."""
    near = result.first_difference <= TOLERANCE and result.same_rollout
    return near and (result.same_hash or not deterministic)


def line(result: Result) -> str:
    value = "–" if result.episode_return is None else f"{result.episode_return:.2f}"
    return (
        f"{result.name:<20} {result.first_difference:>12.1e} {result.last_difference:>12.1e} "
        f"{'yes' if result.same_rollout else 'NO':>14} "
        f"{'yes' if result.same_hash else 'no':>10} {value:>10}"
    )


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    options, flags = parse_with_config(Options, "verify", argv)
    check_positive(options, "updates")
    config, updates = options.config, options.updates
    deterministic = load([config, *flags]).sync.deterministic
    check_topologies([config, *flags])
    print(
        f"{'topology':<20} {'after 1':>12} {f'after {updates}':>12} {'first rollout':>14} "
        f"{'same hash':>10} {'return':>10}",
        flush=True,
    )
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name), None
        for i, (label, extra) in enumerate(TOPOLOGIES.items()):
            run_dir = run(config, [*flags, *extra], updates, folder / str(i))
            reference = reference or run_dir
            results.append(compare(label, run_dir, reference, updates))
            print(line(results[-1]), flush=True)
    wrong = [r.name for r in results if not holds(r, deterministic)]
    if wrong:
        return complain(f"not the same run: {'; '.join(wrong)}", EXIT_FAULT)
    return 0


if __name__ == "__main__":
    sys.exit(main())

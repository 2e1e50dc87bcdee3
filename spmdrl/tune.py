"""Which ranks and threads are fastest here: `python -m spmdrl.tune CONFIG.py`.

Trains a few updates with each choice that this machine allows, prints the table, and the flags of
the fastest.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError, load
from spmdrl.envs.ids import check_id
from spmdrl.options import ConfigFile, check_positive, parse_with_config
from spmdrl.parallel.topology import cores
from spmdrl.runtime.files import read_metrics
from spmdrl.runtime.trial_runs import train
from spmdrl.runtime.validate import validate

__all__ = ["Choice", "choices", "main"]

SKIP = 2  # first updates, which hold the compilation


@dataclass(frozen=True)
class Options:
    """Find the number of ranks and simulation threads that is fastest on this machine.

    Trains a few updates with each choice and prints steps per second. All other flags after
    CONFIG.py are fields of the config, such as --env.num-envs 64: see the --help of `spmdrl.train`.
    """

    config: ConfigFile
    """Config file, as for `spmdrl.train`."""
    updates: int = 10
    """Updates measured per run."""


@dataclass(frozen=True)
class Choice:
    nprocs: int
    threads: int  # of each rank's simulators

    @property
    def flags(self) -> list[str]:
        return ["--nprocs", str(self.nprocs), "--env.threads", str(self.threads)]


def choices(config: Config, available: int) -> list[Choice]:
    """Ranks up to one for each core, each with one thread and with all of its cores."""
    found = []
    if config.learners:
        raise ConfigError("tune compares ranks that act and learn; leave --learners out")
    for nprocs in range(1, available + 1):
        try:
            validate(config, nprocs, max(1, config.devices))
        except ConfigError:
            continue  # these environments cannot be split between so many
        found += [Choice(nprocs, threads) for threads in {1, available // nprocs}]
    return sorted(found, key=lambda choice: (choice.nprocs, choice.threads))


def measure(argv: Sequence[str], choice: Choice, updates: int, folder: Path) -> float:
    """Median steps per second of the updates after the first ones."""
    steps = load(argv).batch_size * (SKIP + updates)
    length = ["--total-steps", str(steps), "--log.every", "1", "--checkpoint.every", "0"]
    train([*argv, *choice.flags, *length], folder)
    return statistics.median(row["perf/sps"] for row in read_metrics(folder)[SKIP:])


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    options, flags = parse_with_config(Options, "tune", argv)
    check_positive(options, "updates")
    words = [options.config, *flags]
    config = load(words)
    check_id(config.env)
    found = choices(config, cores())
    if not found:
        raise ConfigError("these environments cannot be split between ranks; change --env.num-envs")
    print(f"{'ranks':>5} {'threads per rank':>16} {'steps/s':>12}", flush=True)
    rates: dict[Choice, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, choice in enumerate(found):
            rate = measure(words, choice, options.updates, Path(folder) / str(number))
            rates[choice] = rate
            print(f"{choice.nprocs:>5} {choice.threads:>16} {rate:>12,.0f}", flush=True)
    best = max(rates, key=lambda choice: rates[choice])
    print(
        f"fastest: {' '.join(best.flags)}\n"
        f"in the config: Config(nprocs={best.nprocs}, env=EnvConfig(threads={best.threads}, ...))"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which ranks and threads are fastest here: `python -m spmdrl.tune CONFIG.py`.

Trains a few updates with each choice that this machine allows, prints the table, and the flags of
the fastest. Public names: `Choice`, `choices`, `main`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, Config, ConfigError, load
from spmdrl.parallel.topology import cores
from spmdrl.plot import read_metrics
from spmdrl.runtime.validate import validate
from spmdrl.verify import read_arguments, train

SKIP = 2  # first updates, which hold the compilation


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
    for nprocs in range(1, available + 1):
        try:
            validate(config, nprocs, max(1, config.devices))
        except ConfigError:
            continue  # these environments cannot be shared out among so many
        found += [Choice(nprocs, threads) for threads in {1, available // nprocs}]
    return sorted(found, key=lambda choice: (choice.nprocs, choice.threads))


def measure(argv: Sequence[str], choice: Choice, updates: int, folder: Path) -> float:
    """Median steps per second of the updates after the first ones."""
    steps = load(argv).batch_size * (SKIP + updates)
    length = ["--total-steps", str(steps), "--log.every", "1", "--checkpoint.every", "0"]
    train([*argv, *choice.flags, *length], folder)
    return statistics.median(row["perf/sps"] for row in read_metrics(folder)[SKIP:])


def main(argv: Sequence[str] | None = None) -> int:
    try:
        argv, updates = read_arguments("tune", sys.argv[1:] if argv is None else argv, 10)
        found = choices(load(argv), cores())
    except ConfigError as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{'ranks':>5} {'threads of each':>16} {'steps/s':>12}")
    rates: dict[Choice, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, choice in enumerate(found):
            try:
                rates[choice] = measure(argv, choice, updates, Path(folder) / str(number))
            except RuntimeError as error:
                print(f"spmdrl: {error}", file=sys.stderr)
                return EXIT_FAULT
            print(f"{choice.nprocs:>5} {choice.threads:>16} {rates[choice]:>12,.0f}", flush=True)
    best = max(rates, key=lambda choice: rates[choice])
    print(
        f"fastest: {' '.join(best.flags)}\n"
        f"in the config: Config(nprocs={best.nprocs}, env=EnvConfig(threads={best.threads}, ...))"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

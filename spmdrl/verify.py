"""The same run on every topology this machine can do: `python -m spmdrl.verify CONFIG.py`.

Trains a few updates on each, and prints how far parameters are from those of one rank on one
device, and whether the first rollout is the same to the bit. With --sync.deterministic every bit of
the parameters must be the same at the end. Public names: `TOPOLOGIES`, `Result`, `compare`, `main`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, ConfigError, load

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
}


@dataclass(frozen=True)
class Result:
    name: str
    first_difference: float  # largest of any parameter after the first update
    last_difference: float
    same_rollout: bool  # the first one: actions, observations and returns, to the bit
    same_hash: bool
    episode_return: float | None


def read_arguments(tool: str, argv: Sequence[str], updates: int) -> tuple[list[str], int]:
    """The trainer's arguments, and the value of --updates."""
    rest = list(argv)
    if "--updates" in rest:
        at = rest.index("--updates")
        value = "".join(rest[at + 1 : at + 2])
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--updates is {value!r}, but must be at least 1")
        updates = int(value)
        del rest[at : at + 2]
    if not rest or rest[0].startswith("-"):
        raise ConfigError(
            f"usage: python -m spmdrl.{tool} CONFIG.py [--updates {updates}] [--field value ...]"
        )
    return rest, updates


def train(argv: Sequence[str], folder: Path) -> None:
    """A run into the folder, silent; raise RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", "spmdrl.train", *argv, "--run-dir", str(folder)]
    command += ["--log.panel", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def run(config: str, flags: Sequence[str], updates: int, folder: Path) -> Path:
    """Train into the folder; raise RuntimeError with the output if that fails."""
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
    pairs = [("replay/actions-00000001.safetensors",) * 2, (first, first)]
    for left, right in pairs:
        x, y = load_file(a / left), load_file(b / right)
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


def main(argv: Sequence[str] | None = None) -> int:
    try:
        argv, updates = read_arguments("verify", sys.argv[1:] if argv is None else argv, 20)
        config, flags = argv[0], argv[1:]
        deterministic = load(argv).sync.deterministic
    except ConfigError as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(
        f"{'topology':<20} {'after 1':>12} {f'after {updates}':>12} {'first rollout':>14} "
        f"{'same hash':>10} {'return':>10}"
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
        print(f"spmdrl: not the same run: {'; '.join(wrong)}", file=sys.stderr)
        return EXIT_FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main())

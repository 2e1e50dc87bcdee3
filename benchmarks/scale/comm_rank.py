"""One rank of `python -m benchmarks.comm`: times every case together with the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.common import ROOT, arguments, in_turns, progress
from benchmarks.lib.ranks import MeteredWorld, become_rank, seconds_together
from benchmarks.scale.comm import HIDDEN, MINIBATCHES, OBS, ROLLOUTS, STEPS
from spmdrl.config import Config, load

Call = Callable[[], Any]


def config(width: int, strategy: str = "allreduce") -> Config:
    """CartPole's, with two hidden layers of this width; its update has 4 x 4 minibatches."""
    return load([
        str(ROOT / "configs" / "cartpole.py"), "--env.num-envs", "8",
        "--algo.num-steps", str(STEPS), "--algo.epochs", "4", "--algo.minibatches", "4",
        "--net.hidden", str(width), str(width), "--sync.strategy", strategy,
    ])  # fmt: skip


def make_cases(world: MeteredWorld) -> tuple[dict[str, Call], dict[str, int]]:
    """What to time, and the parameters of each policy."""
    from benchmarks.lib.assembly import Exchange, vector_spec

    cases: dict[str, Call] = {}
    params = {}
    for name, width in HIDDEN.items():
        ours, by_jax = Exchange(config(width), world), Exchange(config(width, "jax"), world)
        cases[f"allreduce {name}"] = ours.gradients(MINIBATCHES)
        cases[f"jax {name}"] = by_jax.gradients(MINIBATCHES)
        cases[f"jax-flat {name}"] = by_jax.gradients(MINIBATCHES, flat=True)
        cases[f"model {name}"] = ours.model_from_root()
        params[name] = ours.params
    for kind, steps in ROLLOUTS:
        envs = steps // STEPS // world.size
        cases[f"rollout {kind} {steps}"] = ours.rollout_to_root(
            vector_spec(*OBS[kind]), STEPS, envs
        )
    return cases, params


def bytes_passed(world: MeteredWorld, call: Call) -> int:
    """By the arrays that this rank hands over; allreduces are read from the traced program."""
    from benchmarks.lib.assembly import allreduced_bytes

    world.passed = 0
    traced = allreduced_bytes(call)
    # The loop's body is traced once, or more often, but always with the same size.
    return world.passed + (max(traced) * MINIBATCHES if traced else 0)


def bytes_of_real_update(world: MeteredWorld) -> int:
    """What the trainer's own CartPole update hands to mpi4jax, read from its program."""
    from benchmarks.lib.assembly import traced_update

    return allreduced(traced_update(config(HIDDEN["9k"]), world, envs=4))


def allreduced(jaxpr: Any) -> int:
    """Bytes of all allreduces in a program; those in a loop count as often as it turns."""
    total = 0
    for step in jaxpr.eqns:
        if "allreduce" in step.primitive.name:
            total += step.invars[0].aval.size * step.invars[0].aval.dtype.itemsize
        inner = [getattr(p, "jaxpr", p) for p in step.params.values()]
        turns = step.params.get("length", 1)
        total += turns * sum(allreduced(p) for p in inner if hasattr(p, "eqns"))
    return total


def work(repeats: int, out: Path) -> None:
    """All cases on this rank; rank 0 writes what came out."""
    topology, world = become_rank()
    from benchmarks.lib.assembly import start_jax_distributed

    start_jax_distributed(topology, world)
    cases, params = make_cases(world)
    passed = {case: bytes_passed(world, call) for case, call in cases.items()}  # compiles too
    order = in_turns(list(cases), repeats)
    times: dict[str, list[float]] = {case: [] for case in cases}
    for case in progress(order, f"{world.size} ranks") if world.is_root else order:
        times[case].append(seconds_together(world, cases[case]))
    answer = {
        "ms": {case: [1e3 * s for s in values] for case, values in times.items()},
        "passed": passed,
        "params": params,
        "real_update": bytes_of_real_update(world),
    }
    if world.is_root:
        out.write_text(json.dumps(answer))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--worker", type=Path, required=True, help="where rank 0 writes")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    work(args.repeats, args.worker)


if __name__ == "__main__":
    main()

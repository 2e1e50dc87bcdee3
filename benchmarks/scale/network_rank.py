"""One rank of `python -m benchmarks.cost_model`: the collectives' times by size."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.common import arguments, in_turns, spread
from benchmarks.lib.ranks import World, become_rank, seconds_together
from benchmarks.scale.cost_formulas import MINIBATCHES

__all__ = ["MICRO_BYTES"]

MICRO_BYTES = [64, 16_384, 36_864, 262_144, 2_097_152, 40_000_000]
REPEATS = 5


def make_cases(world: World) -> dict[tuple[str, int], Callable[[], Any]]:
    from benchmarks.lib.assembly import broadcast_call, sum_call

    cases: dict[tuple[str, int], Callable[[], Any]] = {}
    for size in MICRO_BYTES:
        cases["allreduce", size] = sum_call(world, size, calls_in_a_row("allreduce", size))
        cases["gather", size] = partial(world.gather_rows, np.zeros(size, np.uint8))
        cases["broadcast", size] = broadcast_call(world, size)
    return cases


def work_on_network(out: Path, repeats: int) -> None:
    _, world = become_rank()
    cases = make_cases(world)
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for call in cases.values():
        call()  # compiles, and opens the connections
    for case in in_turns(list(cases), repeats):
        times[case].append(seconds_together(world, cases[case]) / calls_in_a_row(*case))
    if world.is_root:
        rows = [[kind, size, spread(v).median] for (kind, size), v in times.items()]
        out.write_text(json.dumps(rows))


def calls_in_a_row(kind: str, size: int) -> int:
    if kind != "allreduce":
        return 1
    return MINIBATCHES if size < 1 << 22 else 2  # a large message hides the start of a program


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--worker", type=Path, required=True, help="where rank 0 writes")
    work_on_network(parser.parse_args().worker, REPEATS)


if __name__ == "__main__":
    main()

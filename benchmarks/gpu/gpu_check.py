"""Does a real GPU do what was predicted? For whoever has one: nobody here has.

    python -m benchmarks.gpu_check                 # 10 minutes at most; paste what it prints
    python -m benchmarks.gpu_check --updates 20

Needs jax with a GPU (`uv sync --extra cuda12`) and benchmarks/results/gpu_programs.json. Times the
trainer's own update on rollouts of random numbers, on one GPU; prints the median beside the
prediction (its assumptions: benchmarks/gpu/prediction.py) and the peak of memory beside the
compiler's. Writes nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from benchmarks.gpu.gpu_programs import CASES, Case, read
from benchmarks.gpu.prediction import CARDS, predicted_s
from benchmarks.lib.common import arguments, number, progress, table
from spmdrl.config import load

__all__ = ["card_of", "main"]


def card_of(kind: str) -> str | None:
    """The card of the prediction that a device's name stands for."""
    return next((name for name in CARDS if name in kind), None)


def measured(case: Case, updates: int) -> tuple[float, int]:
    """Median seconds of an update, and the peak of the device's memory in bytes."""
    import jax

    from benchmarks.lib.assembly import update_alone

    update = update_alone(load([f"configs/{case.config}.py", *case.flags]))
    update()  # compiles
    seconds = []
    for _ in range(updates):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    return statistics.median(seconds), int(stats.get("peak_bytes_in_use", 0))


def row_of(case: Case, card: str, counted: dict[str, Any], updates: int) -> list[str]:
    seconds, peak = measured(case, updates)
    expected = predicted_s(counted, CARDS[card], 1)
    return [
        case.task,
        f"{counted['launches']:,}",
        number(1e3 * expected),
        number(1e3 * seconds),
        f"{seconds / expected:.2f}",
        number(counted["peak_bytes"] / 1e6),
        number(peak / 1e6),
    ]


HEADER = ["task", "launches", "predicted ms", "measured ms", "ratio", "peak MB, compiled",
          "peak MB, so far"]  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--updates", type=int, default=50)
    args = parser.parse_args()
    import jax

    device = jax.local_devices()[0]
    card = card_of(device.device_kind)
    if device.platform != "gpu":
        print(f"gpu_check: jax finds no GPU here, only {device.platform}; uv sync --extra cuda12")
        return 2
    if card is None:
        print(f"gpu_check: no prediction for {device.device_kind}; compared with an A100")
    stored, card = read("gpu_programs"), card or "A100"
    cases = [c for c in CASES if c.devices == 1 and c.card == "A100" and c.name in stored]
    rows = [
        row_of(case, card, stored[case.name]["update"], args.updates)
        for case in progress(cases, "updates")
    ]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {args.updates} updates\n")
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

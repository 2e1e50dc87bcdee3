"""Where the time of one training iteration goes, part by part.

    python -m benchmarks.parts configs/cartpole.py configs/pong.py     # about 2 minutes

Each part is compiled and timed alone, on the same shapes, so that the sum can be held against the
whole iteration. Medians over repeats; writes benchmarks/results/parts.json and .md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.lib.assembly import calls_of_iteration
from benchmarks.lib.common import arguments, machine, made_by, progress, save, table
from spmdrl.config import Config, load


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())  # compiles
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        with jax.transfer_guard("disallow"):  # what moves unasked would be timed, too
            jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure(config: Config, repeats: int) -> dict[str, float]:
    return {name: median_ms(call, repeats) for name, call in calls_of_iteration(config).items()}


def report(config: Config, ms: dict[str, float]) -> str:
    count = config.algo.epochs * config.algo.minibatches
    whole = ms["collect"] + ms["update"]
    parts = {
        "**collect** (one rollout)": ms["collect"],
        "simulation alone, Python API": ms["env"],
        "inference alone, compiled loop": ms["infer"],
        "**update** (one compiled call)": ms["update"],
        "prepare: advantages, order": ms["prepare"],
        f"gradient x {count}, called one by one": ms["gradient"] * count,
        f"apply x {count}, called one by one": ms["apply"] * count,
        f"**whole iteration** ({config.batch_size / whole * 1e3:,.0f} steps/s)": whole,
    }
    rows = [[name, f"{value:.2f}", f"{value / whole:.0%}"] for name, value in parts.items()]
    title = (
        f"### {config.env.id}, {config.env.num_envs} environments x {config.algo.num_steps} "
        f"steps, {config.algo.epochs} x {config.algo.minibatches} minibatches"
    )
    return f"{title}\n\n{table(['part', 'ms', 'of the iteration'], rows)}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    about = machine()
    found, texts = {}, []
    for path in progress(args.configs, "parts"):
        found[path] = measure(config := load([path]), args.repeats)
        texts.append(report(config, found[path]))
    note = "The parts are timed alone, so they need not add up to the compiled whole."
    save("parts", {"machine": about, "ms": found}, "\n\n".join([made_by(about), note, *texts]))


if __name__ == "__main__":
    main()

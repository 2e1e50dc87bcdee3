"""Communication cost of one update: allreduce, gather and jax.distributed.

    python -m benchmarks.comm                       # 2 and 4 ranks, about five minutes
    python -m benchmarks.comm --ranks 2 --repeats 5

allreduce and jax send the gradient of every minibatch (16 here); gather sends the rollout to rank 0
once and the parameters back once. The functions are the trainer's own, packing included; computing
is not. Writes benchmarks/results/comm.json, .md and .png.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.common import (
    about_spread,
    arguments,
    cores,
    machine,
    made_by,
    new_figure,
    number,
    pretty,
    save,
    spread,
    table,
)
from benchmarks.lib.ranks import answer_of_ranks

MINIBATCHES = 16  # 4 epochs x 4
# Widths of the two hidden layers of the separate policy and value networks.
HIDDEN = {"9k": 64, "1M": 702, "10M": 2231}
STEPS, OBS = 128, {"vector": ((4,), "float32"), "image": ((4, 84, 84), "uint8")}
# Steps of the whole run in one rollout; the ranks share them.
ROLLOUTS = [("vector", 1024), ("vector", 16384), ("vector", 131072), ("image", 1024),
            ("image", 4096)]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# By formula


def allreduce_bytes(params: int) -> int:
    """What one rank hands to MPI for the gradients of an update."""
    return 4 * params * MINIBATCHES


def rollout_bytes(kind: str, steps: int) -> int:
    """Of a whole rollout: each step, then what each environment has once."""
    envs = steps // STEPS
    shape, dtype = OBS[kind]
    obs = math.prod(shape) * (4 if dtype == "float32" else 1)
    floats, flags, action = 4, 4, 4  # four float32, four booleans, an int32
    return steps * (obs + 4 * floats + flags + action) + envs * (obs + 1 + 4)


def model_bytes(params: int) -> int:
    """Parameters, the update's number, and the count of the unused observation moments."""
    return 4 * params + 4 + 4


def network_bytes(ranks: int, params: int) -> int:
    """What the allreduces must send at least, over all links together."""
    return 2 * (ranks - 1) * allreduce_bytes(params)


# ---------------------------------------------------------------------------------------------
# All ranks together


def check_bytes(found: dict[str, Any], ranks: int) -> None:
    """The formulas against what was passed; an error, not a note, where they differ."""
    expected = {}
    for name, params in found["params"].items():
        expected[f"allreduce {name}"] = allreduce_bytes(params)
        expected[f"model {name}"] = model_bytes(params)
    for kind, steps in ROLLOUTS:
        expected[f"rollout {kind} {steps}"] = rollout_bytes(kind, steps) // ranks
    for case, count in expected.items():
        if found["passed"][case] != count:
            raise AssertionError(f"{case}: {found['passed'][case]} bytes passed, not {count}")


def crossover(sizes: Sequence[float], gather: Sequence[float], other: float) -> tuple[float, bool]:
    """Rollout bytes at which gather costs as much as `other`, and whether that was in range.

    Straight lines between the measured points, the outermost ones going on; 0 where gather is
    dearer for the smallest rollout already and its line does not come down to `other`.
    """
    points = list(zip(sizes, gather, strict=True))
    pairs = list(itertools.pairwise(points))
    for (x0, y0), (x1, y1) in pairs:
        if y0 <= other <= y1:
            return x0 + (x1 - x0) * (other - y0) / (y1 - y0) if y1 > y0 else x0, True
    (x0, y0), (x1, y1) = pairs[0] if other < gather[0] else pairs[-1]
    if y1 <= y0:
        return (0.0 if other < gather[0] else math.inf), False
    return max(0.0, x0 + (x1 - x0) * (other - y0) / (y1 - y0)), False


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Medians by policy and rollout, and the crossovers."""
    medians = {case: spread(values) for case, values in found["ms"].items()}
    rollouts = sorted((rollout_bytes(k, s), f"rollout {k} {s}") for k, s in ROLLOUTS)
    summary: dict[str, Any] = {"ms": medians, "policies": {}}
    for name in HIDDEN:
        model = medians[f"model {name}"].median
        gather = [(size, medians[case].median + model) for size, case in rollouts]
        sizes, ms = zip(*gather, strict=True)
        at = {w: crossover(sizes, ms, medians[f"{w} {name}"].median) for w in ("allreduce", "jax")}
        summary["policies"][name] = {"gather": gather, "crossover": at}
    return summary


def report(results: dict[str, Any], head: str) -> str:
    lines = [head, ""]
    for ranks, result in results.items():
        lines += [
            f"### {ranks} ranks" + _crowded(int(ranks)),
            "",
            _table_of_ms(int(ranks), result),
            "",
        ]
        lines += [_table_of_gather(int(ranks), result), "", _table_of_crossovers(result), ""]
    lines += [_about_bytes(results)]
    return "\n".join(lines)


def _crowded(ranks: int) -> str:
    return f" on {cores()} cores, so that they take turns" if ranks > cores() else ""


def _table_of_ms(ranks: int, result: dict[str, Any]) -> str:
    rows = []
    for name, params in result["found"]["params"].items():
        ms = result["summary"]["ms"]
        cells = [pretty(ms[f"{way} {name}"]) for way in ("allreduce", "jax", "jax-flat", "model")]
        sizes = [allreduce_bytes(params), network_bytes(ranks, params)]
        rows.append([f"{params:,}", *(f"{size / 1e6:,.2f}" for size in sizes), *cells])
    header = ["parameters", "MB a rank hands over, allreduce", "MB over all links", "allreduce, ms",
              "jax, ms", "jax with one joined array, ms",
              "gather: parameters back, ms"]  # fmt: skip
    return table(header, rows)


def _table_of_gather(ranks: int, result: dict[str, Any]) -> str:
    rows = []
    for kind, steps in ROLLOUTS:
        ms, size = result["summary"]["ms"][f"rollout {kind} {steps}"], rollout_bytes(kind, steps)
        rows.append([f"{steps:,} {kind}s", f"{size / 1e6:,.2f}",
                     f"{size * (ranks - 1) / ranks / 1e6:,.2f}", pretty(ms)])  # fmt: skip
    return table(["rollout, steps", "MB", "MB to rank 0", "gather: rollout there, ms"], rows)


def _table_of_crossovers(result: dict[str, Any]) -> str:
    rows = []
    for name, policy in result["summary"]["policies"].items():
        cells = [_pretty_crossover(*policy["crossover"][way]) for way in ("allreduce", "jax")]
        rows.append([name, *cells])
    return table(["parameters", "allreduce is cheaper from, MB of rollout", "jax from"], rows)


def _pretty_crossover(size: float, measured: bool) -> str:
    if size == 0:
        return "always"
    return f"{number(size / 1e6)}" + ("" if measured else " (extrapolated)")


def _about_bytes(results: dict[str, Any]) -> str:
    found = next(iter(results.values()))["found"]
    small = allreduce_bytes(found["params"]["9k"])
    more = found["real_update"] - small
    repeats = len(found["ms"]["allreduce 9k"])
    return (
        "Milliseconds of one update's communication, 16 minibatches, no computing. "
        f"{about_spread(repeats)} All bytes were "
        "counted in the arrays that were passed and agree with the formulas. Gather costs the sum "
        "of its two parts. The trainer's real update of the smallest policy hands over "
        f"{found['real_update']:,} bytes: {small:,} of gradients and {more:,} of sums for losses, "
        "advantages and moments. A star in the picture: gather and allreduce cost the same."
    )


def draw(results: dict[str, Any]) -> Any:
    fig, axes = new_figure(len(HIDDEN), 14, 4.8, sharey=True)
    styles = dict(zip(results, ("-", "--"), strict=False))
    for axis, name in zip(axes, HIDDEN, strict=True):
        for ranks, style in styles.items():
            _draw_panel(axis, results[ranks]["summary"], name, ranks, style)
        axis.set(xscale="log", yscale="log", xlabel="rollout of the whole run, MB")
        params = next(iter(results.values()))["found"]["params"][name]
        axis.set_title(f"{params:,} parameters")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3, which="major")
    axes[0].set_ylabel("communication of one update, ms")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(styles) * 3, fontsize=9)
    return fig


def _draw_panel(axis: Any, summary: dict[str, Any], name: str, ranks: str, style: str) -> None:
    policy, ms = summary["policies"][name], summary["ms"]
    sizes, gather = zip(*policy["gather"], strict=True)
    megabytes = [size / 1e6 for size in sizes]
    axis.plot(megabytes, gather, "C1o" + style, ms=4, label=f"gather, {ranks} ranks")
    for way, colour in (("allreduce", "C0"), ("jax", "C2")):
        level = ms[f"{way} {name}"].median
        axis.axhline(level, color=colour, ls=style, label=f"{way}, {ranks} ranks")
    size, measured = policy["crossover"]["allreduce"]
    if measured:
        axis.plot([size / 1e6], [ms[f"allreduce {name}"].median], "k*", ms=11, zorder=5)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--name", default="comm", help="of the written files")
    args = parser.parse_args()
    host, results = machine(), {}
    for ranks in args.ranks:
        words = ["--repeats", str(args.repeats)]
        found = answer_of_ranks(ranks, "benchmarks.scale.comm_rank", *words)
        check_bytes(found, ranks)
        results[str(ranks)] = {"found": found, "summary": summarize(found)}
    data = {"machine": host, "minibatches": MINIBATCHES, "results": results}
    save(args.name, data, report(results, made_by(host)), draw(results))


if __name__ == "__main__":
    main()

"""docs/scaling.md and its picture, from what `python -m benchmarks.cost_model` has found.

The text is in scaling_page.md beside this file; this fills in numbers and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.common import new_figure, number, table
from benchmarks.scale.cost_formulas import MINIBATCHES, fit_all
from benchmarks.scale.predictions import NETWORK, NODES, work_of

__all__ = ["document", "draw"]

TEXT = Path(__file__).with_suffix(".md")


def table_of_links(found: dict[str, Any]) -> str:
    rows = []
    for n, times in found["network"].items():
        for kind, link in fit_all(times, int(n)).items():
            cells = [f"{1e3 * s:.2f}" for k, _, s in times if k == kind]
            rows.append([n, kind, *cells, f"{1e3 * link.latency:.2f}",
                         f"{link.bandwidth / 1e6:,.0f}"])  # fmt: skip
    sizes = [f"{n:,} B" for k, n, _ in times if k == kind]
    return table(["hosts", "ms of", *sizes, "latency, ms", "bandwidth, MB/s"], rows)


def table_of_work(found: dict[str, Any]) -> str:
    rows = []
    for task in found["sizes"]:
        for crowd in (1, *sorted(int(n) for n in found["network"])):
            work = work_of(found, task, crowd)
            cells = [work.collect, work.update, work.update_more]
            rows.append([task, str(crowd), *(number(1e3 * c) for c in cells)])
    header = ["policy", "hosts at once", "rollout and the rest, ms", "update, ms",
              "update, ms for each further host's rows"]  # fmt: skip
    return table(header, rows)


def table_of_checks(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for r in rows:
        error = r["predicted"] / r["measured"] - 1
        verdict = "within 20 %" if abs(error) <= 0.2 else "missed"
        ms = [number(1e3 * r[key]) for key in ("predicted", "measured")]
        cells.append([r["task"], str(r["hosts"]), r["way"], *ms, f"{error:+.0%}", verdict])
    header = ["policy", "hosts", "way", "predicted, ms", "measured, ms", "error", "goal"]
    return table(header, cells)


def table_of_predictions(rows: Sequence[dict[str, Any]], task: str, network: str) -> str:
    chosen = [r for r in rows if (r["task"], r["network"]) == (task, network)]
    names = ["allreduce", "ring", "recursive doubling", "gather"]
    cells = [[str(r["nodes"]), *(f"{r[name]:.1%}" for name in names)] for r in chosen]
    header = ["nodes", "allreduce, Open MPI's choice", "always ring", "always recursive doubling",
              "gather"]  # fmt: skip
    return table(header, cells)


def tables_of_predictions(rows: Sequence[dict[str, Any]]) -> str:
    networks, tasks = (list(dict.fromkeys(r[key] for r in rows)) for key in ("network", "task"))
    return "\n\n".join(
        f"### {task}, {network}\n\n{table_of_predictions(rows, task, network)}"
        for network in networks for task in tasks
    )  # fmt: skip


def table_of_limits(rows: Sequence[dict[str, Any]]) -> str:
    """How many nodes keep at least half and four fifths of the ideal speed."""
    cells = []
    for task, network in dict.fromkeys((r["task"], r["network"]) for r in rows):
        chosen = [r for r in rows if (r["task"], r["network"]) == (task, network)]
        for way in ("allreduce", "gather"):
            limits = [most_nodes(chosen, way, share) for share in (0.8, 0.5)]
            cells.append([task, network, way, *limits])
    return table(["policy", "network", "way", "80 % up to", "50 % up to"], cells)


def most_nodes(rows: Sequence[dict[str, Any]], way: str, share: float) -> str:
    good = [r["nodes"] for r in rows if r[way] >= share]
    if not good:
        return "1 node"
    return f"{max(good)} nodes" + (" or more" if max(good) == NODES[-1] else "")


def document(found: dict[str, Any], checks: Any, predictions: Any) -> str:
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in checks]
    sizes = (f"{t}: {e} environments x {s} steps" for t, (e, s, _) in found["sizes"].items())
    return TEXT.read_text().format(
        made_by=found["made_by"],
        minibatches=MINIBATCHES,
        most=max(int(n) for n in found["network"]),
        network=NETWORK,
        delay_by=found["delay_by"],
        links=table_of_links(found),
        sizes="; ".join(sizes),
        cores=found["machine"]["cores"],
        work=table_of_work(found),
        good=sum(error <= 0.2 for error in errors),
        count=len(checks),
        largest=max(errors),
        checks=table_of_checks(checks),
        limits=table_of_limits(predictions),
        predictions=tables_of_predictions(predictions),
    )


def draw(predictions: Sequence[dict[str, Any]]) -> Any:
    tasks = list(dict.fromkeys(r["task"] for r in predictions))
    networks = list(dict.fromkeys(r["network"] for r in predictions))
    fig, axes = new_figure(len(tasks), 11, 4.6, sharey=True)
    for axis, task in zip(axes, tasks, strict=True):
        for network, style in zip(networks, ("-", "--"), strict=False):
            rows = [r for r in predictions if (r["task"], r["network"]) == (task, network)]
            for way, colour in (("allreduce", "C0"), ("gather", "C1")):
                shares = [100 * r[way] for r in rows]
                axis.plot(NODES, shares, colour + style, marker="o", ms=4,
                          label=f"{way}, {network}")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(NODES, [str(n) for n in NODES])
        axis.set(xlabel="nodes", title=task, ylim=(0, 105))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("predicted efficiency, %")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    return fig

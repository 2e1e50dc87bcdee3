"""How far training scales: a cost model of one update, checked here, then taken to 1024 nodes.

    sudo python benchmarks/cost_model.py        # measures, checks, predicts: half an hour
    python benchmarks/cost_model.py --from-json # the text and the picture again

On hosts in network namespaces it measures the latency and bandwidth of the collectives by size, the
rollout and the update without communication, and the training itself, which the model has not
seen. Writes benchmarks/results/cost_model.json, docs/scaling.md and docs/scaling.png.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    RESULTS,
    ROOT,
    arguments,
    in_turns,
    machine,
    made_by,
    new_figure,
    number,
    progress,
    spread,
    table,
)

MINIBATCHES = 16
FIELDS = 13  # arrays of a rollout, each gathered by itself
# A barrier, the advantages' sum, episodes (2), the stop flag, collect times.
SMALL_CALLS = 6
NODES = [2**k for k in range(1, 11)]
MICRO_BYTES = [64, 16_384, 36_864, 262_144, 2_097_152, 40_000_000]
NETWORK = "1 Gbit/s, 0.5 ms"
ROLLOUT_STEP_BYTES = 40  # of CartPole
DOC = ROOT / "docs" / "scaling.md"


# ---------------------------------------------------------------------------------------------
# Formulas: a message of n bytes takes latency + n / bandwidth


@dataclass(frozen=True)
class Link:
    latency: float  # seconds
    bandwidth: float  # bytes a second

    def time(self, messages: float, volume: float) -> float:
        """So many messages one after the other that carry `volume` bytes together."""
        return messages * self.latency + volume / self.bandwidth


def algorithm(nodes: int, size: int) -> str:
    """What Open MPI 5 picks for an allreduce by its fixed rules, where these are simple.

    They are for 16 KB and more; below, only the tiny messages of this trainer matter.
    """
    if size < 4096:
        return "recursive doubling"
    if nodes < 4:
        return "ring" if size < 1 << 18 else "rabenseifner"
    if 64 <= nodes < 256 and size < 1 << 18:
        return "reduce and broadcast" if nodes >= 128 and size < 1 << 17 else "recursive doubling"
    return "rabenseifner"


def schedule(name: str, nodes: int, size: int) -> tuple[float, float]:
    """Messages one after the other, and the bytes that they carry past one node."""
    turns = math.ceil(math.log2(nodes))
    if name == "ring":
        return 2 * (nodes - 1), 2 * (nodes - 1) / nodes * size
    if name == "recursive doubling":
        return turns, turns * size
    if name == "reduce and broadcast":
        return 2 * turns, 2 * turns * size
    return 2 * turns, 2 * (nodes - 1) / nodes * size  # rabenseifner: halving, then doubling


def allreduce_s(link: Link, nodes: int, size: int, name: str = "") -> float:
    return link.time(*schedule(name or algorithm(nodes, size), nodes, size))


def gather_s(link: Link, nodes: int, size: int) -> float:
    """Every node's `size` bytes through the one link of rank 0, after the lengths are known."""
    return link.time(math.ceil(math.log2(nodes)) + 1, (nodes - 1) * size)


def broadcast_s(link: Link, nodes: int, size: int) -> float:
    """A tree; a long message is cut into pieces that follow each other."""
    turns = math.ceil(math.log2(nodes))
    return link.time(turns, size * min(turns, 2))


@dataclass(frozen=True)
class Work:
    """Seconds of one node's part of an update without communication, and its sizes."""

    collect: float
    update: float
    update_more: float  # of each further node's rows, when one node learns from all
    params: int
    rollout: int  # bytes

    @property
    def alone(self) -> float:
        return self.collect + self.update


def period_allreduce(work: Work, link: Link, nodes: int, name: str = "") -> float:
    if nodes == 1:
        return work.alone
    gradients = MINIBATCHES * allreduce_s(link, nodes, 4 * work.params, name)
    return work.alone + gradients + SMALL_CALLS * allreduce_s(link, nodes, 8)


def period_gather(work: Work, link: Link, back: Link, nodes: int) -> float:
    """Rank 0 receives everything, learns from all rows, and sends the parameters back."""
    if nodes == 1:
        return work.alone
    calls = (FIELDS - 1) * gather_s(link, nodes, 0) + gather_s(link, nodes, work.rollout)
    learn = work.update + (nodes - 1) * work.update_more
    model = broadcast_s(back, nodes, 4 * work.params)
    return work.collect + calls + learn + model + SMALL_CALLS * allreduce_s(link, nodes, 8)


def fit_link(rows: Sequence[tuple[float, float, float]]) -> Link:
    """From (messages, bytes, seconds): least squares of the relative error, both at least 0."""
    matrix = np.array([[m / s, b / s] for m, b, s in rows])
    (latency, per_byte), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    if latency <= 0:  # lost in the noise beside the bytes
        latency, per_byte = 0.0, np.median([s / b for m, b, s in rows])
    return Link(float(latency), 1 / float(per_byte))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and height at x = 1 of the straight line through the points."""
    slope, height = np.polyfit(np.asarray(xs) - 1.0, ys, 1)
    return float(slope), float(height)


# ---------------------------------------------------------------------------------------------
# Measuring the network: one rank of the worker on each host


def work_on_network(out: Path, repeats: int) -> None:
    from spmdrl.parallel.process import prepare_process
    from spmdrl.parallel.topology import detect
    from spmdrl.parallel.world import connect

    topology = detect()
    prepare_process(topology, 1)
    world = connect(topology)
    from spmdrl.parallel.sync import broadcast_tree  # jax from here on

    cases = {}
    for size in MICRO_BYTES:
        cases["allreduce", size] = allreduce_call(world, size)
        data = np.zeros(size, np.uint8)
        cases["gather", size] = lambda data=data: world.gather_rows(data)
        tree = {"params": np.zeros(size // 4, np.float32)}
        cases["broadcast", size] = lambda tree=tree: broadcast_tree(world, tree)
    times: dict[Any, list[float]] = {case: [] for case in cases}
    for call in cases.values():
        call()  # compiles, and opens the connections
    for case in in_turns(list(cases), repeats):
        world.barrier()
        start = time.perf_counter()
        cases[case]()
        seconds = time.perf_counter() - start
        slowest = float(world.table(np.array([seconds])).max())
        times[case].append(slowest / calls_in_a_row(*case))
    if world.is_root:
        rows = [[kind, size, spread(v).median] for (kind, size), v in times.items()]
        out.write_text(json.dumps(rows))


def allreduce_call(world: Any, size: int) -> Callable[[], Any]:
    """The trainer's sum of a gradient of `size` bytes in two arrays, packing included.

    As often in one program as in an update: what it costs to start a program is not the network's.
    """
    import jax
    import jax.numpy as jnp

    from spmdrl.config import SyncConfig
    from spmdrl.parallel.sync import make_grad_sync

    add = make_grad_sync(SyncConfig(), world, 1).in_step

    def one(tree: Any, _: None) -> tuple[Any, None]:
        return jax.tree.map(lambda x: x[None], add(tree, tree)), None

    calls = calls_in_a_row("allreduce", size)
    all_of_them = jax.jit(lambda tree: jax.lax.scan(one, tree, length=calls)[0])
    tree = [jnp.zeros((1, size // 8)), jnp.zeros((1, size // 8))]
    return lambda: jax.block_until_ready(all_of_them(tree))


def calls_in_a_row(kind: str, size: int) -> int:
    if kind != "allreduce":
        return 1
    return MINIBATCHES if size < 1 << 22 else 2  # a large message hides the start of a program


def fit_all(rows: Sequence[Sequence[Any]], nodes: int) -> dict[str, Link]:
    """A link for each kind of collective, from the times of its sizes."""

    def of(kind: str) -> Link:
        turns = math.ceil(math.log2(nodes))
        points = []
        for found, size, seconds in rows:
            if found == kind == "allreduce":
                points.append((*schedule(algorithm(nodes, size), nodes, size), seconds))
            elif found == kind == "gather":
                points.append((turns + 1, (nodes - 1) * size, seconds))
            elif found == kind:
                points.append((turns, size * min(turns, 2), seconds))
        return fit_link(points)

    return {kind: of(kind) for kind in ("allreduce", "gather", "broadcast")}


# ---------------------------------------------------------------------------------------------
# Measuring and checking the training


def measure(repeats: int, counts: Sequence[int], updates: int) -> dict[str, Any]:
    from namespaces import Hosts
    from scaling import POLICIES
    from trainer import Trainer, shortened

    trainer, tasks = Trainer(), shortened(POLICIES, updates)
    found: dict[str, Any] = {"network": {}, "runs": []}
    with Hosts(max(counts), trainer) as hosts:
        found["delay_by"] = hosts.delay_by
        hosts.set_network(NETWORK)
        for count in counts:
            found["network"][str(count)] = measure_network(hosts, trainer, count)
        cases = [(task, way, n) for task in tasks for way, n in ways(counts)]
        for task, way, n in progress(in_turns(cases, repeats), "training"):
            for timing in train(trainer, hosts, task, way, n):
                row = {"task": task.name, "way": way, "hosts": n}
                found["runs"].append(row | {"seconds": timing.phases, "period": timing.period})
    found["sizes"] = {task.name: [task.envs, task.steps, task.updates] for task in tasks}
    return found


def ways(counts: Sequence[int]) -> list[tuple[str, int]]:
    alone = [("alone", n) for n in (1, *counts)]
    rows = [("more rows", n) for n in counts]
    return alone + rows + [(way, n) for way in ("allreduce", "gather") for n in counts]


def train(trainer: Any, hosts: Any, task: Any, way: str, n: int) -> Any:
    """`alone`: n hosts compute at the same time; `more rows`: one does what n would."""
    if way == "alone":
        return trainer.alone(task, copies=n)
    if way == "more rows":
        return trainer.alone(replace(task, envs=task.envs * n))
    return [hosts.train(task.with_flags("--sync.strategy", way), n)]


def measure_network(hosts: Any, trainer: Any, count: int) -> Any:
    out = trainer.new_run().with_suffix(".json")
    # mpi4py ends all ranks when one of them fails; by itself MPI would wait for ever.
    worker = [sys.executable, "-m", "mpi4py", str(Path(__file__).resolve())]
    hosts.run([*worker, "--worker", str(out)], count, out.with_suffix(".log"))
    return json.loads(out.read_text())


PARAMS = {"9k parameters": 9_155, "10M parameters": 9_988_190}


def seconds(found: dict[str, Any], task: str, way: str, n: int, phase: str) -> float:
    rows = [r for r in found["runs"] if (r["task"], r["way"], r["hosts"]) == (task, way, n)]
    values = [r["period"] if phase == "period" else r["seconds"][phase] for r in rows]
    return spread(values).median


def work_of(found: dict[str, Any], task: str, crowd: int) -> Work:
    """One host's work while `crowd` hosts compute on this machine."""
    envs, steps, _ = found["sizes"][task]
    counts = sorted(int(n) for n in found["network"])
    rows = [1.0, *counts]
    updates = [seconds(found, task, "alone", 1, "update")]
    updates += [seconds(found, task, "more rows", n, "update") for n in counts]
    period = seconds(found, task, "alone", crowd, "period")
    update = seconds(found, task, "alone", crowd, "update")
    more = max(0.0, line(rows, updates)[0])
    return Work(period - update, update, more, PARAMS[task], envs * steps * ROLLOUT_STEP_BYTES)


def predict(work: Work, links: dict[str, Link], way: str, nodes: int) -> float:
    if way == "allreduce":
        return period_allreduce(work, links["allreduce"], nodes)
    return period_gather(work, links["gather"], links["broadcast"], nodes)


def check(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured periods of the runs that the model was not fitted to."""
    rows = []
    for task in found["sizes"]:
        for n in sorted(int(n) for n in found["network"]):
            links = fit_all(found["network"][str(n)], n)
            for way in ("allreduce", "gather"):
                work = work_of(found, task, n)
                # Who waits for rank 0 polls, and takes as much of a shared core as who computes.
                crowding = work.update / work_of(found, task, 1).update
                work = replace(work, update_more=work.update_more * crowding)
                rows.append({
                    "task": task, "hosts": n, "way": way,
                    "predicted": predict(work, links, way, n),
                    "measured": seconds(found, task, way, n, "period"),
                })  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------
# Up to 1024 nodes


ASSUMED = {"25 Gbit/s, 20 µs (assumed)": Link(20e-6, 3.1e9)}


def extrapolate(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Efficiency of each way; nodes do not share cores, so a host alone is the measure."""
    fewest = min(int(n) for n in found["network"])
    measured = fit_all(found["network"][str(fewest)], fewest)
    networks = {f"{NETWORK} (measured)": measured}
    networks |= {name: dict.fromkeys(measured, link) for name, link in ASSUMED.items()}
    rows = []
    for task in found["sizes"]:
        work = work_of(found, task, 1)
        for network, links in networks.items():
            for nodes in NODES:
                periods = {
                    "allreduce": predict(work, links, "allreduce", nodes),
                    "ring": period_allreduce(work, links["allreduce"], nodes, "ring"),
                    "recursive doubling": period_allreduce(
                        work, links["allreduce"], nodes, "recursive doubling"
                    ),
                    "gather": predict(work, links, "gather", nodes),
                }
                shares = {way: work.alone / period for way, period in periods.items()}
                rows.append({"task": task, "network": network, "nodes": nodes} | shares)
    return rows


# ---------------------------------------------------------------------------------------------
# Writing


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


ASSUMPTIONS = """\
What the model assumes:

- One rank a node, and the same work on every node however many there are: efficiency is the time
  of an update on one node over the time on all of them.
- A collective of n bytes takes `messages x latency + bytes / bandwidth`. Ring: 2(N-1) messages,
  2n(N-1)/N bytes. Recursive doubling: log2 N messages, n log2 N bytes. Rabenseifner, which Open
  MPI 5 takes for most of these sizes: 2 log2 N messages, 2n(N-1)/N bytes. Which one is taken
  when was read in Open MPI 5's source, not observed in the library.
- Nothing overlaps: a gradient is computed, then summed, {minibatches} times an update, then the
  next rollout begins. So it is in the trainer.
- Gather: rank 0 receives every rollout through its one link, learns from all rows by itself, and
  sends the parameters back. Its update grows with the nodes, which the others spend waiting.
  Open MPI waits by polling, so where hosts share a core, as in the check below, those that wait
  slow rank 0 down as much as those that compute. (An earlier version of this model left that out
  and was wrong by 41 % and 47 % for gather on 4 hosts.)
- Every node is equally fast, and the network is the same between any two and carries all pairs at
  once. Slow nodes and a crowded switch cost more than this.
- Beyond {most} hosts nothing was measured: those rows are computed, not observed.
"""


def document(found: dict[str, Any], checks: Any, predictions: Any) -> str:
    counts = sorted(int(n) for n in found["network"])
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in checks]
    good = sum(error <= 0.2 for error in errors)
    sizes = "; ".join(f"{t}: {e} environments x {s} steps" for t, (e, s, _) in
                      found["sizes"].items())  # fmt: skip
    parts = [
        "# How far it scales",
        f"{found['made_by']} The text and all numbers below are written by that program from "
        "`benchmarks/results/cost_model.json`.",
        "![Predicted efficiency by the number of nodes](scaling.png)",
        ASSUMPTIONS.format(minibatches=MINIBATCHES, most=max(counts)),
        "## The network",
        f"Hosts are network namespaces of one machine, {NETWORK} between any two; the delay comes "
        f"from {found['delay_by']}. Times of one call, medians, and the line fitted to them.",
        table_of_links(found),
        "## The work of a host",
        f"CartPole; work of one host in an update: {sizes}. Without communication. Hosts share "
        f"{found['machine']['cores']} cores, so the times are taken with as many hosts computing "
        "at once as in the run to be predicted.",
        table_of_work(found),
        "## Does the model hold?",
        f"Time of one update of the trainer on these hosts, which the model was not fitted to. "
        f"{good} of {len(checks)} predictions are within 20 %; the largest error is "
        f"{max(errors):.0%}.",
        table_of_checks(checks),
        "## Predicted efficiency",
        table_of_limits(predictions),
    ]
    for network in dict.fromkeys(r["network"] for r in predictions):
        for task in found["sizes"]:
            parts += [f"### {task}, {network}", table_of_predictions(predictions, task, network)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=0, help="at most, for a quick look")
    parser.add_argument("--from-json", action="store_true", help="do not measure again")
    parser.add_argument("--worker", type=Path, help="(internal) run one rank")
    args = parser.parse_args()
    if args.worker:
        return work_on_network(args.worker, repeats=5)
    file = RESULTS / "cost_model.json"
    if args.from_json:
        found = json.loads(file.read_text())
    else:
        host = machine()
        found = measure(args.repeats, args.hosts, args.updates)
        found |= {"machine": host, "made_by": made_by(host)}
        file.write_text(json.dumps(found, indent=1) + "\n")
    text = document(found, check(found), predictions := extrapolate(found))
    DOC.write_text(text)
    draw(predictions).savefig(DOC.with_suffix(".png"), dpi=110)
    print(f"{text}\nwritten to {DOC.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    main()

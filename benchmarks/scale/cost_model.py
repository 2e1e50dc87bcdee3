"""How far training scales: a cost model of one update, checked here, then taken to 1024 nodes.

    sudo python -m benchmarks.cost_model        # measures, checks, predicts: half an hour
    python -m benchmarks.cost_model --from-json # the text and the picture again

On hosts in network namespaces it measures the latency and bandwidth of the collectives by size, the
rollout and the update without communication, and the training itself, which the model has not
seen. Writes benchmarks/results/cost_model.json, docs/scaling.md and docs/scaling.png.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lib.common import (
    RESULTS,
    ROOT,
    arguments,
    in_turns,
    machine,
    made_by,
    progress,
    write_json,
)
from benchmarks.lib.ranks import rank_command
from benchmarks.lib.trainer import Task, Timing, Trainer, shortened
from benchmarks.scale.namespaces import Hosts
from benchmarks.scale.predictions import NETWORK, check, extrapolate
from benchmarks.scale.scaling import POLICIES
from benchmarks.scale.scaling_page import document, draw

DOC = ROOT / "docs" / "scaling.md"


def measure(repeats: int, counts: Sequence[int], updates: int) -> dict[str, Any]:
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


def train(trainer: Trainer, hosts: Hosts, task: Task, way: str, n: int) -> list[Timing]:
    """`alone`: n hosts compute at the same time; `more rows`: one does what n would."""
    if way == "alone":
        return trainer.alone(task, copies=n)
    if way == "more rows":
        return trainer.alone(replace(task, envs=task.envs * n))
    return [hosts.train(task.with_flags("--sync.strategy", way), n)]


def measure_network(hosts: Hosts, trainer: Trainer, count: int) -> Any:
    out = trainer.new_run().with_suffix(".json")
    worker = rank_command("benchmarks.scale.network_rank", out)
    hosts.run(worker, count, out.with_suffix(".log"))
    return json.loads(out.read_text())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=0, help="at most, for a quick look")
    parser.add_argument("--from-json", action="store_true", help="do not measure again")
    args = parser.parse_args()
    if args.from_json:
        found = json.loads((RESULTS / "cost_model.json").read_text())
    else:
        host = machine()
        found = measure(args.repeats, args.hosts, args.updates)
        found |= {"machine": host, "made_by": made_by(host)}
        write_json("cost_model", found)
    text = document(found, check(found), predictions := extrapolate(found))
    DOC.write_text(text)
    draw(predictions).savefig(DOC.with_suffix(".png"), dpi=110)
    print(f"{text}\nwritten to {DOC.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""The cost model against measured runs, and what it says of up to 1024 nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.lib.common import spread
from benchmarks.scale.cost_formulas import Link, Work, fit_all, line, period_allreduce, predict

__all__ = ["NETWORK", "NODES", "check", "extrapolate", "work_of"]

NODES = [2**k for k in range(1, 11)]
NETWORK = "1 Gbit/s, 0.5 ms"
ROLLOUT_STEP_BYTES = 40  # of CartPole
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

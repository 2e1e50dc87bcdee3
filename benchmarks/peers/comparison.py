"""The same work done by spmdrl and by other trainers: steps per second, and their ratio.

    python -m benchmarks.peers                              # about 30 minutes on two cores
    python -m benchmarks.peers --cases "CartPole 8" --peers SB3 SBX
    python -m benchmarks.peers --build                      # only install the peers

Each peer runs in a virtual environment of its own, which the first start installs from the package
index (3 GB under ~/.cache/spmdrl/peers; more where only PyTorch with CUDA is in reach). Before the
rounds that count, every trainer's settings are tried, spmdrl's too, those near the fastest three
times; the rounds use the fastest. All take turns, and a ratio is between neighbours in time. Cases
that are not measured again stay in the results. Writes benchmarks/results/peers.json, .md and .png.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.common import (
    RESULTS,
    Spread,
    about_spread,
    arguments,
    machine,
    made_by,
    new_figure,
    number,
    pretty,
    save,
    spread,
    table,
)
from benchmarks.peers.contest import CASES, US, Case, Contest, Found, Runs, choose
from benchmarks.peers.references.work import Work
from benchmarks.peers.rivals import PEERS

Occasion = dict[str, Any]  # of a case: when it was measured, in how many rounds, under which load


def ratio(ours: Found, theirs: Found) -> Spread | None:
    """Taken in each round and then the median: neighbours in time. None where one did not run."""
    if ours.failure or theirs.failure:
        return None
    return spread([a / b for a, b in zip(ours.rates, theirs.rates, strict=True)])


def summarize(cases: Sequence[Case], found: dict[tuple[str, str], Found]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        for entry in case.entries:
            own, theirs = found[case.name, US], found[case.name, entry.name]
            rows.append({
                "case": case.name,
                "trainer": entry.name,
                "setting": theirs.setting if theirs.trial else "",
                "trial": theirs.trial,
                "refused": theirs.refused,
                "sps": spread(theirs.rates) if theirs.rates else None,
                "ratio": None if entry.name == US else ratio(own, theirs),
                "goal": entry.goal,
                "failure": theirs.failure,
            })  # fmt: skip
    return rows


def kept() -> dict[str, Any]:
    """What earlier calls have measured."""
    file = RESULTS / "peers.json"
    return json.loads(file.read_text()) if file.exists() else {"runs": [], "cases": {}, "peers": {}}


def joined(
    known: Sequence[dict[str, Any]], found: dict[tuple[str, str], Found]
) -> tuple[list[Case], dict[tuple[str, str], Found]]:
    """With the earlier runs of the cases that were not measured now."""
    new = {case for case, _ in found}
    earlier = {
        (run["case"], run["trainer"]): Found(
            **{k: x for k, x in run.items() if k not in ("case", "trainer")}
        )
        for run in known
        if run["case"] not in new
    }
    both = earlier | found
    trainers = {c.name: [trainer for name, trainer in both if name == c.name] for c in CASES}
    cases = [case for name, those in trainers.items() for case in choose([name], those, 0)]
    return cases, both


def report(
    cases: Sequence[Case], rows: Sequence[dict[str, Any]], versions: dict[str, dict[str, str]],
    occasions: dict[str, Occasion], head: str,
) -> str:  # fmt: skip
    repeats = max(occasion["rounds"] for occasion in occasions.values())
    header = ["case", "trainer", "setting", "steps/s", "spmdrl / theirs", "at least"]
    return "\n\n".join(
        [
            head,
            table(header, [_cells(row) for row in rows]),
            f"{about_spread(repeats)} Ratios are taken in each round and then their median. Each "
            "trainer runs with the fastest of its settings, found in runs that do not count:",
            table(["case", "trainer", "setting", "steps/s in the trial"], _trials(rows)),
            "The work of an update, and when it was measured. `load` is the load average at the "
            "start of the rounds, which is the benchmark's own if nothing else ran.",
            table(
                ["case", "environment", "", "rounds", "measured", "load"],
                [[c.name, c.work.env, size(c.work), *_occasion(occasions[c.name])] for c in cases],
            ),
            "Versions:",
            table(["trainer", ""], [[name, _listed(found)] for name, found in versions.items()]),
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    start = [row["case"], row["trainer"], row["setting"]]
    goal = f"{row['goal']:g}" if row["goal"] else ""
    if row["failure"]:
        return [*start, f"not run: {row['failure']}", "", goal]
    found = pretty(row["ratio"]) if row["ratio"] else ""
    return [*start, pretty(row["sps"]), found, goal]


def _trials(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = []
    for row in rows:
        start = [row["case"], row["trainer"]]
        cells += [[*start, setting, number(sps)] for setting, sps in row["trial"].items()]
        cells += [[*start, setting, f"not run: {why}"] for setting, why in row["refused"].items()]
    return cells


def _occasion(of: Occasion) -> list[str]:
    low, high = min(of["loads"]), max(of["loads"])
    return [str(of["rounds"]), of["when"], f"{low:.1f}–{high:.1f}"]


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def size(work: Work) -> str:
    net = "Nature CNN" if work.env.startswith("Pong") else "two MLPs 64 x 64, tanh"
    return (
        f"{work.envs} environments x {work.steps} steps, {work.epochs} epochs x {work.minibatches} "
        f"minibatches; {net}"
    )


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """One bar a ratio on a logarithmic scale, with a tick where it should reach."""
    chosen = [row for row in rows if row["ratio"]][::-1]
    fig, (axis,) = new_figure(1, 9, 1.2 + 0.45 * max(1, len(chosen)))
    for y, row in enumerate(chosen):
        found: Spread = row["ratio"]
        errors = [[found.median - found.low], [found.high - found.median]]
        axis.barh(y, found.median - 1, left=1, color="C0", xerr=errors, capsize=4)
        axis.text(found.high * 1.06, y, number(found.median), va="center")
        if row["goal"]:
            axis.plot([row["goal"]] * 2, [y - 0.42, y + 0.42], color="k", lw=2)
    axis.set_yticks(range(len(chosen)), [f"{row['case']}, {row['trainer']}" for row in chosen])
    axis.axvline(1, color="k", lw=0.8)
    axis.set(xscale="log", xlabel="spmdrl's steps/s over theirs; black: at least")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.12)
    return fig


def versions_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    names = dict.fromkeys(row["trainer"] for row in rows if row["trainer"] != US)
    return {name: PEERS[name].versions() for name in names if PEERS[name].venv.is_built()}


def main() -> None:
    parser = arguments(__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="*", default=names, choices=names)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=0, help="at most, for a quick look")
    parser.add_argument("--build", action="store_true", help="only install the peers")
    args = parser.parse_args()
    cases = choose(args.cases, args.peers, args.updates)
    if not cases:
        sys.exit("none of these peers takes part in these cases")
    host, contest = machine(), Contest(cases, Runs().rate)
    contest.build()
    if args.build:
        return
    contest.try_settings()
    contest.measure(args.repeats)
    known = kept()
    occasion = {"when": host["when"], "rounds": args.repeats, "loads": contest.loads}
    occasions = known["cases"] | {case.name: occasion for case in cases}
    cases, found = joined(known["runs"], contest.found)
    rows = summarize(cases, found)
    versions = known["peers"] | versions_of(rows)
    text = report(cases, rows, versions, occasions, made_by(host))
    runs = [
        {"case": case, "trainer": trainer, **vars(one)} for (case, trainer), one in found.items()
    ]
    data = {"machine": host, "peers": versions, "cases": occasions, "runs": runs}
    save("peers", data | {"summary": rows}, text, draw(rows))


if __name__ == "__main__":
    main()

"""Is a changed trainer as fast as before? Two checkouts in turns: steps per second, second start.

    python -m benchmarks.old_new OLD_TREE --control       # first: what equal programs differ by
    python -m benchmarks.old_new OLD_TREE [NEW_TREE]      # about 18 minutes on two cores
    python -m benchmarks.old_new OLD_TREE --cases cartpole-64 --rounds 3

NEW_TREE is this checkout unless another one is named. Each run is a process of one rank on the same
two cores, with its tree's own code, configs and cache of compiled programs; a round that does not
count fills the caches, then each round has every case, old first or new first in turns (A B B A).
A run's speed is the median of its updates after the first ones. The second start is the time from
the start of the process to the first row of metrics. A ratio is new over old within one round.

Exit code 1 if a case is slower: its interval is on the wrong side of 1 by more than the noise band,
which is what the median of `--control` (old against old) was off by, at least 1 %. Writes
benchmarks/results/old_new.json and .md, or old_new_control.* for `--control`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.common import (
    RESULTS,
    ROOT,
    Spread,
    about_spread,
    arguments,
    machine,
    made_by,
    number,
    progress,
    save,
    spread,
    table,
)
from benchmarks.lib.trainer import TIMEOUT_S, Task, read_metrics
from benchmarks.speed import throughput

CASES = {case.name.lower().replace(" ", "-"): case.task(1) for case in throughput.CASES}
USUAL = ("cartpole-8", "cartpole-64", "cartpole-1024", "ant-8", "pong-8")
SIDES = ("old", "new")
LOOK_EVERY_S = 0.01  # for the first row of metrics
LEAST_BAND = 0.01
ASSUMED_BAND = 0.05  # where no control was measured


@dataclass(frozen=True)
class Measure:
    title: str
    more_is_better: bool


MEASURES = {"sps": Measure("steps/s", True), "start_s": Measure("second start, s", False)}
Run = dict[str, float]  # one value for each of MEASURES


class BadTree(Exception):
    """The message names the folder and what is wrong with it."""


# ---------------------------------------------------------------------------------------------
# Running


@dataclass(frozen=True)
class Side:
    """A checkout, and a folder for its caches and runs."""

    tree: Path
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        # A cache that the user has chosen would be shared by both sides.
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        return env | {"PYTHONPATH": str(self.tree), "XDG_CACHE_HOME": str(self.folder / "cache")}

    def check(self, tasks: Sequence[Task]) -> None:
        for file in ["spmdrl/train.py", *(f"configs/{task.config}.py" for task in tasks)]:
            if not (self.tree / file).is_file():
                raise BadTree(f"{self.tree} has no {file}; name the root of a checkout")
        words = [sys.executable, "-c", "import spmdrl; print(spmdrl.__file__)"]
        answer = subprocess.run(
            words, cwd=self.tree, env=self.env, capture_output=True, text=True, check=True
        )
        if not Path(answer.stdout.strip()).resolve().is_relative_to(self.tree):
            raise BadTree(f"{self.tree}: its spmdrl is not the one that Python imports there")

    def revision(self) -> str:
        words = ["git", "describe", "--always", "--dirty"]
        answer = subprocess.run(words, cwd=self.tree, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or "no revision"

    def train(self, task: Task) -> Run:
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
        command = ["taskset", "-c", cores, *task.arguments(1, run), "--nprocs", "1"]
        log = run.with_suffix(".log")
        start = time.perf_counter()
        with log.open("wb") as out:
            child = subprocess.Popen(command, cwd=self.tree, env=self.env, stdout=out, stderr=out)
        try:
            first = _await_row(child, run / "metrics.jsonl") - start
            code = child.wait(TIMEOUT_S)
        finally:
            child.kill()  # does nothing if it has ended
        if code != 0:
            raise RuntimeError(f"{task.name} of {self.tree} failed:\n{log.read_text()[-3000:]}")
        return {"sps": row_median(read_metrics(run), task.skip), "start_s": first}


def _await_row(child: subprocess.Popen[bytes], metrics: Path) -> float:
    """When the first row was there, or the process gone."""
    end = time.perf_counter() + TIMEOUT_S
    while child.poll() is None and time.perf_counter() < end:
        if metrics.exists() and b"\n" in metrics.read_bytes():
            break
        time.sleep(LOOK_EVERY_S)
    return time.perf_counter()


def row_median(rows: Sequence[dict[str, Any]], skip: int) -> float:
    return statistics.median(row["perf/sps"] for row in rows[skip:])


def order(cases: Sequence[str], rounds: int) -> list[tuple[int, str, str]]:
    """Round, case and side; round 0 fills the caches. Who was second is first in the next round."""
    return [
        (turn, case, side)
        for turn in range(rounds + 1)
        for case in cases
        for side in (SIDES if turn % 2 else SIDES[::-1])
    ]


Found = dict[str, dict[str, list[Run]]]  # by case and side, one run a round


def measure(cases: Sequence[str], rounds: int, train: Callable[[str, str], Run]) -> Found:
    found: Found = {case: {side: [] for side in SIDES} for case in cases}
    for turn, case, side in progress(order(cases, rounds), "old and new"):
        run = train(case, side)
        if turn > 0:
            found[case][side].append(run)
    return found


# ---------------------------------------------------------------------------------------------
# Judging


Summary = dict[str, dict[str, dict[str, Spread]]]  # by case and measure: old, new and ratio
Bands = dict[tuple[str, str], float]  # by case and measure


def summarize(found: Found) -> Summary:
    """Ratios are taken in each round: neighbours in time."""
    summary: Summary = {}
    for case, runs in found.items():
        summary[case] = {}
        for name in MEASURES:
            values = {side: [run[name] for run in runs[side]] for side in SIDES}
            ratios = [b / a for a, b in zip(values["old"], values["new"], strict=True)]
            sides = {side: spread(values[side]) for side in SIDES}
            summary[case][name] = sides | {"ratio": spread(ratios)}
    return summary


def bands(control: Summary) -> Bands:
    """How far off 1 the medians of old against old were."""
    return {
        (case, name): max(LEAST_BAND, abs(found["ratio"].median - 1))
        for case, measures in control.items()
        for name, found in measures.items()
    }


def verdict(ratio: Spread, band: float, more_is_better: bool) -> str:
    """`unclear` if the median is beyond the band, but not the whole interval: take more rounds."""
    low, median, high = ratio.low, ratio.median, ratio.high
    if not more_is_better:
        low, median, high = 1 / high, 1 / median, 1 / low
    if high < 1 - band:
        return "slower"
    if low > 1 + band:
        return "faster"
    return "same" if abs(median - 1) <= band else "unclear"


def judge(summary: Summary, band: Bands) -> dict[tuple[str, str], str]:
    return {
        (case, name): verdict(
            found["ratio"], band.get((case, name), ASSUMED_BAND), MEASURES[name].more_is_better
        )
        for case, measures in summary.items()
        for name, found in measures.items()
    }


def report(summary: Summary, band: Bands, rounds: int) -> str:
    rows = []
    for (case, name), what in judge(summary, band).items():
        found, measured = summary[case][name], (case, name) in band
        ratio, width = found["ratio"], band.get((case, name), ASSUMED_BAND)
        rows.append([
            case, MEASURES[name].title, *(number(found[side].median) for side in SIDES),
            f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})",
            f"±{width:.1%}" + ("" if measured else " (assumed)"), what,
        ])  # fmt: skip
    header = ["case", "", "old", "new", "new / old", "noise band", "verdict"]
    return f"{table(header, rows)}\n\n{about_spread(rounds)} Ratios are taken in each round."


def known_bands(file: Path) -> Bands:
    """Of the control that was measured last, if any was."""
    if not file.exists():
        return {}

    def as_spread(found: dict[str, Any]) -> Any:
        return Spread(**found) if "median" in found else found

    return bands(json.loads(file.read_text(), object_hook=as_spread)["summary"])


def compare(
    trees: dict[str, Path], cases: Sequence[str], rounds: int
) -> tuple[Found, dict[str, str]]:
    """The runs, and the revision of each side."""
    tasks = {case: CASES[case] for case in cases}
    with tempfile.TemporaryDirectory(prefix="spmdrl-benchmark-") as folder:
        sides = {name: Side(tree.resolve(), Path(folder) / name) for name, tree in trees.items()}
        for side in sides.values():
            side.folder.mkdir()
            side.check(list(tasks.values()))
        revisions = {name: side.revision() for name, side in sides.items()}
        return measure(cases, rounds, lambda case, side: sides[side].train(tasks[case])), revisions


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("new", type=Path, metavar="NEW_TREE", nargs="?", default=ROOT)
    parser.add_argument("--cases", nargs="*", default=USUAL, choices=list(CASES), metavar="CASE",
                        help=f"of {', '.join(CASES)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--control", action="store_true", help="old against old: the noise band")
    args = parser.parse_args()
    trees = {"old": args.old, "new": args.old if args.control else args.new}
    if not args.control and args.old.resolve() == args.new.resolve():
        parser.error("OLD_TREE is this tree; name another checkout, or --control")
    about = machine()
    try:
        found, revisions = compare(trees, args.cases, args.rounds)
    except BadTree as error:
        parser.error(str(error))
    summary = summarize(found)
    control = RESULTS / "old_new_control.json"
    band = bands(summary) if args.control else known_bands(control)
    # Where the checkouts were is nobody's business: their revisions say what they are.
    words = {str(args.old): "OLD_TREE", str(args.new): "NEW_TREE"}
    versions = "old: {old}, new: {new}.".format(**{k: f"`{v}`" for k, v in revisions.items()})
    text = "\n\n".join([made_by(about, words), versions, report(summary, band, args.rounds)])
    data = {"machine": about, "revisions": revisions, "runs": found, "summary": summary}
    save("old_new_control" if args.control else "old_new", data, text)
    return 0 if args.control else int("slower" in judge(summary, band).values())


if __name__ == "__main__":
    sys.exit(main())

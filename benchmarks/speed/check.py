"""Is training still as near to its limits as it was? Compares shares, not absolute speed.

    python -m benchmarks.check                               # against results/baseline.json
    python -m benchmarks.check --against results/baseline.json
    python -m benchmarks.check --write                       # what is there now is the baseline

Takes a second: it reads the shares of the limit that `python -m benchmarks.throughput` has written,
and measures nothing. A limit is measured within the same minutes as the training beside it, so that
a share depends on the machine's mood far less than steps per second do.

The noise band: a case is worse if its share is more than 10 % below the baseline's and if, besides,
the two intervals that hold the true medians do not overlap. The first alone would complain of noisy
cases, the second alone of differences that are real but do not matter. Exit code 1 if a case is
worse, or is in the baseline and was not measured; else 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.common import RESULTS, arguments, table

FLOOR = 0.10  # of the baseline's share
BASELINE = RESULTS / "baseline.json"


def shares(throughput: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {name: found["share"] for name, found in throughput["cases"].items()}


def band(now: dict[str, float], before: dict[str, float]) -> float:
    """How far below the baseline's share a case may be."""
    overlap = (before["median"] - before["low"]) + (now["high"] - now["median"])
    return max(FLOOR * before["median"], overlap)


def verdict(now: dict[str, float] | None, before: dict[str, float] | None) -> str:
    if before is None:
        return "not in the baseline"
    if now is None:
        return "not measured"
    if before["median"] - now["median"] > band(now, before):
        return "worse"
    if now["median"] - before["median"] > band(before, now):
        return "better"
    return "same"


def compare(
    now: dict[str, dict[str, float]], before: dict[str, dict[str, float]]
) -> dict[str, str]:
    """Every name of either side, those of the baseline first."""
    names = [*before, *(name for name in now if name not in before)]
    return {name: verdict(now.get(name), before.get(name)) for name in names}


def report(
    now: dict[str, dict[str, float]], before: dict[str, dict[str, float]], found: dict[str, str]
) -> str:
    def show(side: dict[str, dict[str, float]], name: str) -> str:
        if name not in side:
            return "–"
        share = side[name]
        return f"{share['median']:.0%} ({share['low']:.0%}–{share['high']:.0%})"

    def allowed(name: str) -> str:
        if name not in now or name not in before:
            return "–"
        return f"{before[name]['median'] - band(now[name], before[name]):.0%}"

    rows = [[n, show(before, n), show(now, n), allowed(n), what] for n, what in found.items()]
    return table(["case", "baseline", "now", "at least", "verdict"], rows)


def read(path: Path, remedy: str) -> dict[str, Any]:
    if not path.exists():
        raise SystemExit(f"check: {path} does not exist; {remedy}")
    return json.loads(path.read_text())


def find(name: str) -> Path:
    """As given, or below benchmarks/ wherever the command is called from."""
    path = Path(name)
    return path if path.exists() or path.is_absolute() else RESULTS.parent / path


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--against", default=str(BASELINE), metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write FILE instead of reading it")
    args = parser.parse_args()
    present = read(RESULTS / "throughput.json", "run `python -m benchmarks.throughput` first")
    now, path = shares(present), find(args.against)
    if args.write:
        about = {name: found["machine"] for name, found in present["cases"].items()}
        path.write_text(json.dumps({"shares": now, "machine": about}, indent=1) + "\n")
        print(f"{len(now)} shares written to {path.name}")
        return 0
    before = read(path, "make it from the present results with --write")["shares"]
    found = compare(now, before)
    print(report(now, before, found))
    bad = [name for name, what in found.items() if what in ("worse", "not measured")]
    print(f"\n{len(bad)} of {len(found)} cases failed" + (f": {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

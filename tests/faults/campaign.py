"""Every kind of fault, one table: what was tried, how often, and what held.

    python -m tests.faults.campaign --trials 20        # writes benchmarks/results/campaign.*
    python -m tests.faults.campaign --list

It goes round the kinds, so that a campaign that is stopped has tried each of them about as often.
It can be stopped and started again: trials that are done stay done, and each has its own random
numbers. What a trial must show is said where its kind is defined.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.children import ROOT
from tests.faults import listening, power, resumes, starts, strangers, strikes
from tests.faults.judge import KINDS
from tests.faults.places import PLACES, Place
from tests.faults.result import RULES, Bench, Result
from tests.faults.trials import LIMITS_S, run_trial

__all__ = ["TRIALS", "main", "read", "table"]

Kind = Callable[[int, random.Random, Bench], Result]


def fault(place: Place, number: int, rng: random.Random, bench: Bench) -> Result:
    """A rank breaks by itself; mpirun has started it."""
    ranks = 2 + number % 2
    env = bench.environment(bench.folder / "fault")
    trial, output = run_trial(place, ranks, rng, env)
    if not trial.held:
        print(output[-4000:], flush=True)
    limit = LIMITS_S.get(place.kind, 5.0)
    why = [trial.why] if trial.why else []
    why += [] if trial.in_time else [f"it took {trial.seconds:.1f} s instead of {limit:.0f}"]
    why += [] if trial.code else ["exit code 0"]
    why += [f"{trial.orphans} processes are left"] if trial.orphans else []
    what = f"rank {trial.rank} of {ranks}"
    name = f"{place.kind}: {place.name}"
    return Result(name, number, what, trial.held, trial.line, "; ".join(why), trial.seconds)


def kinds() -> dict[str, Kind]:
    """Each with its trial: `(number, random numbers, bench) -> Result`."""
    found: dict[str, Kind] = {kind: partial(strikes.trial, kind) for kind in strikes.KINDS}
    by_kind = [place for kind in KINDS for place in PLACES if place.kind == kind]
    found |= {f"{place.kind}: {place.name}": partial(fault, place) for place in by_kind}
    found |= {f"resume: {case.name}": partial(resumes.trial, case) for case in resumes.CASES}
    found |= {"power loss": power.trial, "two starts": starts.trial}
    found |= {kind: partial(strangers.trial, kind) for kind in strangers.KINDS}
    return found | {f"ports: {way}": partial(listening.trial, way) for way in listening.WAYS}


TRIALS = kinds()


def read(file: Path) -> list[Result]:
    """The trials that were judged by today's rules."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [Result(**one) for one in found if one.get("rules") == RULES]


def run(kind: str, number: int, bench: Bench) -> Result:
    """One trial; one that cannot even be made has not held."""
    rng = random.Random(f"{kind} {number}")
    try:
        return TRIALS[kind](number, rng, bench)
    except Exception as error:
        traceback.print_exc()
        why = f"the trial itself failed: {type(error).__name__}: {error}"
        return Result(kind, number, "", False, "", why[:500])


def campaign(chosen: list[str], count: int, minutes: float, out: Path, bench: Bench) -> None:
    until = time.monotonic() + 60.0 * minutes
    done = {(result.kind, result.number) for result in read(out)}
    for number in range(count):
        for kind in chosen:
            if (kind, number) in done:
                continue
            if time.monotonic() > until:
                return
            result = run(kind, number, bench)
            with out.open("a") as file:
                file.write(json.dumps(_without_paths(asdict(result), bench)) + "\n")
            told = "held" if result.held else f"NOT HELD: {result.why}"
            print(f"{result.kind} {number} ({result.seconds:.1f} s): {told}", flush=True)


def _without_paths(record: dict[str, object], bench: Bench) -> dict[str, object]:
    """Of this machine, which mean nothing on another."""
    text = json.dumps(record)
    for path, name in ((bench.folder, "BENCH"), (ROOT, "."), (Path(sys.prefix), "VENV")):
        text = text.replace(str(path), name)
    return dict(json.loads(text))


def table(results: list[Result]) -> str:
    lines = [
        "| kind | trials | held | seconds, median (max) |",
        "|---|---|---|---|",
    ]
    for kind in [kind for kind in TRIALS if any(r.kind == kind for r in results)]:
        some = [result for result in results if result.kind == kind]
        times = [result.seconds for result in some]
        held = sum(result.held for result in some)
        lines.append(
            f"| {kind} | {len(some)} | {held} | {statistics.median(times):.1f} ({max(times):.1f}) |"
        )
    held = sum(result.held for result in results)
    hours = sum(result.seconds for result in results) / 3600
    lines.append(f"| all | {len(results)} | {held} | {hours:.1f} hours in all |")
    failed = [result for result in results if not result.held]
    if failed:
        lines += ["", "Not held:", ""]
        lines += [f"- {r.kind} {r.number} ({r.what}): {r.why}" for r in failed]
    return "\n".join(lines)


INTRODUCTION = (
    "Made by `python -m tests.faults.campaign`; what each kind must show: docs/faults.md. Every "
    "trial\nis in campaign.jsonl. Seconds are from the fault to the end of the job for kills and "
    "faults, else\nthose of the whole trial.\n\n"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of kinds")
    parser.add_argument("--list", action="store_true", help="the kinds")
    parser.add_argument("--bench", type=Path, help="folder for references and compiled programs")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "campaign.jsonl"
    )
    args = parser.parse_args()
    chosen = [kind for kind in TRIALS if kind.startswith(tuple(args.only))]
    if args.list:
        print("\n".join(chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="spmdrl-campaign-") as folder:
        place = args.bench or Path(folder)
        place.mkdir(exist_ok=True)
        campaign(chosen, args.trials, args.minutes, args.out, Bench(Path(os.path.realpath(place))))
    results = read(args.out)
    args.out.with_suffix(".md").write_text(f"{INTRODUCTION}{table(results)}\n")
    print(table(results))
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

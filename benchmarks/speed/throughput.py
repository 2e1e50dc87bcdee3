"""Steps per second of training beside what envpool and the arithmetic allow on two cores.

    python -m benchmarks.throughput                     # about 45 minutes on two cores
    python -m benchmarks.throughput --cases "CartPole 64" "Pong 8"
    python -m benchmarks.throughput --quick             # one round, writes nothing; 12 minutes

Beside a real training run (one rank or two, the faster counts), in turns and within the same
minutes: envpool alone with random actions, the update alone, and for images the update's matrix
products alone, each with its own best setting. The first round tries every setting; those far
behind are left out of the later rounds. Cases that are not measured again stay in the results.
Writes benchmarks/results/throughput.json, .md and .png.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.lib.common import (
    CLOSE,
    RESULTS,
    Spread,
    about_spread,
    arguments,
    machine,
    made_by,
    near_fastest,
    new_figure,
    percent,
    pretty,
    progress,
    save,
    spread,
    table,
    write_json,
)
from benchmarks.lib.limits import CHUNKS, Crew, harmonic
from benchmarks.lib.trainer import Task, Trainer

SIDES = {
    "spmdrl": "spmdrl",
    "raw": "envpool alone",
    "learn": "update alone",
    "roof": "its matrix products alone",
}
LIMITS = {
    "raw": "envpool",
    "raw+learn": "envpool, then update",
    "raw+roof": "envpool, then products",
}


@dataclass(frozen=True)
class Case:
    """A training run, and the limit that its speed is held against."""

    name: str
    config: str
    envs: int  # of the whole run
    steps: int
    updates: int
    skip: int
    limit: str
    goal: float | None = None  # share of the limit
    most_rounds: int = 99  # of a case so long that it would take half of the whole time

    def rounds(self, repeats: int) -> int:
        return min(repeats, self.most_rounds)

    def task(self, ranks: int) -> Task:
        return Task(self.name, self.config, self.envs // ranks, self.steps, self.updates, self.skip)

    @property
    def sides(self) -> list[str]:
        return ["spmdrl", "raw", "learn", *(["roof"] if "roof" in self.limit else [])]


# MuJoCo with 64 environments makes as many steps in an update as with 8.
CASES = [
    Case("CartPole 8", "cartpole", 8, 128, 200, 3, "raw+learn"),
    Case("CartPole 64", "cartpole", 64, 128, 80, 3, "raw+learn", 0.85),
    Case("CartPole 1024", "cartpole", 1024, 128, 10, 2, "raw+learn", 0.85),
    Case("Pong 8", "pong", 8, 128, 3, 1, "raw+roof", 0.6),
    Case("Pong 64", "pong", 64, 128, 1, 1, "raw+roof", most_rounds=3),
    Case("Breakout 8", "breakout", 8, 128, 3, 1, "raw+roof"),
    Case("Breakout 64", "breakout", 64, 128, 1, 1, "raw+roof", most_rounds=3),
    Case("Ant 8", "ant", 8, 2048, 3, 1, "raw", 0.85),
    Case("Ant 64", "ant", 64, 256, 3, 1, "raw", 0.85),
    Case("HalfCheetah 8", "halfcheetah", 8, 2048, 4, 1, "raw+learn"),
    Case("HalfCheetah 64", "halfcheetah", 64, 256, 4, 1, "raw+learn"),
    Case("Humanoid 8", "humanoid", 8, 2048, 2, 1, "raw", 0.85),
    Case("Humanoid 64", "humanoid", 64, 256, 2, 1, "raw", 0.85),
]


# ---------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Setting:
    """A way to do one side's work: with one process on both cores, or with one on each."""

    side: str
    way: str
    processes: int

    @property
    def what(self) -> str:
        return f"{self.side} {self.way}".strip()

    def __str__(self) -> str:
        how = {"xla": "XLA", "python": "Python", "": ""}.get(self.way, f"{self.way} images")
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{how}, {processes}" if how else processes


def settings(case: Case) -> list[Setting]:
    ways = {"raw": ("xla", "python"), "roof": tuple(map(str, CHUNKS))}
    return [
        Setting(side, way, processes)
        for side in case.sides for way in ways.get(side, ("",)) for processes in (1, 2)
    ]  # fmt: skip


Rates = dict[Setting, list[float]]


def measure_case(
    case: Case, repeats: int, seconds: float, trainer: Trainer, turns: Iterator[Any]
) -> Rates:
    """Steps per second of each setting, one value a round; a setting left out has one value."""

    def rate(setting: Setting) -> float:
        if setting.side == "spmdrl":
            return trainer.freely(case.task(setting.processes), setting.processes).sps
        return crews[setting.processes].measure(setting.what, seconds)

    def crew(workers: int) -> Crew:
        return Crew(case.config, case.envs, case.steps, workers, trainer.cores)

    with crew(1) as one, crew(2) as two:
        crews = {1: one, 2: two}
        for setting in settings(case):
            if setting.side != "spmdrl":
                crews[setting.processes].prepare(setting.what)
        rates: Rates = {setting: [] for setting in settings(case)}
        for _ in range(repeats):
            next(turns)
            for setting in promising(rates):
                rates[setting].append(rate(setting))
    return rates


def promising(rates: Rates) -> list[Setting]:
    """All before the first round, then those that came close to the fastest of their side."""
    sides: dict[str, dict[Setting, float]] = {}
    for setting, found in rates.items():
        sides.setdefault(setting.side, {})[setting] = found[0] if found else 0.0
    return [setting for side in sides.values() for setting in near_fastest(side)]


# ---------------------------------------------------------------------------------------------
# What came out


def summarize(case: Case, rates: Rates) -> dict[str, Any]:
    """Each side with its best setting; shares are taken in each round: neighbours in time."""
    rounds = max(len(found) for found in rates.values())
    best: dict[str, Setting] = {}
    for side in case.sides:
        whole = [s for s, found in rates.items() if s.side == side and len(found) == rounds]
        best[side] = max(whole, key=lambda s: spread(rates[s]).median)
    of_round = [
        harmonic(*(rates[best[side]][i] for side in case.limit.split("+"))) for i in range(rounds)
    ]
    ours = rates[best["spmdrl"]]
    return {
        "sps": {side: spread(rates[setting]) for side, setting in best.items()},
        "setting": {side: str(setting) for side, setting in best.items()},
        "limit": spread(of_round),
        "share": spread([mine / most for mine, most in zip(ours, of_round, strict=True)]),
        "repeats": rounds,
        "all": {f"{s.side}: {s}": found for s, found in rates.items()},
    }


def kept() -> dict[str, Any]:
    """What earlier calls have measured."""
    file = RESULTS / "throughput.json"
    return json.loads(file.read_text())["cases"] if file.exists() else {}


def keep(cases: dict[str, Any]) -> None:
    """After each case: an interrupted call has not measured for nothing."""
    write_json("throughput", {"cases": cases})


def joined(known: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """With one more case, in the order of CASES and as plain numbers."""
    known = known | {name: json.loads(json.dumps(found, default=vars))}
    return {case.name: known[case.name] for case in CASES if case.name in known}


def report(cases: dict[str, Any], head: str) -> str:
    rates, ways = [], []
    repeats = max(found["repeats"] for found in cases.values())
    for case in CASES:
        if not (found := cases.get(case.name)):
            continue
        goal = f"{case.goal:.0%}" if case.goal else "–"
        side = [pretty(Spread(**found["sps"][s])) if s in found["sps"] else "–" for s in SIDES]
        share = percent(Spread(**found["share"]))
        rates.append([case.name, *side, LIMITS[case.limit], share, goal])
        about = found["machine"]
        ways.append(
            [case.name, f"{case.steps}", *(found["setting"].get(s, "–") for s in SIDES),
             str(found["repeats"]), about["when"], f"{about['load_average']:.1f}"]
        )  # fmt: skip
    return "\n\n".join(
        [
            head,
            table(["case", *SIDES.values(), "limit", "of the limit", "goal"], rates),
            f"Environment steps per second on two cores. {about_spread(repeats)} Cases with fewer "
            "rounds, see below, have the lowest and the highest in brackets. The number in a "
            "case's name is that of the environments of the whole run. A limit of two parts is the "
            "rate of doing one after the other: 1 / (1/a + 1/b). The share is taken in each round "
            "and then its median. *Update alone* is the trainer's own update on one rollout; on "
            "two processes, each learns from half of the environments and they do not "
            "communicate. *Matrix products* are those of the update's forward and backward passes "
            "through the Nature CNN and nothing else: no gathering of images, no activations, and "
            "no inference for the rollout.",
            "The best setting of each side, with which the table above was made:",
            table(["case", "rollout", *SIDES.values(), "rounds", "measured", "load"], ways),
            f"Each side was tried with one process on both cores and with one process on each "
            f"core; envpool from a compiled loop (XLA) and from Python; matrix products in chunks "
            f"of {' and '.join(map(str, CHUNKS))} images. Settings below {CLOSE:.0%} of the "
            "fastest in the first round were not repeated. `load` is the load average just before "
            "the case.",
        ]
    )


def draw(cases: dict[str, Any]) -> Any:
    names = list(cases)[::-1]
    fig, axes = new_figure(2, 12, 1.6 + 0.36 * len(names), sharey=True)
    marks = {"spmdrl": ("o", "C0"), "raw": ("|", "C2"), "learn": ("x", "C1"), "roof": ("^", "C3")}
    for side, (mark, colour) in marks.items():
        points = [(cases[n]["sps"][side]["median"], y) for y, n in enumerate(names)
                  if side in cases[n]["sps"]]  # fmt: skip
        if points:
            axes[0].scatter(*zip(*points, strict=True), marker=mark, s=70, color=colour,
                            label=SIDES[side])  # fmt: skip
    axes[0].set(xscale="log", xlabel="steps/s", title="speed")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].grid(axis="x", alpha=0.3)
    _draw_shares(axes[1], [cases[name]["share"] for name in names])
    goals = {case.name: case.goal for case in CASES if case.goal}
    at = [(goals[name], y) for y, name in enumerate(names) if name in goals]
    if at:
        axes[1].scatter(*zip(*at, strict=True), marker="|", s=250, color="k", label="goal")
    fig.legend(loc="outside lower center", ncols=5, frameon=False)
    return fig


def _draw_shares(axis: Any, shares: Sequence[dict[str, float]]) -> None:
    medians = [s["median"] for s in shares]
    errors = [[s["median"] - s["low"] for s in shares], [s["high"] - s["median"] for s in shares]]
    axis.barh(range(len(shares)), medians, 0.6, color="C0", xerr=errors, capsize=3)
    for y, median in enumerate(medians):
        axis.text(0.02, y, f"{median:.0%}", va="center", color="white", fontweight="bold")
    axis.axvline(1, color="k", lw=0.8)
    axis.set(xlabel="of the limit", title="share of the limit", xlim=(0, max(1.1, *medians) * 1.05))


def shortened(case: Case) -> Case:
    return replace(case, updates=20 if case.updates >= 50 else 1)


def main() -> None:
    parser = arguments(__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="*", default=names, choices=names, metavar="CASE",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the longest cases have 3")
    parser.add_argument(
        "--quick", action="store_true", help="one round, fewer updates, nothing written"
    )
    args = parser.parse_args()
    repeats, seconds = (1, 0.3) if args.quick else (args.repeats, 1.0)
    cases = [c for c in CASES if c.name in args.cases]
    cases = [shortened(c) for c in cases] if args.quick else cases
    about, trainer = machine(), Trainer()
    known = {} if args.quick else kept()
    turns = progress([c.name for c in cases for _ in range(c.rounds(repeats))], "throughput")
    for case in cases:
        before = machine()
        rates = measure_case(case, case.rounds(repeats), seconds, trainer, turns)
        known = joined(known, case.name, summarize(case, rates) | {"machine": before})
        if not args.quick:
            keep(known)
    next(turns, None)  # the bar's last step
    text = report(known, made_by(about))
    if args.quick:
        return print(text)
    return save("throughput", {"machine": about, "cases": known}, text, draw(known))


if __name__ == "__main__":
    main()

"""Steps per second of one rank on one core against two ranks on two cores.

    python -m benchmarks.scaling                          # about 25 minutes on two cores
    python -m benchmarks.scaling --tasks CartPole --repeats 3
    sudo python -m benchmarks.scaling --namespaces        # over networks; about 40 minutes

Every rank has the same number of environments however many there are, so twice the ranks should do
twice the steps. The control shows what the machine itself allows: as many runs of one rank at the
same time, which know nothing of each other. Writes benchmarks/results/scaling.json, .md and .png,
or scaling_namespaces.*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lib.common import (
    Spread,
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    new_figure,
    number,
    percent,
    pretty,
    progress,
    save,
    spread,
    table,
)
from benchmarks.lib.trainer import PHASES, Task, Timing, Trainer, shortened

TASKS = [
    Task("CartPole", "cartpole", envs=64, steps=128, updates=60, skip=3),
    Task("Ant", "ant", envs=8, steps=256, updates=12, skip=2),
    Task("Pong", "pong", envs=8, steps=128, updates=4, skip=1),
]
WIDE = ("--net.hidden", "2231", "2231")
POLICIES = [
    Task("9k parameters", "cartpole", envs=64, steps=128, updates=60, skip=3),
    Task("10M parameters", "cartpole", envs=4, steps=32, updates=4, skip=1, flags=WIDE),
]
WAYS = ("1 rank", "2 ranks", "control")


def efficiency(together: float, alone: float, ranks: int) -> float:
    """Steps per second of all ranks, as a part of that many times one rank's."""
    return together / (ranks * alone)


# ---------------------------------------------------------------------------------------------
# Cores


def run(trainer: Trainer, task: Task, way: str) -> list[Timing]:
    if way == "2 ranks":
        return [trainer.together(task)]
    return trainer.alone(task, copies=2 if way == "control" else 1)


def measure(tasks: Sequence[Task], repeats: int) -> dict[str, dict[str, list[list[Timing]]]]:
    trainer = Trainer()
    found: dict[str, dict[str, list[list[Timing]]]] = {t.name: {w: [] for w in WAYS} for t in tasks}
    cases = [(task, way) for task in tasks for way in WAYS]
    for task, way in progress(in_turns(cases, repeats), "scaling"):
        found[task.name][way].append(run(trainer, task, way))
    return found


def sps(runs: Sequence[Timing]) -> float:
    """Steps per second of all runs that ran at the same time."""
    return sum(timing.sps for timing in runs)


def phase_ms(repeats: Sequence[Sequence[Timing]], phase: str) -> float:
    def of(timing: Timing) -> float:
        return timing.comm if phase == "comm" else timing.phases[phase]

    return 1e3 * spread([of(timing) for runs in repeats for timing in runs]).median


def summarize(ways: dict[str, list[list[Timing]]]) -> dict[str, Any]:
    """Efficiencies are taken in each round and then their median: neighbours in time."""
    rates = {way: [sps(runs) for runs in repeats] for way, repeats in ways.items()}
    one = rates["1 rank"]

    def of(way: str) -> Spread:
        return spread([efficiency(r, a, 2) for r, a in zip(rates[way], one, strict=True)])

    against = [t / c for t, c in zip(rates["2 ranks"], rates["control"], strict=True)]
    return {
        "sps": {way: spread(values) for way, values in rates.items()},
        "efficiency": of("2 ranks"),
        "control_efficiency": of("control"),
        "of_control": spread(against),
        "ms": {
            way: {phase: phase_ms(repeats, phase) for phase in (*PHASES, "comm")}
            for way, repeats in ways.items()
        },
    }


def report(summaries: dict[str, Any], tasks: Sequence[Task], repeats: int, head: str) -> str:
    rates = [
        [f"{t.name}, {t.envs} x {t.steps} a rank", *(pretty(s["sps"][way]) for way in WAYS),
         *(percent(s[k]) for k in ("efficiency", "control_efficiency", "of_control"))]
        for t in tasks for s in [summaries[t.name]]
    ]  # fmt: skip
    header = ["task", "1 rank, steps/s", "2 ranks", "control: 2 runs of 1 rank", "efficiency",
              "the control's", "2 ranks / control"]  # fmt: skip
    splits = [
        [task.name, way, *(number(summaries[task.name]["ms"][way][p]) for p in (*PHASES, "comm"))]
        for task in tasks for way in WAYS
    ]  # fmt: skip
    return "\n\n".join(
        [
            head,
            table(header, rates),
            f"{about_spread(repeats)} "
            "Efficiency is steps/s over twice those of 1 rank. The control is two runs on the two "
            "cores that do not communicate: what it loses, the machine loses.",
            "Milliseconds of one update by phase, rank 0. `comm` is part of `update`: the time of "
            "one allreduce, measured by itself, times the minibatches. `wait` is for the slower "
            "rank after its rollout.",
            table(["task", "", *PHASES, "comm"], splits),
            *(limit(name, summary["ms"]) for name, summary in summaries.items()),
        ]
    )


def limit(name: str, ms: dict[str, dict[str, float]]) -> str:
    """Which phases the second rank makes longer, and how much of it the control has as well."""
    parts = []
    for phase in PHASES:
        more, in_control = (ms[way][phase] - ms["1 rank"][phase] for way in ("2 ranks", "control"))
        parts.append(f"{phase} {more:+.1f} ({in_control:+.1f})")
    comm = ms["2 ranks"]["comm"]
    return (
        f"{name}: an update on two ranks against one, in ms, and the control's in brackets: "
        f"{', '.join(parts)}; the allreduces are {comm:.1f} of the update."
    )


def draw(summaries: dict[str, Any]) -> Any:
    fig, axes = new_figure(2, 12, 4.4)
    colours = {"efficiency": "C0", "control_efficiency": "0.6"}
    labels = {"efficiency": "2 ranks", "control_efficiency": "control: 2 runs that never talk"}
    for shift, key in enumerate(colours):
        _bars(axes[0], [s[key] for s in summaries.values()], shift, colours[key], labels[key])
    axes[0].set_xticks([i + 0.2 for i in range(len(summaries))], list(summaries))
    axes[0].axhline(1, color="k", lw=0.8)
    axes[0].set(ylabel="steps/s over twice those of 1 rank", title="efficiency")
    axes[0].set_ylim(0, 1.25)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    _draw_phases(axes[1], summaries)
    return fig


def _bars(axis: Any, found: Sequence[Spread], shift: int, colour: str, label: str) -> None:
    heights = [s.median for s in found]
    errors = [[s.median - s.low for s in found], [s.high - s.median for s in found]]
    places = [i + 0.4 * shift for i in range(len(found))]
    axis.bar(places, heights, 0.38, color=colour, label=label, yerr=errors, capsize=4)
    for x, height in zip(places, heights, strict=True):
        axis.text(x, 0.04, f"{height:.0%}", ha="center", color="white", fontweight="bold")


def _draw_phases(axis: Any, summaries: dict[str, Any]) -> None:
    """One bar for each way; the whole of one rank's update is 1."""
    rows = [(task, way) for task in summaries for way in WAYS][::-1]
    colours = dict(zip(PHASES, ("C2", "C3", "C0", "0.6"), strict=True))
    for y, (task, way) in enumerate(rows):
        ms, left = summaries[task]["ms"], 0.0
        whole = sum(ms["1 rank"][phase] for phase in PHASES)
        for phase, colour in colours.items():
            width = ms[way][phase] / whole
            axis.barh(y, width, left=left, color=colour, label=phase if y == 0 else None)
            left += width
    axis.set_yticks(range(len(rows)), [f"{task}, {way}" for task, way in rows])
    axis.set(xlabel="time of one update; 1 rank = 1", title="where it goes")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)


# ---------------------------------------------------------------------------------------------
# Networks


def measure_namespaces(
    tasks: Sequence[Task], repeats: int, counts: Sequence[int]
) -> tuple[dict[str, Any], str]:
    from benchmarks.scale.namespaces import NETWORKS, Hosts

    trainer = Trainer()
    cases = [
        (task, count, network)
        for task in tasks for count in counts for network in ["control", *NETWORKS]
    ]  # fmt: skip
    found: dict[str, Any] = {}
    with Hosts(max(counts), trainer) as hosts:
        for task, count, network in progress(in_turns(cases, repeats), "networks"):
            if network == "control":
                runs = trainer.alone(task, copies=count)
            else:
                hosts.set_network(network)
                runs = [hosts.train(task, count)]
            of_task = found.setdefault(task.name, {}).setdefault(str(count), {})
            of_task.setdefault(network, []).append(runs)
        return found, hosts.delay_by


def summarize_namespaces(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, counts in found.items():
        for count, networks in counts.items():
            control = [sps(runs) for runs in networks["control"]]
            for network, repeats in networks.items():
                rates = [sps(runs) for runs in repeats]
                share = spread([r / c for r, c in zip(rates, control, strict=True)])
                ms = {phase: phase_ms(repeats, phase) for phase in (*PHASES, "comm")}
                row = {"task": task, "hosts": int(count), "network": network, "ms": ms}
                rows.append(row | {"sps": spread(rates), "efficiency": share})
    return rows


def report_namespaces(
    rows: Sequence[dict[str, Any]], repeats: int, delay_by: str, head: str
) -> str:
    cells = [
        [r["task"], str(r["hosts"]), r["network"], pretty(r["sps"]), percent(r["efficiency"]),
         *(number(r["ms"][phase]) for phase in (*PHASES, "comm"))]
        for r in rows
    ]  # fmt: skip
    header = ["policy", "hosts", "network", "steps/s", "of the control", *PHASES, "comm"]
    sizes = "; ".join(f"{t.name}: {t.envs} x {t.steps} steps" for t in POLICIES)
    return "\n\n".join(
        [
            head,
            f"Hosts are network namespaces of one machine; the delay comes from {delay_by}. "
            f"CartPole; work of one host in an update: {sizes}. The control is as many runs of one "
            "rank at the same time without any communication, so that hosts which share a core are "
            "compared with hosts which share a core. Phases in ms of one update, rank 0; `comm`, a "
            f"part of `update`, is the trainer's own estimate. {about_spread(repeats)}",
            table(header, cells),
        ]
    )


def draw_namespaces(rows: Sequence[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(r["task"] for r in rows))
    networks = [n for n in dict.fromkeys(r["network"] for r in rows) if n != "control"]
    fig, axes = new_figure(len(names), 10, 4.2, sharey=True)
    for axis, name in zip(axes, names, strict=True):
        counts = list(dict.fromkeys(r["hosts"] for r in rows if r["task"] == name))
        for shift, network in enumerate(networks):
            chosen = [r["efficiency"] for r in rows if (r["task"], r["network"]) == (name, network)]
            _bars(axis, chosen, shift, f"C{shift}", network)
        axis.set_xticks([i + 0.2 for i in range(len(counts))], [f"{c} hosts" for c in counts])
        axis.axhline(1, color="k", lw=0.8)
        axis.set_title(name)
    axes[0].set_ylabel("steps/s over those without communication")
    axes[0].set_ylim(0, 1.25)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return fig


def plain(found: Any) -> Any:
    """Timings as numbers, for the JSON file."""
    if isinstance(found, Timing):
        return vars(found)
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return [plain(value) for value in found]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="*", default=[t.name for t in TASKS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=0, help="at most, for a quick look")
    parser.add_argument("--namespaces", action="store_true", help="hosts with a network between")
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 4], help="with --namespaces")
    args = parser.parse_args()
    host = machine()
    if args.namespaces:
        found, delay_by = measure_namespaces(
            shortened(POLICIES, args.updates), args.repeats, args.hosts
        )
        rows = summarize_namespaces(found)
        text = report_namespaces(rows, args.repeats, delay_by, made_by(host))
        data = {"machine": host, "delay_by": delay_by, "runs": plain(found), "summary": rows}
        return save("scaling_namespaces", data, text, draw_namespaces(rows))
    tasks = shortened([t for t in TASKS if t.name in args.tasks], args.updates)
    found = measure(tasks, args.repeats)
    summaries = {name: summarize(ways) for name, ways in found.items()}
    data = {"machine": host, "runs": plain(found), "summary": summaries}
    text = report(summaries, tasks, args.repeats, made_by(host))
    return save("scaling", data, text, draw(summaries))


if __name__ == "__main__":
    main()

"""Peak memory of each rank against the number of environments and the length of the rollout.

    python -m benchmarks.memory                         # about 25 minutes on two cores
    python -m benchmarks.memory --networks MLP --repeats 1

Every case is a training run of three updates: the second already holds all there ever is at one
time, an old rollout and a new one. Each run compiles its programs, which takes memory too. The
peak is what Linux keeps for each process as VmHWM, the most physical memory that it had at any
moment, libraries included. Writes benchmarks/results/memory.json, .md and .png.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.common import (
    ROOT,
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    new_figure,
    number,
    pretty,
    progress,
    save,
    spread,
    table,
)
from benchmarks.lib.trainer import Task

# One pass over the rollout is enough: further ones need no more memory.
ONE_PASS = ("--algo.epochs", "1")
CONFIGS = {"MLP": "cartpole", "CNN": "pong"}
# Environments of one rank and steps of a rollout; all have the first case in common.
SIZES = {
    "MLP": [(64, 128), (8, 128), (512, 128), (4096, 128), (64, 32), (64, 512), (64, 2048)],
    "CNN": [(8, 128), (16, 128), (32, 128), (64, 128), (8, 32), (8, 512)],
}
LOOK_EVERY_S = 0.05  # a peak stays in VmHWM until the process ends
TIMEOUT_S = 600


def task(network: str, envs: int, steps: int) -> Task:
    return Task(network, CONFIGS[network], envs, steps, updates=3, skip=0, flags=ONE_PASS)


# ---------------------------------------------------------------------------------------------
# Looking at processes


def field(text: str, name: str) -> int | None:
    """A number of /proc/PID/status."""
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return None


def parents() -> dict[int, int]:
    """The parent of every process that there is now."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (text := _read(folder / "status")):
            found[int(folder.name)] = field(text, "PPid") or 0
    return found


def family(root: int, parents: dict[int, int]) -> set[int]:
    """A process and all that descend from it."""
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def rank_of(environ: str, ranks: int) -> int | None:
    """None for the launcher of several ranks, which is none of them."""
    for entry in environ.split("\0"):
        if entry.startswith("OMPI_COMM_WORLD_RANK="):
            return int(entry.partition("=")[2])
    return 0 if ranks == 1 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""  # it has just ended


class Peaks:
    """The highest VmHWM seen of each rank, in MB."""

    def __init__(self, root: int, ranks: int):
        self._root, self._ranks = root, ranks
        self.of_rank: dict[int, float] = {}

    def look(self) -> None:
        for pid in family(self._root, parents()):
            rank = rank_of(_read(Path(f"/proc/{pid}/environ")), self._ranks)
            peak = field(_read(Path(f"/proc/{pid}/status")), "VmHWM")
            if rank is not None and peak is not None:  # a process that has ended has no memory
                self.of_rank[rank] = max(self.of_rank.get(rank, 0.0), peak / 1024)


def measure(of: Task, ranks: int, folder: Path) -> list[float]:
    """MB of each rank."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    log = run.with_suffix(".log")
    # An empty cache for each, or the first run of a program would compile and the others read it.
    env = os.environ | {"XDG_CACHE_HOME": str(run.parent)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [*of.arguments(ranks, run), "--nprocs", str(ranks)]
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    peaks, end = Peaks(child.pid, ranks), time.monotonic() + TIMEOUT_S
    try:
        while child.poll() is None and time.monotonic() < end:
            peaks.look()
            time.sleep(LOOK_EVERY_S)
    finally:
        child.kill()  # does nothing if it has ended
    if child.wait() != 0:
        raise RuntimeError(f"{of.name} failed:\n{log.read_text()[-3000:]}")
    return [peaks.of_rank[rank] for rank in range(ranks)]


# ---------------------------------------------------------------------------------------------
# What came out


def line(steps: Sequence[float], mb: Sequence[float]) -> tuple[float, float]:
    """MB without a rollout, and KB more for each of its steps: the straight line through all."""
    slope, base = np.polyfit(steps, mb, 1)
    return float(base), 1024 * float(slope)


def summarize(peaks: dict[tuple[int, int, int], list[list[float]]]) -> list[dict[str, Any]]:
    """A row for each size and number of ranks; of several ranks the one with the most counts."""
    return [
        {"envs": envs, "steps": steps, "ranks": ranks, "mb": spread([max(p) for p in repeats])}
        for (envs, steps, ranks), repeats in sorted(peaks.items())
    ]


def lines(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for ranks in sorted({row["ranks"] for row in rows}):
        mine = [row for row in rows if row["ranks"] == ranks]
        if len({row["envs"] * row["steps"] for row in mine}) > 2:
            base, each = line(
                [r["envs"] * r["steps"] for r in mine], [r["mb"].median for r in mine]
            )
            found[str(ranks)] = {"base_mb": base, "kb_per_step": each}
    return found


def report(found: dict[str, Any], repeats: int, head: str) -> str:
    parts = [head]
    for network, of_network in found.items():
        rows = of_network["rows"]
        counts = sorted({row["ranks"] for row in rows})
        sizes = sorted({(row["envs"], row["steps"]) for row in rows})
        mb = {(r["envs"], r["steps"], r["ranks"]): r["mb"] for r in rows}
        cells = [
            [f"{envs:,}", f"{steps:,}", f"{envs * steps:,}",
             *(pretty(mb[envs, steps, ranks]) for ranks in counts)]
            for envs, steps in sizes
        ]  # fmt: skip
        header = ["environments of a rank", "rollout", "steps in it", *map(heading, counts)]
        parts += [f"### {network}", table(header, cells)]
        parts += [about_line(int(ranks), fit) for ranks, fit in of_network["lines"].items()]
    parts.append(
        f"{about_spread(repeats)} MB of 1024 x 1024 bytes; with several ranks, that of the one "
        "with the most. MLP: CartPole, 64 x 64; CNN: Pong, the Nature CNN."
    )
    return "\n\n".join(parts)


def heading(ranks: int) -> str:
    return "1 rank, MB" if ranks == 1 else f"{ranks} ranks, MB of each"


def about_line(ranks: int, fit: dict[str, float]) -> str:
    who = "One rank alone" if ranks == 1 else f"Each of {ranks} ranks"
    return (
        f"{who}: {number(fit['base_mb'])} MB and {number(fit['kb_per_step'])} KB for each step of "
        "its rollout (straight line through the medians)."
    )


def draw(found: dict[str, Any]) -> Any:
    """Two lines for each number of ranks, from the first size on: one for either way to grow."""
    fig, axes = new_figure(len(found), 5.5 * len(found), 4.6)
    for axis, (network, of_network) in zip(axes, found.items(), strict=True):
        rows, (envs, steps) = of_network["rows"], SIZES[network][0]
        ways = {f"more environments x {steps} steps": ("steps", steps, "o-"),
                f"{envs} environments x more steps": ("envs", envs, "s--")}  # fmt: skip
        for colour, ranks in enumerate(sorted({row["ranks"] for row in rows})):
            for way, (fixed, value, style) in ways.items():
                mine = [r for r in rows if r["ranks"] == ranks and r[fixed] == value]
                mine.sort(key=lambda row: row["envs"] * row["steps"])
                axis.plot([r["envs"] * r["steps"] for r in mine], [r["mb"].median for r in mine],
                          style, color=f"C{colour}", label=f"{heading(ranks)}: {way}")  # fmt: skip
        axis.set(xscale="log", xlabel="steps of a rank's rollout", ylabel="peak MB", title=network)
        axis.set_ylim(0, 1.1 * max(row["mb"].median for row in rows))
        counts = sorted({row["envs"] * row["steps"] for row in rows})
        axis.set_xticks(counts, [f"{n:,}" for n in counts], fontsize=8, rotation=30)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return fig


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--networks", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--sizes", type=int, default=0, help="only the first so many of each")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    about = machine()
    cases = [
        (network, envs, steps, ranks)
        for network in args.networks
        for envs, steps in SIZES[network][: args.sizes or None]
        for ranks in args.ranks
    ]
    peaks: dict[str, dict[tuple[int, int, int], list[list[float]]]] = {n: {} for n in args.networks}
    with tempfile.TemporaryDirectory(prefix="spmdrl-benchmark-") as folder:
        for network, envs, steps, ranks in progress(in_turns(cases, args.repeats), "memory"):
            mb = measure(task(network, envs, steps), ranks, Path(folder))
            peaks[network].setdefault((envs, steps, ranks), []).append(mb)
    found: dict[str, Any] = {}
    for network, of_network in peaks.items():
        rows = summarize(of_network)
        found[network] = {"rows": rows, "lines": lines(rows)}
    text = report(found, args.repeats, made_by(about))
    save("memory", {"machine": about, "networks": found}, text, draw(found))


if __name__ == "__main__":
    main()

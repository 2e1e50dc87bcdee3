"""Seconds until the first update is done, with an empty cache of programs and with a full one.

    python -m benchmarks.compile                        # about 10 minutes on two cores
    python -m benchmarks.compile --tasks MLP --ranks 1 --repeats 3

A cold start has a cache folder that is new and empty; the warm start after it has the same one. The
first update is done when the run writes its first row of metrics. `after imports` leaves out the
time in import statements: rank 0's, and its launcher's where there are several ranks. Python's own
cache of byte code and the system's of files are warm every time. Writes
benchmarks/results/compile.json, .md and .png.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import import_clock
from benchmarks.lib.common import (
    ROOT,
    about_spread,
    arguments,
    in_turns,
    machine,
    made_by,
    new_figure,
    pretty,
    progress,
    save,
    spread,
    table,
)
from benchmarks.lib.trainer import TIMEOUT_S, Task, read_metrics

# One update and nothing to skip; the environments are shared out over the ranks.
TASKS = {
    "MLP": Task("MLP", "cartpole", envs=64, steps=128, updates=1, skip=0),
    "CNN": Task("CNN", "pong", envs=8, steps=128, updates=1, skip=0),
}
GOALS = {"MLP": 3.0, "CNN": 6.0}  # seconds of a warm start after imports
STARTS = ("cold", "warm")
PARTS = ("total", "after_imports", "collect", "update")


@dataclass(frozen=True)
class Start:
    """Seconds until the end of the first update; collect and update are its two phases."""

    total: float
    imports: float
    collect: float
    update: float

    @property
    def after_imports(self) -> float:
        return self.total - self.imports


class Starter:
    """Starts runs in a temporary folder, with a cache of programs of its own."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        hook = folder / "hook"
        hook.mkdir()
        shutil.copy(import_clock.__file__, hook / "sitecustomize.py")
        paths = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A cache that the user has chosen would be neither empty nor ours.
        self._env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self._env |= {"PYTHONPATH": os.pathsep.join(paths)}

    def pair(self, task: Task, ranks: int) -> dict[str, Start]:
        """A cold start and the warm one after it."""
        self._count += 1
        cache = self._folder / f"cache-{self._count}"
        found = {start: self._start(task, ranks, cache, start) for start in STARTS}
        shutil.rmtree(cache)
        return found

    def _start(self, task: Task, ranks: int, cache: Path, start: str) -> Start:
        run, clock = (self._folder / f"{self._count}-{start}{end}" for end in ("", "-clock"))
        clock.mkdir()
        env = self._env | {"XDG_CACHE_HOME": str(cache), "SPMDRL_IMPORT_CLOCK": str(clock)}
        log = run.with_suffix(".log")
        share = Task(**asdict(task) | {"envs": task.envs // ranks})
        command = [*share.arguments(ranks, run), "--nprocs", str(ranks)]
        began = time.time()
        with log.open("wb") as out:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=out, stderr=out, timeout=TIMEOUT_S
            )
        if done.returncode != 0:
            raise RuntimeError(f"{task.name} failed:\n{log.read_text()[-3000:]}")
        # The launcher, which mpirun did not start, comes before rank 0; one rank is its own.
        clocks = [clock / name for name in ("alone.json", "0.json")[:ranks]]
        return read_start(run, clocks, began)


def read_start(run: Path, clocks: Sequence[Path], began: float) -> Start:
    """From a run of one update: its only row of metrics was written when that was done."""
    written = (run / "metrics.jsonl").stat().st_mtime
    imports = sum(import_clock.seconds_before(json.loads(c.read_text()), written) for c in clocks)
    (row,) = read_metrics(run)
    return Start(written - began, imports, row["time/collect"], row["time/update"])


def summarize(starts: Sequence[Start]) -> dict[str, Any]:
    return {part: spread([getattr(s, part) for s in starts]) for part in PARTS}


def report(found: dict[str, Any], repeats: int, head: str) -> str:
    rows = []
    for name, of_task in found.items():
        for ranks, starts in of_task.items():
            for start, s in starts.items():
                after = s["after_imports"]
                goal = f"{GOALS[name]:.0f}" if start == "warm" else "–"
                met = ("yes" if after.median <= GOALS[name] else "no") if start == "warm" else "–"
                seconds = [pretty(s[part]) for part in PARTS]
                rows.append([name, ranks, start, *seconds, goal, met])
    header = ["network", "ranks", "start", "to the first update, s", "after imports, s",
              "first collect, s", "first update, s", "goal, s", "met"]  # fmt: skip
    text = (
        f"{about_spread(repeats)} Seconds from the start of the command to the end of the first "
        "update, in all and without import statements; the goal is for the latter. "
        "*First collect* and *first update* are the two phases within it that compile. MLP: "
        "CartPole, 64 environments; CNN: Pong, 8 environments; 128 steps each. Programs that "
        "contain an address of their process (the simulator's, or MPI's) can not be kept, so they "
        "are compiled at every start."
    )
    return "\n\n".join([head, table(header, rows), text])


def draw(found: dict[str, Any]) -> Any:
    fig, axes = new_figure(1, 8, 4.2)
    bars = [(f"{name}, {ranks} rank{'s' if ranks != '1' else ''}\n{start}", starts[start])
            for name, of_task in found.items() for ranks, starts in of_task.items()
            for start in STARTS]  # fmt: skip
    places = range(len(bars))
    after = [s["after_imports"].median for _, s in bars]
    imports = [s["total"].median - a for (_, s), a in zip(bars, after, strict=True)]
    axes[0].bar(places, imports, color="0.7", label="imports")
    axes[0].bar(places, after, bottom=imports, color="C0", label="after imports")
    for x, (low, high) in enumerate(zip(imports, after, strict=True)):
        axes[0].text(x, low + high / 2, f"{high:.1f}", ha="center", va="center", color="white")
    axes[0].set_xticks(places, [name for name, _ in bars], fontsize=8)
    axes[0].set(ylabel="seconds", title="until the first update is done")
    axes[0].legend(frameon=False)
    return fig


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    about = machine()
    cases = [(name, ranks) for name in args.tasks for ranks in args.ranks]
    starts: dict[tuple[str, int], list[dict[str, Start]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="spmdrl-benchmark-") as folder:
        starter = Starter(Path(folder))
        for name, ranks in progress(in_turns(cases, args.repeats), "compile"):
            starts[name, ranks].append(starter.pair(TASKS[name], ranks))
    found: dict[str, Any] = {name: {} for name in args.tasks}
    for (name, ranks), pairs in starts.items():
        found[name][str(ranks)] = {s: summarize([pair[s] for pair in pairs]) for s in STARTS}
    text = report(found, args.repeats, made_by(about))
    save("compile", {"machine": about, "goals_s": GOALS, "tasks": found}, text, draw(found))


if __name__ == "__main__":
    main()

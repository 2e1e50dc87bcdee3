"""Train the published tasks and put our returns beside the published ones, as docs/results.md.

    python -m benchmarks.learning                      # three seeds each; about an hour, two cores
    python -m benchmarks.learning --tasks cartpole hopper --seeds 1 2

Finished runs are kept and not repeated, so an interrupted sweep resumes where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.common import ROOT, arguments, table


@dataclass(frozen=True)
class Task:
    config: str
    env: str
    goal: float | None
    published: str
    steps: int | None = None  # where less than the config's


TASKS = [
    Task("cartpole", "CartPole-v1", 490, "490.0 ± 6.1 (CleanRL)"),
    Task("acrobot", "Acrobot-v1", -90, "-86.4 ± 1.3 (CleanRL)"),
    Task("hopper", "Hopper-v4", 2000, "2382.9 ± 272 (CleanRL)"),
    Task("halfcheetah", "HalfCheetah-v4", 1300, "1442.6 ± 46 (CleanRL)"),
    Task("inverted_pendulum", "InvertedPendulum-v4", 900, "963 ± 22 (CleanRL)"),
    Task("walker2d", "Walker2d-v4", 1700, "2288 ± 572 (CleanRL)"),
    Task("humanoid", "Humanoid-v4", None, "716 ± 49 (CleanRL)"),
    Task("ant", "Ant-v4", None, "–"),
    Task("lunarlander", "LunarLander-v3", None, "242 at v2, one run (SB3 zoo)"),
]


INTRODUCTION = """# Results beside the published ones

Made by `python -m benchmarks.learning`, one core for each run. The return is the mean of the last
100 training episodes, as in the published tables; the hyper-parameters are the published ones, in
`configs/`. The published numbers are those of CleanRL's `ppo` (500k steps) and
`ppo_continuous_action` (1M steps), three seeds each, unless it says otherwise.

"""


def train(task: Task, seed: int, folder: Path, core: int) -> dict[str, float]:
    """One finished run's summary; trains it on one core unless it is there already."""
    run_dir = folder / f"{task.config}-s{seed}"
    summary = run_dir / "summary.json"
    if not summary.exists():
        command = [
            "taskset", "-c", str(core), sys.executable, "-m", "spmdrl.train",
            str(ROOT / "configs" / f"{task.config}.py"),
            "--seed", str(seed), "--run-dir", str(run_dir),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{task.config} seed {seed} failed:\n{done.stdout}\n{done.stderr}")
    result = json.loads(summary.read_text())
    print(
        f"{task.env} seed {seed}: {result['episode_return_mean']:.1f} "
        f"in {result['wall_s'] / 60:.1f} min",
        flush=True,
    )
    return result


def report(rows: list[tuple[Task, list[dict[str, float]]]]) -> str:
    header = [
        "task",
        "steps",
        "ours, mean ± std",
        "each seed",
        "published",
        "goal",
        "minutes per run",
    ]
    cells = []
    for task, results in rows:
        returns = [r["episode_return_mean"] for r in results]
        cells.append([
            task.env,
            f"{results[0]['env_steps']:,}",
            f"{np.mean(returns):.1f} ± {np.std(returns):.1f}",
            ", ".join(f"{r:.1f}" for r in returns),
            task.published,
            "–" if task.goal is None else f"≥ {task.goal:g} {_verdict(returns, task.goal)}",
            f"{np.mean([r['wall_s'] for r in results]) / 60:.1f}",
        ])  # fmt: skip
    return table(header, cells)


def _verdict(returns: list[float], goal: float) -> str:
    return "✓" if np.mean(returns) >= goal else "missed"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="*", default=[t.config for t in TASKS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--cores", nargs="*", type=int, default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    args = parser.parse_args()
    tasks = [t for t in TASKS if t.config in args.tasks]
    free = list(args.cores)

    def job(item: tuple[Task, int]) -> dict[str, float]:
        core = free.pop()
        try:
            return train(*item, args.folder, core)
        finally:
            free.append(core)

    items = [(task, seed) for task in tasks for seed in args.seeds]
    with ThreadPoolExecutor(len(args.cores)) as pool:
        results = list(pool.map(job, items))
    rows = []
    for i, task in enumerate(tasks):
        rows.append((task, results[i * len(args.seeds) : (i + 1) * len(args.seeds)]))
    text = INTRODUCTION + report(rows) + "\n"
    args.out.write_text(text)
    print(f"\n{text}\nwritten to {args.out}")


if __name__ == "__main__":
    main()

"""What would a GPU do in one update? Compiles for A100s and H100s, on a machine that has none.

    python -m benchmarks.gpu_programs                      # all cases, about 15 minutes
    python -m benchmarks.gpu_programs --cases "Pong 64"    # those whose names begin so
    python -m benchmarks.gpu_programs --check              # against the results, writes nothing

jax's CUDA plugin compiles for a card that is only described. The first time, an environment for it
is made from the package index (5.6 GB). Counted is what came out: kernels and library calls
launched in one update, loops multiplied out; launches that only copy; collectives and their bytes;
memory; floating-point operations and bytes read and written, of one device. No time is measured.

With --check, exit code 1 if a count has grown by more than 10 % against
benchmarks/results/gpu_programs.json; else that file and the table beside it are written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.lib.common import (
    RESULTS,
    ROOT,
    arguments,
    command_name,
    number,
    progress,
    save,
    table,
    write_json,
)
from benchmarks.lib.venvs import NotBuilt, Venv, last_line

__all__ = ["CASES", "CUDA", "GUARDED", "Case", "compiled", "grown", "totals"]

CUDA = Venv(
    "cuda",
    (
        "jax[cuda12]==0.10.2", "flax==0.12.8", "optax==0.2.8", "numpy==2.4.6",
        "gymnasium==1.4.0", "jaxtyping==0.3.11", "safetensors==0.8.0", "rich==15.0.0",
        "tyro==1.0.16",
    ),
)  # fmt: skip
NAME, BEFORE = "gpu_programs", "gpu_programs_before"
TIMEOUT_S = 1800
# Without warnings; and the last line of a traceback is the error.
SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_TRACEBACK_FILTERING": "off"}
GROWTH = 0.10
GUARDED = ("launches", "copies", "collectives", "collective_bytes", "peak_bytes")
BY_CALL = {"loops", "kinds", "times"}


@dataclass(frozen=True)
class Case:
    """A config on so many GPUs of one machine, and which of its programs are compiled."""

    task: str
    config: str
    flags: tuple[str, ...]
    devices: int = 1
    card: str = "A100"
    programs: tuple[str, ...] = ("update",)

    @property
    def name(self) -> str:
        return f"{self.task}, {self.devices} x {self.card}"


def _sizes(envs: int, steps: int) -> tuple[str, ...]:
    return (
        "--env.num-envs", str(envs), "--algo.num-steps", str(steps), "--algo.epochs", "4",
        "--algo.minibatches", "4",
    )  # fmt: skip


ALL = ("update", "act", "finish")
PONG, CHEETAH = _sizes(64, 128), _sizes(64, 512)
CASES = [
    Case("Pong 64", "pong", PONG, programs=ALL),
    Case("Pong 64", "pong", PONG, 4, programs=("update", "staged")),
    Case("Pong 64", "pong", PONG, 8),
    Case("Pong 64", "pong", PONG, 1, "H100"),
    Case("Pong 64", "pong", PONG, 8, "H100"),
    Case("Pong 256", "pong", _sizes(256, 128), programs=ALL),
    Case("Pong 1024", "pong", _sizes(1024, 128), 8),
    Case("HalfCheetah 64", "halfcheetah", CHEETAH, programs=ALL),
    Case("HalfCheetah 64", "halfcheetah", CHEETAH, 4, programs=("update", "staged")),
    Case("HalfCheetah 64", "halfcheetah", CHEETAH, 1, "H100"),
    Case("Ant 64", "ant", CHEETAH, programs=ALL),
    Case("Ant 4096", "ant", _sizes(4096, 64)),
    Case("CartPole 1024", "cartpole", _sizes(1024, 128), programs=ALL),
    Case("CartPole 1024", "cartpole", _sizes(1024, 128), 4),
]


def compiled(case: Case) -> dict[str, dict[str, Any]]:
    """The counts of each program, from a process of the CUDA environment."""
    asked = asdict(case) | {"config": f"configs/{case.config}.py"}
    command = [str(CUDA.python), "-m", "benchmarks.lib.described_gpus", json.dumps(asked)]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0:
        raise SystemExit(f"{NAME}: {case.name}: {last_line(answer.stderr)}")
    return json.loads(answer.stdout.splitlines()[-1])


def totals(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of an update: the stages of a staged one are added up, by how often each is called."""
    stages = {name: row for name, row in found.items() if name.startswith("staged ")}
    if not stages:
        return found
    whole: dict[str, Any] = {"times": 1, "loops": [], "kinds": {}}
    for key in next(iter(stages.values())):
        if key in BY_CALL:
            continue
        sizes = key.endswith("_bytes") and key not in ("collective_bytes", "moved_bytes")
        parts = [row[key] * (1 if sizes else row["times"]) for row in stages.values()]
        whole[key] = max(parts) if sizes else sum(parts)
    whole["calls"] = sum(row["times"] for row in stages.values())
    return {k: row for k, row in found.items() if k not in stages} | {"staged update": whole}


def grown(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What is more than 10 % above what it was, as lines for people."""
    lines = []
    for case, programs in before.items():
        for program, row in programs.items():
            for key in GUARDED:
                found = now.get(case, {}).get(program, {}).get(key)
                if found is not None and found > (1 + GROWTH) * row[key]:
                    lines.append(f"{case}, {program}: {key} {row[key]:,} -> {found:,}")
    return lines


# ---------------------------------------------------------------------------------------------
# The table


HEADER = [
    "case", "program", "launches", "before", "loops", "only copy", "collectives", "MB each",
    "peak MB", "GFLOP", "GB moved",
]  # fmt: skip


def shown(case: str, program: str, row: dict[str, Any], before: dict[str, Any]) -> list[str]:
    old = before.get(case, {}).get(program)
    each = row["collective_bytes"] / max(row["collectives"], 1)
    times = f" (x {row['times']})" if row["times"] > 1 else ""
    calls = f" ({row['calls']} calls)" if "calls" in row else ""
    return [
        case,
        program + times + calls,
        f"{row['launches']:,}",
        f"{old['launches']:,}" if old else "–",
        ", ".join("?" if n is None else str(n) for n in row["loops"]) or "–",
        f"{row['copies']:,}",
        str(row["collectives"]),
        number(each / 1e6) if row["collectives"] else "–",
        number(row["peak_bytes"] / 1e6),
        number(row["flops"] / 1e9),
        number(row["moved_bytes"] / 1e9),
    ]


def report(now: dict[str, Any], before: dict[str, Any], made: str) -> str:
    old = {case: totals(programs) for case, programs in before.items()}
    rows = [
        shown(case, program, row, old)
        for case, programs in now.items()
        for program, row in totals(programs).items()
    ]
    return "\n\n".join([
        "# What a GPU would do in one update",
        f"Made by `{made}`. Compiled by jax's CUDA plugin for cards that are only described: what "
        "is counted would be executed, how long it takes was not measured "
        "([docs/gpu.md](../../docs/gpu.md) has a prediction and its assumptions).",
        table(HEADER, rows),
        "Launches: kernels, library calls and copies of one call of the program, loops multiplied "
        "out. Before: the same before the programs were looked at for the first time. Loops: how "
        "often each runs, ? where only the device knows. Only copy: launches that move or "
        "transpose and compute nothing. Peak: arguments, results and temporaries of one device. "
        "GFLOP: matrix products and convolutions of one device. GB moved: what its launches read "
        "and write, as if there were no cache. `act` is one step of one group of environments, "
        "`finish` what follows the last step of a rollout; (x n): called so often in an update. A "
        "staged update is what ranks with several GPUs each run, with MPI between its programs.",
    ])  # fmt: skip


# ---------------------------------------------------------------------------------------------


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def chosen(prefixes: Sequence[str]) -> list[Case]:
    found = [c for c in CASES if not prefixes or any(c.name.startswith(p) for p in prefixes)]
    if not found:
        names = "; ".join(case.name for case in CASES)
        raise SystemExit(f"{NAME}: no case begins with {', '.join(prefixes)}; there are: {names}")
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="*", default=[], metavar="NAME", help="how they begin")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--before", action="store_true", help=f"write {BEFORE}.json alone")
    args = parser.parse_args()
    cases = chosen(args.cases)
    try:
        CUDA.build()
    except NotBuilt as error:
        raise SystemExit(f"{NAME}: the environment with the CUDA plugin: {error}") from error
    found = {case.name: compiled(case) for case in progress(cases, "compiling")}
    stored = read(NAME)
    if args.check:
        lines = grown(found, {name: stored[name] for name in found if name in stored})
        print("\n".join(lines) or f"no count of {len(found)} cases has grown by more than 10 %")
        return 1 if lines else 0
    target = BEFORE if args.before else NAME
    kept = {case.name: (read(target) | found).get(case.name) for case in CASES}
    data = {"environment": CUDA.requirements, "cases": {k: v for k, v in kept.items() if v}}
    if args.before:
        write_json(BEFORE, data)
        return 0
    save(NAME, data, report(data["cases"], read(BEFORE), f"python -m {command_name()}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

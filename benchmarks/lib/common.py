"""What the benchmarks share: a progress bar, medians, facts about the machine, written results.

Nothing here imports jax.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from spmdrl.parallel.topology import cores
from spmdrl.runtime.rundir import versions

__all__ = [
    "CLOSE",
    "RESULTS",
    "ROOT",
    "Spread",
    "about_spread",
    "arguments",
    "command_name",
    "cores",
    "in_turns",
    "machine",
    "made_by",
    "near_fastest",
    "new_figure",
    "number",
    "percent",
    "pretty",
    "progress",
    "save",
    "spread",
    "table",
    "write_json",
]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COVERAGE = 0.9  # of the interval around a median; five values just reach it with all of them
CLOSE = 0.8  # of the fastest setting; slower ones are not tried again

Case = TypeVar("Case")


@dataclass(frozen=True)
class Spread:
    """A median, and the order statistics between which the true one lies."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Free of assumptions about the noise; with few values it is the whole range."""
    ordered = sorted(values)
    count, cut = len(ordered), 0
    while 2 * (cut + 1) < count and _coverage(count, cut + 1) >= COVERAGE:
        cut += 1
    return Spread(statistics.median(ordered), ordered[cut], ordered[count - 1 - cut])


def _coverage(count: int, cut: int) -> float:
    """Chance that the true median lies between the values left after cutting `cut` at each end."""
    outside = sum(math.comb(count, k) for k in range(cut + 1))
    return 1 - 2 * outside / 2**count


def about_spread(repeats: int) -> str:
    """What the brackets after a median mean."""
    if _coverage(repeats, 0) >= COVERAGE:
        return (
            f"Medians of {repeats}; in brackets the interval that holds the true median with "
            f"{COVERAGE:.0%} confidence."
        )
    return f"Medians of {repeats}; in brackets the lowest and the highest."


def in_turns(cases: Sequence[Case], repeats: int) -> list[Case]:
    """Every case once, then all of them again: a slow minute hits all cases alike."""
    return [case for _ in range(repeats) for case in cases]


def near_fastest(rates: Mapping[Case, float]) -> list[Case]:
    """Those that one noisy run could have put behind the fastest."""
    return [case for case, rate in rates.items() if rate >= CLOSE * max(rates.values())]


def progress(items: Sequence[Case], title: str) -> Iterator[Case]:
    """The items, with a bar on the error output that shows the time left."""
    yield from track(items, title, console=Console(stderr=True))


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the program."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {k: v for k, v in versions().items() if k != "platform"},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def made_by(found: dict[str, Any], other_words: Mapping[str, str] = MappingProxyType({})) -> str:
    """One paragraph: which command, on what; some of its words may be shown as others."""
    shown = (other_words.get(word, word) for word in sys.argv[1:])
    words = shlex.join(["python", "-m", command_name(), *shown])
    packages = ", ".join(f"{k} {found['versions'][k]}" for k in ("jax", "envpool", "mpi4jax"))
    return (
        f"Made by `{words}` on {found['cores']} cores ({found['cpu']}); {packages}. Load average "
        f"at the start: {found['load_average']:.1f}; on an idle machine it is near 0."
    )


def command_name() -> str:
    """What was typed after `python -m`: benchmarks.throughput, say."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three digits that count, without exponents."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def pretty(found: Spread) -> str:
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def percent(found: Spread) -> str:
    return f"{found.median:.0%} ({found.low:.0%}–{found.high:.0%})"


def new_figure(columns: int, width: float, height: float, **kwargs: Any) -> tuple[Any, Any]:
    import matplotlib  # slow to load: not before there is something to draw

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kwargs = {"constrained_layout": True, "squeeze": False} | kwargs
    fig, axes = plt.subplots(1, columns, figsize=(width, height), **kwargs)
    return fig, axes[0]


def save(name: str, data: Any, markdown: str, figure: Any = None) -> None:
    """benchmarks/results/NAME.json, .md and .png."""
    write_json(name, data)
    (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")
    if figure is not None:
        figure.savefig(RESULTS / f"{name}.png", dpi=110)
    print(f"{markdown}\n\nwritten to {(RESULTS / name).relative_to(ROOT)}.*")


def write_json(name: str, data: Any) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Spread) else float(value)


def arguments(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )

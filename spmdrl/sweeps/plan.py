"""From `--grid optim.lr 1e-3,3e-4 --seeds 5` to the runs of a sweep, each with a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spmdrl.config import ConfigError

__all__ = ["Axis", "Point", "make_points", "read_axes"]


@dataclass(frozen=True)
class Axis:
    """A field and the values it takes, as they were typed."""

    field: str
    values: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


@dataclass(frozen=True)
class Point:
    """One run of the sweep."""

    name: str
    """Of its folder; the same values and the same seed find the same run again."""
    flags: tuple[str, ...]


def read_axes(grid: Sequence[tuple[str, str]]) -> list[Axis]:
    """Each `--grid FIELD VALUE,VALUE,...`; a value of several words stands in quotes."""
    axes: list[Axis] = []
    for name, text in grid:
        field = name.removeprefix("--").replace("-", "_")
        values = tuple(value.strip() for value in text.split(","))
        if not all(values):
            raise ConfigError(f"--grid {name} {text!r}: a value is missing; write 1e-3,3e-4")
        if any(axis.field == field for axis in axes):
            raise ConfigError(f"--grid {name} is there twice; name all its values in one")
        if field == "seed":
            raise ConfigError("--grid seed: the number of seeds is given by --seeds")
        axes.append(Axis(field, tuple(dict.fromkeys(values))))
    return axes


def make_points(axes: Sequence[Axis], seeds: Sequence[int]) -> list[Point]:
    """Every combination with every seed; seed by seed, so that a stopped sweep has tried all."""
    names = _short_names([axis.field for axis in axes])
    points = []
    for seed in seeds:
        for values in itertools.product(*(axis.values for axis in axes)):
            parts = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
            words = [w for a, v in zip(axes, values, strict=True) for w in (a.flag, *v.split())]
            name = re.sub(r"[^\w.=+-]", "-", "_".join([*parts, f"s{seed}"]))
            points.append(Point(name, (*words, "--seed", str(seed))))
    return points


def _short_names(fields: Sequence[str]) -> list[str]:
    """The last part, where that tells them apart."""
    last = [field.rpartition(".")[2] for field in fields]
    return [s if last.count(s) == 1 else f for s, f in zip(last, fields, strict=True)]

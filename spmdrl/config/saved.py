"""A config as JSON: what rank 0 sends to the others, and what a run directory keeps.

An algorithm is saved with its type: the file name of one of ours, or `module:Class` of one that the
user wrote. Only a class that the caller brings along is used for the latter; reading a run
directory never imports what it names.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Any

from spmdrl.config.rules import ConfigError, fields_of, suggest
from spmdrl.config.schema import DEFAULT_ALGORITHM, AlgoConfig, Config, algorithm_class

__all__ = ["ForeignAlgo", "changes", "flatten", "from_json", "parse_json", "to_json"]

OURS = "spmdrl.algos."
TYPE = "type"  # beside the algorithm's fields


@dataclass(frozen=True)
class ForeignAlgo(AlgoConfig):
    """An algorithm whose code is not available: enough to play, plot and list its runs."""


def type_name(algo: type[AlgoConfig]) -> str:
    if algo.__module__.startswith(OURS):
        return algo.__module__.removeprefix(OURS)
    return f"{algo.__module__}:{algo.__qualname__}"


def to_json(config: Config) -> str:
    values = dataclasses.asdict(config)
    values["algo"] = {TYPE: type_name(type(config.algo)), **values["algo"]}
    return json.dumps(values, indent=2)


def parse_json(data: str | bytes) -> Any:
    """ValueError for whatever is no JSON, brackets by the thousand included."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def from_json(text: str | bytes, own_algo: type[AlgoConfig] | None = None) -> Config:
    """`own_algo` is the class of an algorithm from outside this package, if there is one."""
    values = parse_json(text)
    if values.pop("overlap", False):  # what lag 1 was called once
        values["lag"] = 1
    algo = dict(values.pop("algo", {}))
    cls = _algorithm(algo.pop(TYPE, DEFAULT_ALGORITHM), own_algo)
    if cls is ForeignAlgo:
        common = {f.name for f in dataclasses.fields(ForeignAlgo)}
        algo = {name: value for name, value in algo.items() if name in common}
    config: Config = _build(Config, values)
    return dataclasses.replace(config, algo=_build(cls, algo))


def _algorithm(name: str, own: type[AlgoConfig] | None) -> type[AlgoConfig]:
    if own is not None and type_name(own) == name:
        return own
    if ":" in name:
        return ForeignAlgo
    try:
        return algorithm_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"unknown algorithm {name!r}; is it from a newer version?") from error


def _build(cls: Any, values: dict[str, Any]) -> Any:
    """The dataclass from its dict; an unknown field is an error, a missing one its default."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values.keys() - known:
        raise ConfigError(f"unknown field {name!r} in {cls.__name__}{suggest(name, known)}")
    built = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            built[name] = _build(hints[name], value)
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def flatten(config: Config) -> dict[str, Any]:
    """{"env.id": ..., "seed": ...}: every field by its command-line name."""
    leaves = {f.name: f.value for f in fields_of(config) if not dataclasses.is_dataclass(f.value)}
    return leaves | {f"algo.{TYPE}": type_name(type(config.algo))}


def changes(before: Config, now: Config) -> list[str]:
    """`field: old -> new` for every change that a resumed run cannot take."""
    free = {f.name for f in fields_of(now) if f.free}
    old, new = flatten(before), flatten(now)
    fixed = [name for name in old | new if name not in free]
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in fixed
        if old.get(name) != new.get(name)
    ]

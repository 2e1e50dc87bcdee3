"""Rules that stand beside a config field, and the one checker that reads them.

A field is annotated with what it may be: `threads: Annotated[int, at_least(0), FREE] = 0`. Types
and ranges are checked by `check_fields`; `FREE` says that a resumed run may change the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

__all__ = [
    "FINITE", "FIXED", "FREE", "NAME", "PATH", "WINDOW", "ConfigError", "Count", "Counts", "Decay",
    "Field", "NonNegative", "Options", "Positive", "Range", "Ranks", "Seed", "Share", "Torso",
    "Widths", "Workers", "at_least", "check_fields", "fields_of", "suggest",
]  # fmt: skip


class ConfigError(ValueError):
    """Bad input: the message names the field, the value and the nearest valid choice."""


@dataclass(frozen=True)
class Range:
    """Which values of the right type a field takes; `rule` completes "must be ..."."""

    rule: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    """Words, if there are some that a wrong one may resemble."""


@dataclass(frozen=True)
class Resume:
    """Whether the field may change when a run is resumed."""

    free: bool


FREE, FIXED = Resume(True), Resume(False)
INFINITY = float("inf")


def at_least(least: int) -> Range:
    return Range(f"at least {least}" if least else "0 or more", lambda x: x >= least)


FINITE = Range("finite", lambda x: x is None or math.isfinite(x))
Count = Annotated[int, at_least(1)]
Positive = Annotated[float, Range("above 0 and finite", lambda x: 0.0 < x < INFINITY)]
NonNegative = Annotated[float, Range("0 or more and finite", lambda x: 0.0 <= x < INFINITY)]
Share = Annotated[float, Range("between 0 and 1", lambda x: 0.0 <= x <= 1.0)]
WINDOW = Range("from 1 to 1000000", lambda x: 1 <= x <= 1_000_000)
Seed = Annotated[int, Range("from 0 to 2147483647", lambda x: 0 <= x < 2**31)]

Widths = Annotated[
    tuple[int, ...], Range("widths of at least 1", lambda x: all(width >= 1 for width in x))
]
Counts = Annotated[
    tuple[int, ...], Range("numbers of at least 1", lambda x: all(number >= 1 for number in x))
]
Decay = Annotated[float, Range("at least 0 and below 1", lambda x: 0.0 <= x < 1.0)]
Ranks = Annotated[
    int | Literal["auto"], Range("at least 1, or auto", lambda x: x == "auto" or x >= 1)
]

Workers = Annotated[
    int | Literal["inline"], Range("0 or more, or inline", lambda x: x == "inline" or x >= 0)
]


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


Options = Annotated[
    dict[str, Any],
    Range("made of what JSON has: text, finite numbers, true, false, null, lists", _survives_json),
]


TORSOS = ("auto", "mlp", "nature_cnn", "small_cnn", "impala_resnet")
Torso = Annotated[
    str,
    Range(
        f"{', '.join(TORSOS)} or package.module:Class",
        lambda x: x in TORSOS or re.fullmatch(r"\w+(\.\w+)*:\w+", x) is not None,
        TORSOS,
    ),
]


def _is_name(text: str) -> bool:
    """Whether it can begin a folder's name below runs/, with a seed and a date after it."""
    parts = text.split("/")
    stays = text == "" or not any(part in ("", ".", "..") for part in parts)
    return text.isprintable() and stays and all(len(os.fsencode(part)) <= 200 for part in parts)


def _is_path(path: str | None) -> bool:
    """Whether the system takes it; the empty one would silently mean something else."""
    if path is None:
        return True
    if not path.strip() or not path.isprintable():
        return False
    parts = [os.fsencode(part) for part in path.split("/")]
    return max(map(len, parts)) <= 255 and sum(map(len, parts)) + len(parts) <= 4000


NAME = Range("printable, of at most 200 bytes and without .. or / at its ends", _is_name)
PATH = Range("a path that is not empty, printable, with at most 255 bytes in each part", _is_path)


@dataclass(frozen=True)
class Field:
    """A field of a config, by its command-line name."""

    name: str
    type: Any
    value: Any
    ranges: tuple[Range, ...]
    free: bool


def fields_of(part: Any, prefix: str = "", free: bool = False) -> Iterator[Field]:
    """Every field of the dataclass and of those nested in it, whose marks override its own."""
    for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        bare, marks = _unwrapped(hint)
        value = getattr(part, name)
        is_free = next((m.free for m in reversed(marks) if isinstance(m, Resume)), free)
        ranges = tuple(m for m in marks if isinstance(m, Range))
        yield Field(f"{prefix}{name}", bare, value, ranges, is_free)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}.", is_free)


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without its annotations, and the annotations; nested ones are joined by typing."""
    if typing.get_origin(hint) is Annotated:
        bare, *marks = typing.get_args(hint)
        return bare, tuple(marks)
    return hint, ()


def check_fields(part: Any) -> None:
    """Raise ConfigError for the first field whose type or range is wrong.

    The command line's types are checked by tyro; a config file can assign anything.
    """
    for field in fields_of(part):
        if not fits(field.value, field.type):
            raise ConfigError(f"{field.name} is {field.value!r}, but must be {_wanted(field)}")
        for allowed in field.ranges:
            if not allowed.holds(field.value):
                close = suggest(str(field.value), allowed.choices)
                raise ConfigError(
                    f"{field.name} is {field.value!r}, but must be {allowed.rule}{close}"
                )


def _wanted(field: Field) -> str:
    choices = [str(c) for c in typing.get_args(field.type)]
    if typing.get_origin(field.type) is Literal:
        return f"one of {', '.join(choices)}{suggest(str(field.value), choices)}"
    return str(field.type) if choices else str(field.type.__name__)


def fits(value: Any, hint: Any) -> bool:
    """Whether the value is of the annotated type."""
    hint = _unwrapped(hint)[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, args[1]) for item in value.values())
    if hint is Any:
        return True
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""

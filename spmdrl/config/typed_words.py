"""The command line as people type it: 1e6 and 500_000 as whole numbers, true and false as switches.

Rewrites words before tyro reads them, and answers what cannot be a number, or is no flag at all, in
one line. Light: flags are looked up by name in `{"env.num_envs": int, ...}`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from spmdrl.config.rules import ConfigError

__all__ = ["as_typed", "check_known", "field_name"]

TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}

ALIKE = 0.65  # from 0 to 1, as difflib counts
ELSEWHERE = {  # what other libraries call it, or an older version of this one
    "overlap": "--lag 1", "no-overlap": "--lag 0",
    "learning-rate": "--optim.lr", "env": "--env.id", "env-id": "--env.id", "output": "--run-dir",
    "steps": "--total-steps", "total-timesteps": "--total-steps", "timesteps": "--total-steps",
}  # fmt: skip

Kinds = Mapping[str, Any]  # the type of each field, by its name
Off = Callable[[str], list[str]]  # words that switch a flag off


def as_typed(words: Sequence[str], kinds: Kinds, off: Off | None = None) -> list[str]:
    """The words as tyro takes them; `off` by default writes --part.no-name."""
    left, done = list(words), []
    while left:
        flag, equals, value = left.pop(0).partition("=")
        kind = kinds.get(field_name(flag)) if flag.startswith("--") else None
        if _members(kind) == [bool]:
            done += _switch(flag, value if equals else None, left, off or _negated)
        elif equals:
            done.append(f"{flag}={_number(flag, value, kind)}")
        else:
            done.append(flag)
            for _ in range(_count(kind, left)):
                done.append(_number(flag, left.pop(0), kind))
    return done


def field_name(flag: str) -> str:
    """--env.num-envs is the field env.num_envs."""
    return flag.removeprefix("--").replace("-", "_")


def _count(kind: Any, following: Sequence[str]) -> int:
    """How many of the following words are values of the flag."""
    is_many = any(typing.get_origin(member) is tuple for member in _members(kind))
    values = 0
    while values < len(following) and not following[values].startswith("--"):
        values += 1
    return values if is_many else min(values, 1)


# ---------------------------------------------------------------------------------------------
# Switches


def _switch(flag: str, value: str | None, left: list[str], off: Off) -> list[str]:
    """A switch with or without a value; other words are left to whoever reads them next."""
    given = value if value is not None else (left[0] if left else "")
    answer = given.lower()
    if answer not in TRUE | FALSE:
        return [flag if value is None else f"{flag}={value}"]
    if value is None:
        left.pop(0)
    return [flag] if answer in TRUE else off(flag)


def _negated(flag: str) -> list[str]:
    part, dot, name = flag.removeprefix("--").rpartition(".")
    return [f"--{part}{dot}no-{name}"]


# ---------------------------------------------------------------------------------------------
# Numbers


def _number(flag: str, text: str, kind: Any) -> str:
    """The word as Python writes such a number; others as they are, if the field may take them."""
    members = [item for member in _members(kind) for item in _items(member)]
    if type(None) in members:
        if text == "None":
            return text
        members.remove(type(None))
    if int in members and float not in members:
        whole = _whole(text)
        if whole is not None:
            return str(whole)
        if members == [int]:
            raise ConfigError(
                f"{flag} is {text!r}, but must be a whole number, such as 1000, 1_000 or 1e3"
            )
    if members == [float] and not _is_float(text):
        raise ConfigError(f"{flag} is {text!r}, but must be a number, such as 0.001 or 1e-3")
    return text


def _whole(text: str) -> int | None:
    """1e6 and 2.5e5 are whole numbers; 1e-3 and 3.5 are not."""
    try:
        return int(text)
    except ValueError:
        pass
    if "e" not in text.lower() or not _is_float(text):
        return None
    value = float(text)
    return int(value) if value.is_integer() else None


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _members(hint: Any) -> list[Any]:
    """What a field may be: the types of a union, without their annotations."""
    if typing.get_origin(hint) is Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [member for arg in typing.get_args(hint) for member in _members(arg)]
    return [hint]


def _items(member: Any) -> list[Any]:
    """Of a tuple, what is in it."""
    if typing.get_origin(member) is tuple:
        return [item for item in typing.get_args(member) if item is not ...]
    return [member]


# ---------------------------------------------------------------------------------------------
# Names


def check_known(words: Iterable[str], kinds: Kinds, free: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for a flag that is no field's, naming the nearest. `free` begins others."""
    flags = [flag for name, kind in kinds.items() for flag in _spellings(name, kind)]
    for word in words:
        typed = "--" + field_name(word.partition("=")[0]).replace("_", "-")
        if not word.startswith("--") or typed in (*flags, "--help") or typed.startswith(free):
            continue
        raise ConfigError(f"there is no field {typed}{_nearest(typed, flags)}")


def _spellings(name: str, kind: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag, *_negated(flag)] if _members(kind) == [bool] else [flag]


def _nearest(typed: str, flags: Sequence[str]) -> str:
    """By what other libraries call it; else by its whole name or the last part of it."""
    name = typed.removeprefix("--")
    if ELSEWHERE.get(name, "").partition(" ")[0] in flags:
        return f"; did you mean {ELSEWHERE[name]}?"
    likeness = {flag: _likeness(name, flag.removeprefix("--")) for flag in flags}
    best = max(likeness, key=lambda flag: likeness[flag])
    return f"; did you mean {best}?" if likeness[best] >= ALIKE else "; --help lists them all"


def _likeness(typed: str, known: str) -> float:
    pairs = ((typed, known), (typed.rpartition(".")[2], known.rpartition(".")[2]))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

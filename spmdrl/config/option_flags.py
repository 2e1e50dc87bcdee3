"""`--env.options` on the command line: any number of names, with values of any JSON kind.

    --env.options frame_skip=4 layout='[1, 2]' --env.options.render false

They are added to the options of the config file. `--env.options name value` is taken as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from spmdrl.config.rules import ConfigError

__all__ = ["read_pairs", "read_value", "take_options"]

FLAG = "--env.options"
PYTHON = {"True": True, "False": False, "None": None}  # as they are in a config file


def take_options(
    flags: Sequence[str], known: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """The other flags, and the known options with those of the flags."""
    rest, options = [], dict(known)
    words = list(flags)
    while words:
        word = words.pop(0)
        if word == FLAG:
            options |= read_pairs(_values(words))
        elif word.startswith((f"{FLAG}.", f"{FLAG}=")):
            options |= _single(word, _values(words), known)
        else:
            rest.append(word)
    return rest, options


def _values(words: list[str]) -> list[str]:
    """Takes what is before the next flag; -1 is a value."""
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    taken, words[:] = words[:count], words[count:]
    return taken


def read_pairs(words: Sequence[str]) -> dict[str, Any]:
    """`name=value` each, or names and values in turn."""
    words, found = list(words), {}
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not equals and not words:
            raise ConfigError(f"{FLAG} {word} has no value; write {FLAG} {word}=VALUE")
        found[_checked(name)] = read_value(value if equals else words.pop(0))
    return found


def _single(word: str, values: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """`--env.options.name value`, with = or without; no value at all means true."""
    if word.startswith(f"{FLAG}="):
        return read_pairs([word.removeprefix(f"{FLAG}="), *values])
    name, equals, value = word.removeprefix(f"{FLAG}.").partition("=")
    name = _checked(name.replace("-", "_"))
    given = [value] * bool(equals) + values
    if len(given) > 1:
        raise ConfigError(f"{FLAG}.{name} takes one value, but {given[1]!r} follows it")
    if given:
        return {name: read_value(given[0])}
    opposite = name.removeprefix("no_")
    return {opposite: False} if opposite != name and opposite in known else {name: True}


def _checked(name: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise ConfigError(f"{FLAG}: {name!r} is not the name of an option; write NAME=VALUE")
    return name


def read_value(text: str) -> Any:
    """As JSON where it is JSON, True, False and None as Python has them, else the text itself."""
    if text in PYTHON:
        return PYTHON[text]
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are not JSON: text

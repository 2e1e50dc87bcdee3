"""Nested spaces and their observations as flat dicts, by the path to each leaf.

A dict's keys and a tuple's positions are joined by "/": `{"arm": {"joints": Box}}` has the leaf
"arm/joints". A space that is not nested has one leaf, without a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym

__all__ = ["leaf_spaces", "leaf_values", "nested"]


def leaf_spaces(space: Any) -> dict[str, Any]:
    """The spaces without parts of their own, in order of name."""
    inner = _inner(space)
    if inner is None:
        return {"": space}
    return {
        _join(name, rest): leaf for name, part in inner for rest, leaf in leaf_spaces(part).items()
    }


def leaf_values(space: Any, value: Any) -> dict[str, Any]:
    """The same paths, with what an observation has there."""
    inner = _inner(space)
    if inner is None:
        return {"": value}
    parts = enumerate(value) if isinstance(value, tuple) else value.items()
    by_name = {str(name): part for name, part in parts}
    return {
        _join(name, rest): leaf
        for name, part in inner
        for rest, leaf in leaf_values(part, by_name[name]).items()
    }


def _inner(space: Any) -> Iterator[tuple[str, Any]] | None:
    if isinstance(space, (gym.spaces.Dict, Mapping)):
        return iter(sorted((str(name), space[name]) for name in space))
    if isinstance(space, gym.spaces.Tuple):
        return ((str(i), part) for i, part in enumerate(space.spaces))
    return None


def _join(name: str, rest: str) -> str:
    return f"{name}/{rest}" if rest else name


def nested(space: Any, leaves: Mapping[str, Any]) -> Any:
    """An observation of the space again, from its leaves by path; what has none is left out."""
    if isinstance(space, gym.spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(nested(part, _below(str(i), leaves)) for i, part in parts)
    if isinstance(space, (gym.spaces.Dict, Mapping)):
        return {name: nested(space[name], _below(str(name), leaves)) for name in space}
    return leaves.get("")


def _below(name: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    inside = {k.removeprefix(f"{name}/"): v for k, v in leaves.items() if k.startswith(f"{name}/")}
    return inside | ({"": leaves[name]} if name in leaves else {})

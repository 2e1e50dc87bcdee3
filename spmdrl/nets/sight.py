"""Which parts of the observation policy and value see: `net.policy_keys` and `net.value_keys`.

Keys are leaves of the environment's observation. Those that it calls privileged are for the value
alone unless somebody says otherwise: a policy that needs them could not be used anywhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from spmdrl.config import ConfigError, NetConfig, suggest
from spmdrl.types import MASK, Array, Column, EnvSpec, Obs, ObsPart, channels_first

__all__ = ["Sight", "View", "leaf_names", "make_sight", "with_symbols"]

PRIVILEGED = "privileged"
BESIDE = ("mask", "history")  # kinds of parts that no torso sees
Slices = tuple[slice, ...]  # of a joined vector; none at all: the whole array


@dataclass(frozen=True)
class View:
    """A choice among the parts of an observation, and among the columns of joined vectors."""

    spec: EnvSpec  # as it is seen
    kept: Mapping[str, Slices]
    whole: bool  # nothing is left out, not even a mask

    def __call__(self, obs: Obs) -> Obs:
        if self.whole:
            return obs
        if not isinstance(obs, dict):
            return _columns(obs, self.kept[""])
        return {name: _columns(obs[name], slices) for name, slices in self.kept.items()}


def _columns(x: Array, slices: Slices) -> Array:
    if not slices:
        return x
    return jnp.concatenate([x[..., s] for s in slices], axis=-1)


class Sight(NamedTuple):
    """What policy and value see, and whether actions are masked."""

    policy: View
    value: View
    masked: bool


def make_sight(net: NetConfig, spec: EnvSpec, env_id: str) -> Sight:
    names = leaf_names(spec)
    public = [name for name in names if PRIVILEGED not in name.lower()]
    policy = _chosen("policy_keys", net.policy_keys, names, env_id) or set(public or names)
    value = _chosen("value_keys", net.value_keys, names, env_id) or set(names)
    if net.shared and policy != value:
        raise ConfigError(
            f"net.shared needs the same observation for policy and value; of {env_id} only one of "
            f"them sees {', '.join(sorted(policy ^ value))}; use --net.no-shared, or the same "
            "net.policy_keys and net.value_keys"
        )
    return Sight(_view(spec, policy), _view(spec, value), masked=MASK in spec.parts)


def leaf_names(spec: EnvSpec) -> list[str]:
    """Of everything that a network could see, as the keys in a config name them."""
    found = []
    for name, part in spec.parts.items():
        if part.kind not in BESIDE:
            found += [_key(column.name) for column in part.columns] or [_key(name)]
    return found


def _key(name: str) -> str:
    return name.replace("/", ".") or "obs"


def _chosen(field: str, keys: tuple[str, ...], names: list[str], env_id: str) -> set[str]:
    """The leaves that the keys name; a key of a nested dict stands for all of its leaves."""
    found: set[str] = set()
    for key in map(_key, keys):
        named = {name for name in names if name == key or name.startswith(f"{key}.")}
        if not named:
            raise ConfigError(
                f"net.{field} has {key!r}, which {env_id} does not show{suggest(key, names)} "
                f"(it shows {', '.join(names)})"
            )
        found |= named
    return found


def _view(spec: EnvSpec, chosen: set[str]) -> View:
    parts: dict[str, ObsPart] = {}
    kept: dict[str, Slices] = {}
    for name, part in spec.parts.items():
        if part.kind in BESIDE:
            continue
        columns = tuple(c for c in part.columns if _key(c.name) in chosen)
        if columns and columns != part.columns:
            width = sum(c.width for c in columns)
            parts[name] = dataclasses.replace(part, shape=(width,), columns=columns)
            kept[name] = _slices(part.columns, chosen)
        elif columns or (not part.columns and _key(name) in chosen):
            parts[name], kept[name] = part, ()
    whole = parts == spec.parts and not any(kept.values())
    seen = parts[""] if isinstance(spec.obs, ObsPart) else parts
    return View(dataclasses.replace(spec, obs=seen), kept, whole)


def _slices(columns: tuple[Column, ...], chosen: set[str]) -> Slices:
    """Neighbours are one slice."""
    found: list[slice] = []
    start = 0
    for column in columns:
        stop = start + column.width
        if _key(column.name) in chosen:
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(slice(start, stop))
        start = stop
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# Images that are no pictures


def with_symbols(net: NetConfig, spec: EnvSpec, env_id: str) -> EnvSpec:
    """With what `net.symbols` says about images: their numbers are names, not brightness."""
    if not net.symbols:
        return spec
    parts = spec.parts
    known = {_key(k): k for k, part in parts.items() if part.kind in ("image", "ids")}
    for entry in net.symbols:
        key, _, numbers = entry.partition("=")
        if _key(key) not in known:
            raise ConfigError(
                f"net.symbols has {entry!r}, but {env_id} has no integers called "
                f"{key!r}{suggest(key, known)} (it has {', '.join(known) or 'none'})"
            )
        name = known[_key(key)]
        values = _counts(entry, numbers, parts[name], env_id)
        parts[name] = dataclasses.replace(parts[name], kind="ids", values=values)
    obs = parts[""] if isinstance(spec.obs, ObsPart) else parts
    return dataclasses.replace(spec, obs=obs)


def _counts(entry: str, numbers: str, part: ObsPart, env_id: str) -> tuple[int, ...]:
    words = numbers.split(",")
    values = tuple(int(word) for word in words if word.strip().isdecimal())
    if len(values) != len(words) or min(values) < 2 or part.dtype.kind not in "iu":
        raise ConfigError(
            f"net.symbols has {entry!r}, but must be NAME=COUNT or NAME=COUNT,COUNT,... with "
            "counts of at least 2, and NAME of integers"
        )
    channels = part.shape[0] if _is_stacked_first(part) else part.shape[-1]
    if len(values) not in (1, channels):
        raise ConfigError(
            f"net.symbols has {entry!r}, but {env_id} has {channels} channels there; give one "
            f"count, or {channels}"
        )
    return values


def _is_stacked_first(part: ObsPart) -> bool:
    return len(part.shape) == 3 and channels_first(part.shape)

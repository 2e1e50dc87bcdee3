"""From what an environment shows to what a network sees.

Nested dicts and tuples are flat: every leaf has its path as its name. Numbers are joined to one
vector in order of name; images and ids keep their names; an action mask stands beside them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdrl.config import ConfigError
from spmdrl.envs import actions
from spmdrl.envs.leaf_rules import MASK_NAMES, Leaf, is_mask, leaf_of
from spmdrl.envs.leaves import leaf_spaces, leaf_values
from spmdrl.types import MASK, Column, EnvSpec, Obs, ObsPart

__all__ = ["Reader", "make_reader", "mask_shape", "obs_spec", "read_obs"]

VECTOR = "vector"  # name of the numbers beside images
# What images are known to be no pictures: how many symbols each of their channels has.
SYMBOLS = {("MiniGrid-", "BabyAI-"): {"image": (11, 6, 4)}}


@dataclass(frozen=True)
class Reader:
    """Reads the observations of one kind of environment; made once, called every step."""

    space: Any
    leaves: Mapping[str, Leaf]
    spec: EnvSpec
    info_mask: str = ""  # where info has the action mask

    def read(self, obs: Any, xp: Any, info: Any = None) -> Obs:
        """A batch of observations as `spec` describes it; `xp` is numpy or jax.numpy."""
        mask = None if not self.info_mask else info[self.info_mask]
        return _read(self.space, self.leaves, obs, mask, xp)


def make_reader(
    space: Any,
    action: Any,
    env_id: str,
    info_masks: Mapping[str, tuple[int, ...]] | None = None,
    action_dtype: Any = None,
) -> Reader:
    """For an environment with these spaces; `info_masks` are shapes of masks that info has."""
    leaves = _leaves(space, env_id)
    in_obs = mask_shape(space)
    found = {} if in_obs else {k: v for k, v in (info_masks or {}).items() if k in MASK_NAMES}
    info_mask, shape = next(iter(found.items()), ("", in_obs))
    accepts = actions.action_space(action, env_id, shape, action_dtype)
    parts = _joined_spec(leaves, env_id, math.prod(shape) if info_mask else 0)
    left_out = tuple(name for name, leaf in leaves.items() if leaf.role == "left out")
    return Reader(space, leaves, EnvSpec(parts, accepts, left_out), info_mask)


def mask_shape(space: Any) -> tuple[int, ...]:
    """Of the action mask among the observations, or () where there is none."""
    found = leaf_spaces(space).items()
    return next((leaf.shape for name, leaf in found if is_mask(name, leaf)), ())


# ---------------------------------------------------------------------------------------------
# Without a reader


def obs_spec(space: Any, env_id: str) -> ObsPart | dict[str, ObsPart]:
    """What the network sees, of environments whose mask, if any, is in the observation."""
    return _joined_spec(_leaves(space, env_id), env_id, 0)


def read_obs(space: Any, obs: Any, xp: Any) -> Obs:
    """A batch of observations as `obs_spec` describes it; `xp` is numpy or jax.numpy."""
    return _read(space, _leaves(space, ""), obs, None, xp)


# ---------------------------------------------------------------------------------------------
# Joining


def _leaves(space: Any, env_id: str) -> dict[str, Leaf]:
    symbols = _known_symbols(env_id)
    found = {}
    for name, leaf_space in leaf_spaces(space).items():
        leaf = leaf_of(name, leaf_space, env_id)
        if name in symbols and leaf.part.shape[-1:] == (len(symbols[name]),):
            part = dataclasses.replace(leaf.part, kind="ids", values=symbols[name])
            leaf = dataclasses.replace(leaf, part=part)
        found[name] = leaf
    return found


def _known_symbols(env_id: str) -> dict[str, tuple[int, ...]]:
    name = env_id.rpartition(":")[2]
    return next((s for prefixes, s in SYMBOLS.items() if name.startswith(prefixes)), {})


def _joined_spec(
    leaves: Mapping[str, Leaf], env_id: str, info_mask: int
) -> ObsPart | dict[str, ObsPart]:
    parts = {_part_name(n): leaf.part for n, leaf in leaves.items() if leaf.role == "part"}
    joined = {n: leaf for n, leaf in leaves.items() if leaf.role == "numbers"}
    masks = [leaf.part for leaf in leaves.values() if leaf.role == "mask"]
    if info_mask:
        masks.append(ObsPart((info_mask,), np.dtype(bool), "mask"))
    if not parts and not joined:
        raise ConfigError(f"env.id {env_id} shows nothing that spmdrl can read")
    if not masks and list(leaves) == [""]:
        return leaves[""].part
    if not masks and not parts:
        return _vector(joined)
    if joined:
        parts[_vector_name(parts)] = _vector(joined)
    return parts | ({MASK: masks[0]} if masks else {})


def _vector(leaves: Mapping[str, Leaf]) -> ObsPart:
    columns = tuple(
        Column(name, math.prod(leaf.part.shape), leaf.how) for name, leaf in leaves.items()
    )
    return ObsPart((sum(c.width for c in columns),), np.dtype(np.float32), columns=columns)


def _part_name(name: str) -> str:
    """A path's slashes would be folders in files of arrays; a leaf without a name gets one."""
    return name.replace("/", ".") or "obs"


def _vector_name(parts: Mapping[str, Any]) -> str:
    return VECTOR if VECTOR not in parts else f"{VECTOR}_"


def _read(space: Any, leaves: Mapping[str, Leaf], obs: Any, mask: Any, xp: Any) -> Obs:
    values = leaf_values(space, obs)
    roles: dict[str, dict[str, Any]] = {"numbers": {}, "part": {}, "mask": {}}
    for name, leaf in leaves.items():
        if leaf.role != "left out":
            roles[leaf.role][name] = leaf.read(values[name], xp)
    masks = list(roles["mask"].values())
    if mask is not None:
        masks.append(mask.reshape(mask.shape[0], -1).astype(bool))
    if not masks and list(leaves) == [""]:
        return (roles["numbers"] | roles["part"])[""]
    parts = {_part_name(name): x for name, x in roles["part"].items()}
    flat = [x.reshape(x.shape[0], -1) for x in roles["numbers"].values()]
    if not masks and not parts:
        return xp.concatenate(flat, -1)
    if flat:
        parts[_vector_name(parts)] = xp.concatenate(flat, -1)
    return parts | ({MASK: masks[0]} if masks else {})

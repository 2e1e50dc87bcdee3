"""What the networks will see of an environment, in one line of the log."""

from __future__ import annotations

import itertools

from spmdrl.config import Config, NetConfig
from spmdrl.nets.sight import Sight, leaf_names, make_sight, with_symbols
from spmdrl.nets.torsos import EMBEDDING, embeds, encoder_config, encoder_of
from spmdrl.types import EnvSpec, ObsPart

__all__ = ["describe"]

NAMES = {
    "mlp": "MLP",
    "nature_cnn": "Nature CNN",
    "small_cnn": "small CNN",
    "impala_resnet": "IMPALA ResNet",
}


def describe(config: Config, spec: EnvSpec) -> str:
    """`image 7x7x3 -> small CNN on one-hot symbols; direction -> one-hot 4`, and so on."""
    net, env_id = config.net, config.env.id
    spec = with_symbols(net, spec, env_id)
    sight = make_sight(net, spec, env_id)
    alone = isinstance(spec.obs, ObsPart)
    lines = [
        line
        for name, part in spec.parts.items()
        for line in _part(net if alone else encoder_config(net, spec, part), name, part, sight)
    ]
    return "; ".join([*lines, *(f"{_shown(name)} -> left out" for name in spec.left_out)])


def _part(net: NetConfig, name: str, part: ObsPart, sight: Sight) -> list[str]:
    if part.kind == "mask":
        return [f"{name} -> mask of {part.shape[0]} actions"]
    if part.kind == "history":
        return [f"{name} -> beside the features"]
    if part.columns:
        return _columns(part, sight)
    size = "x".join(map(str, part.shape))
    kind = encoder_of(net, part)
    encoder = NAMES.get(kind, kind)
    what = f"{size} numbers" if part.kind == "vector" else f"{name or part.kind} {size}"
    form = _form(part) if kind in NAMES else ""
    return [f"{what} -> {encoder}{form}{_whose(name or 'obs', sight)}"]


def _form(part: ObsPart) -> str:
    if part.kind != "ids":
        return ""
    if not part.is_grid and embeds(part.values, part.shape):
        return f" on embeddings of {EMBEDDING}"
    if max(part.values) == 2:
        return " on 0/1 planes" if part.is_grid else " on 0/1"
    return " on one-hot symbols" if part.is_grid else " on one-hot"


def _columns(part: ObsPart, sight: Sight) -> list[str]:
    """Neighbours of which the same was made share an entry."""
    rows = [(_shown(c.name), f"{c.how}{_whose(c.name, sight)}") for c in part.columns]
    groups = itertools.groupby(rows, key=lambda row: row[1])
    return [f"{', '.join(name for name, _ in group)} -> {how}" for how, group in groups]


def _whose(name: str, sight: Sight) -> str:
    key = _shown(name)
    policy, value = (key in leaf_names(view.spec) for view in (sight.policy, sight.value))
    if policy and value:
        return ""
    return " (policy only)" if policy else " (value only)" if value else " (seen by neither)"


def _shown(name: str) -> str:
    return name.replace("/", ".")

"""Trees of arrays by name: how they are saved, sent and found again."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["CheckpointError", "from_named", "leaves_by_name", "to_named"]


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or does not fit this run."""


def to_named(tree: Any) -> dict[str, np.ndarray]:
    """A pytree as {"params/policy_head/kernel": array}."""
    return {name: np.asarray(leaf) for name, leaf in leaves_by_name(tree).items()}


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The same with the leaves as they are, in the order of the tree."""
    import jax  # only here: looking for a checkpoint must not take the time of loading jax

    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def from_named(template: Any, named: dict[str, np.ndarray]) -> Any:
    """The arrays in the template's structure; every name, shape and dtype must fit."""
    import jax

    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [_name(path) for path, _ in leaves]
    if set(names) != set(named):
        odd = sorted(set(names) ^ set(named))
        raise CheckpointError(f"holds other arrays than this run expects: {', '.join(odd[:5])}")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        expected = (tuple(leaf.shape), np.dtype(leaf.dtype))
        found = (named[name].shape, named[name].dtype)
        if expected != found:
            raise CheckpointError(f"{name} is {found}, this run expects {expected}")
    return jax.tree_util.tree_unflatten(structure, [named[name] for name in names])


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)

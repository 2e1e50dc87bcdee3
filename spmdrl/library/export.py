"""A policy as one program for serving: StableHLO by `jax.export`, without this package.

What serves it needs jax alone, or whatever else reads StableHLO. The program is
`(obs, carry, first) -> (action, carry)` for any number of rows, with the parameters inside.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from spmdrl.config import ConfigError
from spmdrl.envs.actions import to_env_action
from spmdrl.library.trained import TrainedPolicy

__all__ = ["ABOUT", "PROGRAM", "TEXT", "export"]

PROGRAM, TEXT, ABOUT = "policy.jax_export", "policy.mlir", "policy.json"


def export(
    policy: TrainedPolicy, folder: str | Path, platforms: tuple[str, ...] = ("cpu",)
) -> Path:
    """Write the program that takes the most likely action; the folder, which must be new or empty.

    `platforms` are those that it can run on: cpu, cuda, rocm, tpu.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError("export needs flatbuffers: pip install 'spmdrl[export]'")
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} is not an empty folder; choose another")
    shapes = argument_shapes(policy)
    exported = jax_export.export(jax.jit(program(policy)), platforms=platforms)(*shapes)
    place.mkdir(parents=True, exist_ok=True)
    (place / PROGRAM).write_bytes(exported.serialize())
    (place / TEXT).write_text(exported.mlir_module())
    (place / ABOUT).write_text(json.dumps(about(policy, shapes, platforms), indent=1) + "\n")
    return place


def program(policy: TrainedPolicy) -> Any:
    """`(obs, carry, first) -> (action, carry)`, as `policy(obs, deterministic=True)` acts."""
    network, variables = policy.network, policy.variables

    def act(obs: Any, carry: Any, first: Any) -> tuple[Any, Any]:
        carry, dist_params, _ = network.apply(variables, carry, obs, first)
        action = network.dist.mode(dist_params)
        return to_env_action(policy.spec.action, action, jnp), carry

    return act


def argument_shapes(policy: TrainedPolicy) -> tuple[Any, Any, Any]:
    """Of any number of rows."""
    (rows,) = jax_export.symbolic_shape("rows")

    def many(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    parts = {name: many(part.shape, part.dtype) for name, part in policy.spec.parts.items()}
    carry = jax.tree.map(lambda x: many(x.shape[1:], x.dtype), policy.network.initial_carry(1))
    return parts.get("", parts), carry, many((), jnp.bool_)


def about(
    policy: TrainedPolicy, shapes: tuple[Any, Any, Any], platforms: tuple[str, ...]
) -> dict[str, Any]:
    """How to call it; the carry is zeros where an episode begins."""
    shown = [f"{x.dtype}{list(map(str, x.shape))}" for x in jax.tree.leaves(shapes)]
    return {
        "env": policy.config.env.id,
        "checkpoint": policy.checkpoint.name,
        "platforms": list(platforms),
        "arguments": shown,
        "call": "action, carry = jax.export.deserialize(file).call(obs, carry, first)",
        "jax": jax.__version__,
    }

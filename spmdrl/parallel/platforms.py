"""What suits each kind of device: the only place that knows one kind from another.

A CPU computes convolutions as matrix products, in chunks of rows whose activations fit its cache,
and can have the simulator inside its programs. Accelerators take the whole minibatch at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Platform", "likes"]


@dataclass(frozen=True)
class Platform:
    conv: Literal["matmul", "xla"]
    image_rows: int | None  # in a chunk of a minibatch; None takes all at once
    vector_rows: int | None
    runs_simulators: bool  # C++ environments can be called from a compiled program


CPU = Platform(conv="matmul", image_rows=32, vector_rows=1024, runs_simulators=True)
ACCELERATOR = Platform(conv="xla", image_rows=None, vector_rows=None, runs_simulators=False)


def likes(platform: str) -> Platform:
    """By jax's name of the platform: cpu, gpu (not run here yet), tpu (untested)."""
    return CPU if platform == "cpu" else ACCELERATOR

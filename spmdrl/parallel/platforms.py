"""What suits each kind of device: the only place that knows one kind from another.

A CPU computes convolutions as matrix products, in chunks of rows whose activations fit its cache,
and can have the simulator inside its programs. Accelerators take the whole minibatch at once: every
kernel that is launched costs microseconds, however little it does.
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
    value_rows: int | None  # valued together after a rollout
    cheap_loops: bool  # inside a program
    flat_state: bool  # parameters and reports go through the minibatches as one array each
    runs_simulators: bool  # C++ environments can be called from a compiled program
    one_transfer: bool  # what goes to the device together should be one array
    acts_beside_learning: bool  # it can collect a rollout while an update runs on it
    takes_all_devices: bool  # of this process, where the config does not say how many
    mpi_reads_memory: bool  # without a bridge that mpi4jax may or may not have been built with


CPU = Platform(
    conv="matmul",
    image_rows=32,
    vector_rows=1024,
    value_rows=4096,
    cheap_loops=True,
    flat_state=False,
    runs_simulators=True,
    one_transfer=False,
    acts_beside_learning=True,
    takes_all_devices=False,
    mpi_reads_memory=True,
)
# Compiled for and counted (benchmarks.gpu_programs), not yet run.
GPU = Platform(
    conv="xla",
    image_rows=None,
    vector_rows=None,
    value_rows=None,
    cheap_loops=False,
    flat_state=True,
    runs_simulators=False,
    one_transfer=True,
    acts_beside_learning=False,
    takes_all_devices=True,
    mpi_reads_memory=False,
)
TPU = GPU  # untested
PLATFORMS = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU}


def likes(platform: str) -> Platform:
    """By jax's name of the platform; one that is not known here is taken for an accelerator."""
    return PLATFORMS.get(platform, GPU)

"""What every backend offers: a batch of environments that reset themselves on the next step.

The step after `terminated | truncated` ignores its action and returns the first observation of the
next episode with reward 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from spmdrl.types import EnvSpec, Obs, TimeStep

__all__ = ["EnvBatch", "XlaStep", "env_seeds"]

SEED_LIMIT = 2**31


class XlaStep(NamedTuple):
    """Stepping as part of a compiled program: `step(handle, action) -> (handle, TimeStep)`."""

    handle: Any
    step: Callable[[Any, Any], tuple[Any, TimeStep]]
    pure: bool = False  # the handle is all there is: arrays, environments first


@runtime_checkable
class EnvBatch(Protocol):
    """B environments; `send` starts a step and `recv` waits for it."""

    spec: EnvSpec
    num_envs: int
    needs_x64: bool  # its compiled form takes float64

    def reset(self) -> Obs: ...
    def send(self, action: np.ndarray) -> None: ...
    def recv(self) -> TimeStep: ...
    def xla(self) -> XlaStep | None:
        """The compiled form, or None where the backend has none."""
        ...

    def render(self) -> np.ndarray:
        """An RGB frame of the first environment."""
        ...

    def spaces(self) -> tuple[Any, Any]:
        """Observation and action as one environment declares them."""
        ...

    def hint(self) -> str:
        """After some steps: what would make them faster, or nothing."""
        ...

    def close(self) -> None: ...


def env_seeds(run_seed: int, env_ids: Iterable[int], generation: int = 0) -> list[int]:
    """One seed per global environment id, distinct over all ids of a run.

    An odd factor is invertible modulo a power of two, so no two ids meet; the hash keeps the
    environments of neighbouring run seeds apart.
    """
    digest = hashlib.sha256(f"{run_seed}/{generation}".encode()).digest()
    base = int.from_bytes(digest[:8], "little")
    return [int((base + int(g) * 0x9E3779B1) % SEED_LIMIT) for g in env_ids]

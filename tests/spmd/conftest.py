"""These tests run plain, on 4 host devices, and under `mpirun -np 2`: see tests/test_spmd.py."""

from __future__ import annotations

import jax
import pytest

from spmdrl.launch import detect
from spmdrl.world import World, connect


@pytest.fixture(scope="session")
def world() -> World:
    return connect(detect())


def layouts() -> list[tuple[int, int]]:
    """`(ranks, devices)` that this process can be part of, other than one rank on one device."""
    size, available = detect().size, len(jax.local_devices())
    found = [(size, d) for d in (1, 2, 4) if d <= available]
    return [layout for layout in found if layout != (1, 1)] or [(1, 1)]

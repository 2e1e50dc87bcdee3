"""These tests run plain, on 4 host devices, and under `mpirun -np 2`: see tests/test_spmd.py."""

from __future__ import annotations

import jax
import pytest

from spmdrl.parallel.topology import detect
from spmdrl.parallel.world import World, connect


@pytest.fixture(scope="session")
def world() -> World:
    return connect(detect())


def layouts() -> list[tuple[int, int]]:
    """`(ranks, devices)` to compare with (1, 1) in this process; one device alone has none."""
    size, available = detect().size, len(jax.local_devices())
    if size > 1:
        return [(size, available)]  # fewer devices are another mpirun of tests/test_spmd.py
    return [(1, d) for d in (2, 4) if d <= available]

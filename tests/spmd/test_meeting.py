"""What the ranks tell each other per update, on the host: a record, and the ended episodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmdrl.parallel.topology import detect
from spmdrl.parallel.world import MpiWorld
from tests.spmd.runs import CARTPOLE, rows, run, updates

pytestmark = pytest.mark.skipif(detect().size == 1, reason="is about several ranks")


class CountingWorld(MpiWorld):
    """Counts the collective calls before each meeting."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.per_update = 0, list[int]()

    def table(self, row: np.ndarray) -> np.ndarray:
        self.calls += 1
        self.per_update.append(self.calls)
        self.calls = 0
        return super().table(row)

    def gather_rows(self, array: np.ndarray, lengths: Any = None) -> np.ndarray | None:
        self.calls += 1 if lengths is not None else 2
        return super().gather_rows(array, lengths)

    def broadcast_json(self, value: Any) -> Any:
        self.calls += 2
        return super().broadcast_json(value)

    def gather_json(self, value: Any) -> list[Any]:
        self.calls += 2
        return super().gather_json(value)

    def barrier(self) -> None:
        self.calls += 1
        super().barrier()


def test_two_calls_per_update_are_enough(tmp_path_factory):
    world = CountingWorld()
    folder = Path(world.broadcast_json(str(tmp_path_factory.mktemp("meeting"))))
    config = updates(CARTPOLE, 6)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=0))
    run(config, 1, world, folder)
    assert len(world.per_update) == 6
    assert max(world.per_update[2:]) <= 2  # the first updates time an allreduce, too
    if world.is_root:
        assert rows(folder)[-1]["episode/count"] > 0

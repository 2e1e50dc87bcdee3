"""What the ranks tell each other once per update."""

from __future__ import annotations

import numpy as np

from spmdrl.acting.source import Episodes
from spmdrl.parallel.comm_meter import PHASES
from spmdrl.parallel.world import World
from spmdrl.runtime.clock import Phases

__all__ = ["Meeting"]


class Meeting:
    """What the ranks tell each other once per update, in one message: whether to stop, how many
    episodes ended, and how long they take. It is also where the fast wait for the slow."""

    def __init__(self, world: World):
        self._world = world
        self._table = np.zeros((world.size, 2 + len(PHASES)))
        self._read = np.zeros((world.size, len(PHASES)))

    def hold(self, stop: bool, episodes: Episodes, phases: Phases) -> bool:
        """Whether any rank was asked to stop; the same answer everywhere."""
        seconds = [phases.totals[name] for name in PHASES]
        self._table = self._world.table(np.array([stop, len(episodes.step), *seconds]))
        return bool(self._table[:, 0].any())

    def gather_episodes(self, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of all ranks' episodes on rank 0, in order of time and id."""
        if self._world.size == 1:
            return episodes.returns, episodes.lengths
        counts = [int(n) for n in self._table[:, 1]]
        columns = (episodes.step, episodes.env_id, episodes.returns, episodes.lengths)
        mine = np.stack([np.asarray(c, np.float64) for c in columns], axis=1)
        rows = self._world.gather_rows(mine, counts) if sum(counts) else None
        if rows is None:
            rows = np.empty((0, 4))
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        return rows[:, 2], rows[:, 3]

    def seconds(self) -> np.ndarray:
        """`[ranks, PHASES]` since the last reading, as of the last meeting."""
        now = self._table[:, 2:]
        spent, self._read = now - self._read, now
        return spent

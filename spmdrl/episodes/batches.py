"""Steps of a recording in shuffled batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from spmdrl.config import ConfigError
from spmdrl.episodes.format import FIELDS, obs_in
from spmdrl.episodes.recording import ATTEMPTS, Recording

__all__ = ["Batches"]


class Batches:
    """Steps of a recording as numpy batches `{obs, action, reward, terminated, truncated}`.

    Every epoch takes each step once, in an order that follows from the seed and the epoch; the last
    batch may be shorter. `state()` is a place in that order as JSON, and a reader made with it
    resumes exactly there. Of an episode only the observations stay on disk.

    A recording that grows is read again after every epoch: the next one has its newest episodes.
    A state of it from before that begins a new epoch.
    """

    def __init__(
        self,
        recording: Recording,
        batch_size: int,
        seed: int = 0,
        epochs: int | None = None,
        state: dict[str, Any] | None = None,
    ):
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, but must be at least 1")
        self._batch_size, self._seed, self._epochs = batch_size, seed, epochs
        self._recording = recording
        self._open()
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()
        if state is not None:
            self._go_to(state)

    def _open(self) -> None:
        """The episodes that the recording has now."""
        files = self._files()
        self._data = self._recording.fingerprint
        kept = [np.flatnonzero(arrays["valid"]) for arrays in files]
        self._obs = [obs_in(arrays) for arrays in files]
        self._file = np.repeat(np.arange(len(files)), [len(rows) for rows in kept])
        self._row = np.concatenate(kept)
        self._small = {
            name: np.concatenate([a[name][rows] for a, rows in zip(files, kept, strict=True)])
            for name in FIELDS
            if name != "obs"
        }

    def _files(self) -> list[dict[str, np.ndarray]]:
        """Of one that grows, an episode may go between the reading of the index and that of it."""
        recording = self._recording
        for _ in range(ATTEMPTS if recording.grows else 0):
            try:
                return [recording.arrays(episode) for episode in recording.episodes]
            except ConfigError:
                recording.refresh()
        return [recording.arrays(episode) for episode in recording.episodes]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._row) // self._batch_size)

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self._epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += len(chosen)
        if self._position == len(self._order):
            batch = self._batch(chosen)
            self._epoch, self._position = self._epoch + 1, 0
            if self._recording.grows:
                self._recording.refresh()
                self._open()
            self._order = self._shuffled()
            return batch
        return self._batch(chosen)

    def _batch(self, chosen: np.ndarray) -> dict[str, Any]:
        return {"obs": self._gather_obs(chosen)} | {k: v[chosen] for k, v in self._small.items()}

    def state(self) -> dict[str, Any]:
        """Where the next batch starts, as JSON."""
        return self._identity() | {"epoch": self._epoch, "position": self._position}

    def _identity(self) -> dict[str, Any]:
        return {"data": self._data, "seed": self._seed, "batch_size": self._batch_size}

    def _go_to(self, state: dict[str, Any]) -> None:
        for name, mine in self._identity().items():
            if name == "data" and state.get(name) != mine and self._recording.grows:
                self._epoch = state["epoch"] + 1
                self._order = self._shuffled()
                return
            if state.get(name) != mine:
                raise ConfigError(
                    f"the saved state is of another reader: {name} {state.get(name)} against {mine}"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._row))

    def _gather_obs(self, chosen: np.ndarray) -> Any:
        """Rows out of many files, each file visited once."""
        found = {
            name: np.empty((len(chosen), *first.shape[1:]), first.dtype)
            for name, first in self._obs[0].items()
        }
        files, rows = self._file[chosen], self._row[chosen]
        by_file = np.argsort(files, kind="stable")
        starts = np.flatnonzero(np.diff(files[by_file], prepend=-1))
        for places in np.split(by_file, starts[1:]):
            for name, array in self._obs[files[places[0]]].items():
                found[name][places] = array[rows[places]]
        return found.get("", found)

"""A recording in a folder: its index, and its episodes mapped into memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.config import Config, ConfigError, from_json, parse_json
from spmdrl.config.rules import check_fields
from spmdrl.episodes.format import FORMAT, INDEX, Episode, check_arrays, map_arrays
from spmdrl.runtime.files import is_plain_file, read_plain

if TYPE_CHECKING:  # it brings flax; a reader of data needs only numpy
    from spmdrl.types import EnvSpec

__all__ = ["Recording"]

ATTEMPTS = 20  # to read a recording that changes meanwhile
LARGEST_INDEX = 1 << 29  # bytes: two million episodes


class Recording:
    """Recorded episodes in a folder; opening it checks every byte."""

    def __init__(self, folder: str | Path, verify: bool = True):
        self.folder = Path(folder)
        self._verifies, self._verified = verify, set[str]()
        self.index: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the index again: that of a recording which grows has changed.

        An episode of such a one may go between the reading of the index and the check of its file.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return self._read()
            except ConfigError:
                if not self.grows:
                    raise
        return self._read()

    def _read(self) -> None:
        self.index = self._read_index()
        try:
            self.episodes = [Episode.from_json(row) for row in self.index["episodes"]]
            self.config: Config = from_json(json.dumps(self.index["config"]))
            check_fields(self.config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.source} is damaged: {error!r}") from error
        if not self.episodes:
            raise ConfigError(f"{self.folder} holds no episode; record some with spmdrl.record")
        for episode in self.episodes if self._verifies else []:
            if episode.sha256 not in self._verified:
                self._verify(episode)
                self._verified.add(episode.sha256)

    @property
    def grows(self) -> bool:
        """Whether somebody still plays: episodes come, and the oldest go."""
        return bool(self.index.get("growing"))

    @property
    def source(self) -> str:
        """Where the index is, for messages."""
        return str(self.folder / INDEX)

    @property
    def num_steps(self) -> int:
        """Steps of all episodes together."""
        return sum(episode.length for episode in self.episodes)

    @property
    def fingerprint(self) -> str:
        """The same for recordings of the same episodes, whoever of the workers wrote them."""
        digests = [[episode.id, episode.sha256] for episode in self.episodes]
        return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()

    def spec(self) -> EnvSpec:
        """Shapes and choices of the recorded environment, as the networks need them."""
        from spmdrl.types import ActionSpace, Column, EnvSpec, ObsPart

        action = self.index["spaces"]["action"]
        shape = tuple(action["shape"])

        def bounds(values: list[float | None] | None, missing: float) -> np.ndarray | None:
            if values is None:
                return None
            numbers = [missing if x is None else x for x in values]
            return np.array(numbers, action["dtype"]).reshape(shape)

        space = ActionSpace(
            action["kind"],
            shape,
            np.dtype(action["dtype"]),
            nvec=tuple(action["nvec"]),
            start=np.asarray(action["start"]),
            low=bounds(action["low"], -np.inf),
            high=bounds(action["high"], np.inf),
            joint=tuple(action.get("joint", ())),  # not in older recordings
            env_shape=None if action.get("env_shape") is None else tuple(action["env_shape"]),
        )

        def part(saved: dict[str, Any]) -> ObsPart:
            shape, dtype = tuple(saved["shape"]), np.dtype(saved["dtype"])
            columns = tuple(Column(*column) for column in saved.get("columns", []))
            values = tuple(saved.get("values", []))  # older recordings have only images and vectors
            return ObsPart(shape, dtype, saved.get("kind", ""), values, columns)

        obs = self.index["spaces"]["obs"]
        parts = {name: part(saved) for name, saved in obs.get("parts", {}).items()}
        left_out = tuple(self.index["spaces"].get("left_out", ()))
        return EnvSpec(parts or part(obs), space, left_out)

    def arrays(self, episode: Episode) -> dict[str, np.ndarray]:
        """The arrays of an episode, mapped: what is not touched is not read."""
        file = self._path(episode)
        return check_arrays(file, map_arrays(file))

    def _read_index(self) -> dict[str, Any]:
        return _read_index(self.folder)

    def _path(self, episode: Episode) -> Path:
        return self.folder / Path(episode.file).name  # an index cannot point elsewhere

    def _verify(self, episode: Episode) -> None:
        file = self._path(episode)
        if not is_plain_file(file):
            raise ConfigError(f"{file} is missing; record again, or remove it from {INDEX}")
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != episode.sha256:
            raise ConfigError(f"{file} does not match its SHA-256 in {INDEX}; record again")


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.is_file():
        raise ConfigError(
            f"{folder} is not a finished recording: it has no {INDEX}; "
            "make one with python -m spmdrl.record RUN_DIR --out DIR"
        )
    try:
        index = parse_json(read_plain(file, LARGEST_INDEX))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ConfigError(f"{file} is not an index of recorded episodes ({FORMAT})")
    return index

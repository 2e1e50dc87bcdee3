"""Recorded episodes on disk: what a recording is, and reading it in shuffled batches.

A recording is a folder with one safetensors file per episode and an `index.json`, written last.
Observations are mapped into memory, so a recording may be larger than that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as save_bytes

from spmdrl.config import Config, ConfigError, from_json, parse_json
from spmdrl.config.rules import check_fields
from spmdrl.runtime.checkpoint import write_file
from spmdrl.runtime.files import is_plain_file, open_plain, read_plain

if TYPE_CHECKING:  # it brings flax; a reader of data needs only numpy
    from spmdrl.types import EnvSpec, ObsPart

__all__ = [
    "Batches", "Episode", "Recording", "describe_spec", "named_obs", "obs_in", "write_episode",
    "write_index",
]  # fmt: skip

FORMAT = "spmdrl-episodes-1"
INDEX = "index.json"
LARGEST_INDEX = 1 << 29  # bytes: two million episodes
LARGEST_HEADER = 1 << 20
FIELDS = ("obs", "action", "reward", "terminated", "truncated")  # of every step
ARRAYS = {*FIELDS, "valid", "last_obs"}  # of every file
DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4",
    "I64": "<i8", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class Episode:
    """A line of the index."""

    id: int
    file: str
    length: int  # steps whose action counted
    episode_return: float  # of raw rewards
    seed: int  # of the environment, from whose first reset the episode starts
    sha256: str

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        return row | {"return": row.pop("episode_return")}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Episode:
        rest = {name: value for name, value in row.items() if name != "return"}
        return Episode(**rest, episode_return=row["return"])


# ---------------------------------------------------------------------------------------------
# Writing


def write_episode(
    folder: Path, worker: int, number: int, seed: int, arrays: dict[str, np.ndarray]
) -> Episode:
    """One episode as a file that is whole or not there."""
    assert {name.partition("/")[0] for name in arrays} == ARRAYS
    file = folder / f"worker-{worker:02d}-episode-{number:06d}.safetensors"
    contiguous = {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in arrays.items()}
    valid = arrays["valid"]
    total = float(np.sum(arrays["reward"][valid], dtype=np.float64))
    digest = write_file(file, save_bytes(contiguous))
    return Episode(number, file.name, int(valid.sum()), total, seed, digest)


def write_index(folder: Path, about: dict[str, Any], episodes: list[Episode]) -> None:
    """The last file of a recording: a folder without it is not finished."""
    rows = [episode.to_json() for episode in sorted(episodes, key=lambda e: e.id)]
    index = {"format": FORMAT, **about, "episodes": rows}
    write_file(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())


def describe_spec(spec: EnvSpec) -> dict[str, Any]:
    """The spaces as JSON; a bound that is not finite is null."""

    def bounds(value: np.ndarray | None) -> list[float | None] | None:
        if value is None:
            return None
        return [float(x) if math.isfinite(x) else None for x in np.ravel(value)]

    def described(part: ObsPart) -> dict[str, Any]:
        plain = {"shape": list(part.shape), "dtype": str(part.dtype)}
        columns = [list(column) for column in part.columns]
        return plain | {"kind": part.kind, "values": list(part.values), "columns": columns}

    action, parts = spec.action, {name: described(part) for name, part in spec.parts.items()}
    return {
        "obs": parts.get("", {"parts": parts}),
        "action": {
            "kind": action.kind,
            "shape": list(action.shape),
            "dtype": str(action.dtype),
            "nvec": list(action.nvec),
            "start": np.asarray(action.start).tolist(),
            "low": bounds(action.low),
            "high": bounds(action.high),
            "joint": list(action.joint),
            "env_shape": None if action.env_shape is None else list(action.env_shape),
        },
        "left_out": list(spec.left_out),
    }


# ---------------------------------------------------------------------------------------------
# Reading


class Recording:
    """A finished recording; opening it checks every byte."""

    def __init__(self, folder: str | Path, verify: bool = True):
        self.folder = Path(folder)
        self.index = _read_index(self.folder)
        try:
            self.episodes = [Episode.from_json(row) for row in self.index["episodes"]]
            self.config: Config = from_json(json.dumps(self.index["config"]))
            check_fields(self.config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.folder / INDEX} is damaged: {error!r}") from error
        if not self.episodes:
            raise ConfigError(f"{self.folder} holds no episode; record some with spmdrl.record")
        for episode in self.episodes if verify else []:
            self._verify(episode)

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
        arrays = map_arrays(file)
        steps = {len(x) for name, x in arrays.items() if x.ndim and not name.startswith("last_obs")}
        known = {name.partition("/")[0] for name in arrays} == ARRAYS
        if not known or len(steps) != 1 or arrays["valid"].dtype != bool:
            raise ConfigError(f"{file} does not hold the arrays of one episode; record again")
        return arrays

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


def map_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file without reading them: a length, a JSON header, the data.

    Whatever its header claims, no byte outside the file is touched and none belongs to two arrays.
    """
    try:
        with open_plain(file) as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > LARGEST_HEADER:
                raise ValueError(f"its header would have {size} bytes")
            header = parse_json(stream.read(size))
            data = np.memmap(stream, np.uint8, "r", offset=8 + size)
        header.pop("__metadata__", None)
        _check_places(header, data.size)
        return {name: _array(data, entry) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file} is damaged: {error}; record again") from error


def _check_places(header: dict[str, Any], size: int) -> None:
    """One array after the other, from the first byte to the last, as the format demands."""
    end = 0
    for first, last in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if type(first) is not int or type(last) is not int or first != end or last < first:
            raise ValueError(f"an array lies from {first!r} to {last!r}, after {end}")
        end = last
    if end != size:
        raise ValueError(f"its arrays have {end} bytes of {size}")


def _array(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    shape = entry["shape"]
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"an array has the shape {shape}")
    if math.prod(max(n, 1) for n in shape) > max(data.size, 1):
        raise ValueError(f"an array of shape {shape} is larger than the file")
    first, last = entry["data_offsets"]
    return data[first:last].view(DTYPES[entry["dtype"]]).reshape(shape)


def obs_in(arrays: dict[str, np.ndarray], name: str = "obs") -> dict[str, np.ndarray]:
    """The arrays of the observation by their own names; a single one has none."""
    if name in arrays:
        return {"": arrays[name]}
    prefix = f"{name}/"
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def named_obs(name: str, obs: Any) -> dict[str, np.ndarray]:
    """As a recording names the arrays of an observation: obs, or obs/image and obs/vector."""
    return {f"{name}/{k}": x for k, x in obs.items()} if isinstance(obs, dict) else {name: obs}


class Batches:
    """Steps of a recording as numpy batches `{obs, action, reward, terminated, truncated}`.

    Every epoch takes each step once, in an order that follows from the seed and the epoch; the last
    batch may be shorter. `state()` is a place in that order as JSON, and a reader made with it
    resumes exactly there. Of an episode only the observations stay on disk.
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
        self._data = recording.fingerprint
        files = [recording.arrays(episode) for episode in recording.episodes]
        kept = [np.flatnonzero(arrays["valid"]) for arrays in files]
        self._obs = [obs_in(arrays) for arrays in files]
        self._file = np.repeat(np.arange(len(files)), [len(rows) for rows in kept])
        self._row = np.concatenate(kept)
        self._small = {
            name: np.concatenate([a[name][rows] for a, rows in zip(files, kept, strict=True)])
            for name in FIELDS
            if name != "obs"
        }
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()
        if state is not None:
            self._go_to(state)

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
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        return {"obs": self._gather_obs(chosen)} | {k: v[chosen] for k, v in self._small.items()}

    def state(self) -> dict[str, Any]:
        """Where the next batch starts, as JSON."""
        return self._identity() | {"epoch": self._epoch, "position": self._position}

    def _identity(self) -> dict[str, Any]:
        return {"data": self._data, "seed": self._seed, "batch_size": self._batch_size}

    def _go_to(self, state: dict[str, Any]) -> None:
        for name, mine in self._identity().items():
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

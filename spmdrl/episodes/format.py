"""One recorded episode as safetensors, and the lines that a recording says about it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as save_bytes

from spmdrl.config import ConfigError, parse_json
from spmdrl.runtime.checkpoint import write_file
from spmdrl.runtime.files import open_plain

if TYPE_CHECKING:  # it brings flax; a reader of data needs only numpy
    from spmdrl.types import EnvSpec, ObsPart

__all__ = [
    "ARRAYS", "FIELDS", "FORMAT", "INDEX", "Episode", "check_arrays", "describe_spec", "encode",
    "map_arrays", "named_obs", "obs_in", "write_episode", "write_index",
]  # fmt: skip

FORMAT = "spmdrl-episodes-1"
INDEX = "index.json"
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
    update: int | None = None  # of the checkpoint that played, where they differ

    def to_json(self) -> dict[str, Any]:
        row = {name: value for name, value in asdict(self).items() if value is not None}
        return row | {"return": row.pop("episode_return")}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Episode:
        rest = {name: value for name, value in row.items() if name != "return"}
        return Episode(**rest, episode_return=row["return"])


# ---------------------------------------------------------------------------------------------
# Writing


def encode(
    worker: int, number: int, seed: int, arrays: dict[str, np.ndarray], update: int | None = None
) -> tuple[Episode, bytes]:
    """What the index says about an episode, and its file."""
    assert {name.partition("/")[0] for name in arrays} == ARRAYS
    file = f"worker-{worker:02d}-episode-{number:06d}.safetensors"
    contiguous = {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in arrays.items()}
    valid, data = arrays["valid"], save_bytes(contiguous)
    total = float(np.sum(arrays["reward"][valid], dtype=np.float64))
    digest = hashlib.sha256(data).hexdigest()
    return Episode(number, file, int(valid.sum()), total, seed, digest, update), data


def write_episode(
    folder: Path, worker: int, number: int, seed: int, arrays: dict[str, np.ndarray]
) -> Episode:
    """One episode as a file that is whole or not there."""
    episode, data = encode(worker, number, seed, arrays)
    write_file(folder / episode.file, data)
    return episode


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


def check_arrays(name: object, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of one episode; ConfigError if they are none. `name` is where they come from."""
    steps = {len(x) for key, x in arrays.items() if x.ndim and not key.startswith("last_obs")}
    known = {key.partition("/")[0] for key in arrays} == ARRAYS
    if not known or len(steps) != 1 or arrays["valid"].dtype != bool:
        raise ConfigError(f"{name} does not hold the arrays of one episode; record again")
    return arrays

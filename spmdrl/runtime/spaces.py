"""What a run's environments show and accept, kept in its directory.

With it a trained policy can act where the environments are not installed. The classes of
`spmdrl.types` are written field by field, so a new field needs nothing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.config import ConfigError, parse_json
from spmdrl.runtime.files import read_plain, write_json

if TYPE_CHECKING:
    from spmdrl.types import EnvSpec

__all__ = ["SPACES_FILE", "read_spaces", "write_spaces"]

SPACES_FILE = "spaces.json"
CLASS = "class"  # beside the fields of an object


def write_spaces(run_dir: Path, spec: EnvSpec) -> None:
    """A disk that refuses it must not end a run: an environment can say the same."""
    with contextlib.suppress(OSError):
        write_json(run_dir / SPACES_FILE, to_plain(spec))


def read_spaces(run_dir: Path) -> EnvSpec | None:
    """None if the run is older than the file."""
    file = run_dir / SPACES_FILE
    if not file.is_file():
        return None
    from spmdrl.types import EnvSpec  # flax, from here on

    try:
        spec = from_plain(parse_json(read_plain(file)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file} is damaged or not of this version: {error}") from error
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"{file} is damaged: it holds no spaces")
    return spec


def to_plain(value: Any) -> Any:
    """As JSON has it."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {CLASS: type(value).__name__, **fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: to_plain(item) for name, item in zip(value._fields, value, strict=True)}
        return {CLASS: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {CLASS: "dict", "items": {name: to_plain(item) for name, item in value.items()}}
    if isinstance(value, np.dtype):
        return {CLASS: "dtype", "name": value.str}
    if isinstance(value, (np.ndarray, np.generic)):
        # As text: JSON has no infinity.
        numbers = [repr(x) for x in np.ravel(value).tolist()]
        return {CLASS: "array", "dtype": value.dtype.str, "shape": value.shape, "items": numbers}
    return [to_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    name, rest = value[CLASS], {k: v for k, v in value.items() if k != CLASS}
    if name == "dict":
        return {k: from_plain(item) for k, item in rest["items"].items()}
    if name == "dtype":
        return np.dtype(rest["name"])
    if name == "array":
        dtype = np.dtype(rest["dtype"])
        numbers = [_number(x, dtype) for x in rest["items"]]
        return np.array(numbers, dtype).reshape(rest["shape"])
    return _class(name)(**{k: from_plain(v) for k, v in rest.items()})


def _number(text: str, dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return text == "True"
    return int(text) if dtype.kind in "iu" else float(text)


def _class(name: str) -> Any:
    """Only what is defined beside EnvSpec: a file cannot name anything else."""
    from spmdrl import types

    found = getattr(types, name, None)
    if not isinstance(found, type) or found.__module__ != types.__name__:
        raise ValueError(f"unknown class {name!r}")
    return found

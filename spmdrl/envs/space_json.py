"""Spaces as JSON, so that a worker process can say what its environments show and accept."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["OtherSpace", "space_from_json", "space_to_json"]


class OtherSpace(gym.Space[Any]):
    """A space of a kind that is not known here: enough to name it in a refusal."""

    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OtherSpace) and self._text == other._text

    __hash__ = None  # type: ignore[assignment]  # as of all spaces


def space_to_json(space: Any) -> dict[str, Any]:
    writer = _WRITERS.get(type(space))
    if writer is None:  # subclasses behave as what they are made of
        writer = next((w for kind, w in _WRITERS.items() if isinstance(space, kind)), _write_other)
    return writer(space)


def space_from_json(said: dict[str, Any]) -> Any:
    return _READERS[said["kind"]](said)


def _compact(array: np.ndarray) -> Any:
    """Bounds of images are one number a hundred thousand times."""
    flat = array.ravel()
    same = flat.size > 0 and bool((flat == flat[0]).all())
    return flat[0].item() if same else array.tolist()


def _expanded(said: Any, shape: list[int], dtype: str) -> np.ndarray:
    return np.broadcast_to(np.asarray(said, dtype), shape).copy()


def _write_box(space: Any) -> dict[str, Any]:
    return {
        "kind": "Box",
        "shape": list(space.shape),
        "dtype": space.dtype.name,
        "low": _compact(space.low),
        "high": _compact(space.high),
    }


def _read_box(said: dict[str, Any]) -> Any:
    low, high = (_expanded(said[end], said["shape"], said["dtype"]) for end in ("low", "high"))
    return gym.spaces.Box(low, high, tuple(said["shape"]), np.dtype(said["dtype"]).type)


def _write_discrete(space: Any) -> dict[str, Any]:
    return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}


def _read_discrete(said: dict[str, Any]) -> Any:
    return gym.spaces.Discrete(said["n"], start=said["start"])


def _write_multi_discrete(space: Any) -> dict[str, Any]:
    start = getattr(space, "start", np.zeros_like(space.nvec))
    return {
        "kind": "MultiDiscrete",
        "nvec": space.nvec.tolist(),
        "start": start.tolist(),
        "dtype": space.dtype.name,
    }


def _read_multi_discrete(said: dict[str, Any]) -> Any:
    kind = np.dtype(said["dtype"]).type
    return gym.spaces.MultiDiscrete(said["nvec"], dtype=kind, start=said["start"])


def _write_multi_binary(space: Any) -> dict[str, Any]:
    return {"kind": "MultiBinary", "shape": list(space.shape)}


def _read_multi_binary(said: dict[str, Any]) -> Any:
    shape = said["shape"]
    return gym.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)


def _write_text(space: Any) -> dict[str, Any]:
    return {
        "kind": "Text",
        "max": space.max_length,
        "min": space.min_length,
        "charset": "".join(space.character_list),
    }


def _read_text(said: dict[str, Any]) -> Any:
    return gym.spaces.Text(said["max"], min_length=said["min"], charset=said["charset"])


def _write_dict(space: Any) -> dict[str, Any]:
    return {"kind": "Dict", "parts": {str(k): space_to_json(space[k]) for k in space.spaces}}


def _read_dict(said: dict[str, Any]) -> Any:
    return gym.spaces.Dict({k: space_from_json(part) for k, part in said["parts"].items()})


def _write_tuple(space: Any) -> dict[str, Any]:
    return {"kind": "Tuple", "parts": [space_to_json(part) for part in space.spaces]}


def _read_tuple(said: dict[str, Any]) -> Any:
    return gym.spaces.Tuple([space_from_json(part) for part in said["parts"]])


def _write_other(space: Any) -> dict[str, Any]:
    return {"kind": "other", "text": str(space)}


def _read_other(said: dict[str, Any]) -> Any:
    return OtherSpace(said["text"])


_WRITERS = {
    gym.spaces.Box: _write_box,
    gym.spaces.Discrete: _write_discrete,
    gym.spaces.MultiDiscrete: _write_multi_discrete,
    gym.spaces.MultiBinary: _write_multi_binary,
    gym.spaces.Text: _write_text,
    gym.spaces.Dict: _write_dict,
    gym.spaces.Tuple: _write_tuple,
}
_READERS = {
    "Box": _read_box,
    "Discrete": _read_discrete,
    "MultiDiscrete": _read_multi_discrete,
    "MultiBinary": _read_multi_binary,
    "Text": _read_text,
    "Dict": _read_dict,
    "Tuple": _read_tuple,
    "other": _read_other,
}

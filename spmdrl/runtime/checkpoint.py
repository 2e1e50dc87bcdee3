"""State to disk and back: whole, durable, verified, and readable without this package.

A checkpoint is a folder of safetensors and JSON files with a manifest of their SHA-256. It is
written beside its place, flushed to the disk and renamed, so that a kill at any moment leaves
either all of it or nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import save as save_bytes

from spmdrl.config import parse_json
from spmdrl.runtime.files import (
    fsync,
    is_plain_file,
    make_folder,
    read_json,
    read_plain,
    replace_file,
    set_aside,
    write_flushed,
)
from spmdrl.trees import CheckpointError, from_named, to_named

__all__ = [
    "CheckpointError", "Checkpointer", "Snapshot", "from_named", "read_snapshot", "to_named",
    "write_file", "write_snapshot",
]  # fmt: skip

PREFIX = "update-"
MANIFEST = "manifest.json"
META = "meta.json"
DAMAGED = "damaged-"  # how `set_aside` begins a name
NAME = re.compile(rf"{PREFIX}([0-9]{{8}}|[1-9][0-9]{{8,17}})")


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds: groups of named arrays, and a JSON value."""

    step: int
    arrays: dict[str, dict[str, np.ndarray]]  # file name without ending -> name -> array
    meta: dict[str, Any]


# ---------------------------------------------------------------------------------------------
# One folder


def write_snapshot(place: Path, snapshot: Snapshot) -> None:
    """Write to a temporary folder, flush, rename, flush the parent."""
    temporary = place.with_name(f".tmp-{place.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        digests = {}
        for name, data in _files_of(snapshot):
            write_flushed(temporary / name, data)
            digests[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest = json.dumps(seal(snapshot.step, digests))
        write_flushed(temporary / MANIFEST, manifest.encode())
        fsync(temporary)
        _make_way(place)
        os.rename(temporary, place)
        fsync(place.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_way(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)  # the same update, saved again after a resume
    elif os.path.lexists(place):
        set_aside(place)  # none of ours, and it must not end the run


def _files_of(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    for group, named in snapshot.arrays.items():
        # In C order: safetensors writes the memory as it lies.
        contiguous = {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in named.items()}
        yield f"{group}.safetensors", save_bytes(contiguous)
    yield META, json.dumps(snapshot.meta).encode()


def seal(step: int, files: dict[str, Any]) -> dict[str, Any]:
    """The manifest, with a digest of itself."""
    content = {"step": step, "files": files}
    own = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return content | {"sha256": own}


def read_snapshot(place: Path) -> Snapshot:
    """Verify every byte, then load; raise CheckpointError for any damage."""
    try:
        step, files = _read_manifest(place)
        for name, expected in files.items():
            _verify(place, name, expected)
        meta = parse_json(read_plain(place / META))
        groups = [Path(name).stem for name in files if name.endswith(".safetensors")]
        arrays = {group: load_file(place / f"{group}.safetensors") for group in groups}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers say
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    return Snapshot(step, arrays, meta)


def _read_manifest(place: Path) -> tuple[int, dict[str, Any]]:
    if place.is_symlink() or not is_plain_file(place / MANIFEST):
        raise CheckpointError(f"it is a link, or has no {MANIFEST}")
    manifest = parse_json(read_plain(place / MANIFEST, 1_000_000))
    step, files = manifest["step"], manifest["files"]
    if manifest != seal(step, files):
        raise CheckpointError("the manifest does not match its own digest")
    if type(step) is not int or step < 0:
        raise CheckpointError(f"the manifest is of update {step!r}")
    if place.name.startswith(PREFIX) and place.name != name_of(step):
        raise CheckpointError(f"the manifest is of update {step}, the folder {place.name}")
    return step, files


def name_of(step: int) -> str:
    """Of the folder."""
    return f"{PREFIX}{step:08d}"


def _verify(place: Path, name: str, expected: dict[str, Any]) -> None:
    if Path(name).name != name or name.startswith("."):
        raise CheckpointError(f"the manifest names {name!r}, which is not a file of a checkpoint")
    file = place / name
    if not is_plain_file(file):
        raise CheckpointError(f"{name} is missing")
    if file.stat().st_size != expected["bytes"]:
        raise CheckpointError(
            f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        )
    if _sha256(file) != expected["sha256"]:
        raise CheckpointError(f"{name} does not match its SHA-256")


def write_file(file: Path, data: bytes) -> str:
    """Write one file whole or not at all, flushed to the disk; its SHA-256."""
    replace_file(file, data)
    return hashlib.sha256(data).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------
# A run's checkpoints


class Checkpointer:
    """Keeps the newest few checkpoints of a run, and the best."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep = folder, keep

    def steps(self) -> list[int]:
        """Updates after which a checkpoint exists, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def strays(self) -> list[str]:
        """What resembles a checkpoint by its name, and is none."""
        names = [path.name for path in self.folder.glob(f"{PREFIX}*")]
        return sorted(name for name in names if not NAME.fullmatch(name))

    def path(self, step: int) -> Path:
        return self.folder / name_of(step)

    def save(self, snapshot: Snapshot) -> None:
        make_folder(self.folder)  # not its parents: a vanished run must not come back empty
        write_snapshot(self.path(snapshot.step), snapshot)
        self._prune()

    def restore(
        self, warn: Callable[[str], None], check: Callable[[Snapshot], None] = lambda _: None
    ) -> Snapshot | None:
        """The newest checkpoint that is intact and passes `check`; others are set aside.

        None only where there never was one: if all are damaged, that is an error.
        """
        steps = self.steps()
        for name in self.strays():
            warn(f"{self.folder / name} is no checkpoint by its name, and is left alone")
        for step in reversed(steps):
            try:
                snapshot = read_snapshot(self.path(step))
                check(snapshot)
                return snapshot
            except CheckpointError as error:
                aside = set_aside(self.path(step))
                warn(f"checkpoint of update {step} is damaged ({error}); set aside as {aside}")
        if steps or any(self.folder.glob(f"{DAMAGED}*")):
            raise CheckpointError(
                f"no intact checkpoint is left in {self.folder}; to start over use --restart"
            )
        return None

    def _prune(self) -> None:
        steps = self.steps()
        best = self._best(steps)
        for step in steps[: -self._keep]:
            if step != best:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for stale in self.folder.glob(".tmp-*"):  # of a run that was killed while it saved
            shutil.rmtree(stale, ignore_errors=True)

    def _best(self, steps: list[int]) -> int | None:
        """By evaluation where there was any, else by the return in training."""
        metas = {step: self.meta(step) for step in steps}
        returns = _scores(metas, "eval_return_mean") or _scores(metas, "return_mean")
        return max(returns, key=lambda s: (returns[s], s)) if returns else None

    def best_evaluation(self) -> float | None:
        metas = {step: self.meta(step) for step in self.steps()}
        return max(_scores(metas, "eval_return_mean").values(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself; empty if that cannot be read."""
        return read_json(self.path(step) / META)

    def best_step(self) -> int | None:
        return self._best(self.steps())


def _scores(metas: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    """That of each checkpoint which has one."""
    found = {step: meta.get(name) for step, meta in metas.items()}
    return {
        step: float(value)
        for step, value in found.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }

"""Recordings in one SQLite file, each under the id of the run that was played.

The address is `sqlite:///games.db`, or `sqlite:///games.db#RUN_ID` where it holds several. Many
processes of one machine may write and read it at the same time; network file systems do not keep
their locks well enough for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_bytes

from spmdrl.config import ConfigError, parse_json
from spmdrl.episodes.format import FORMAT, Episode, check_arrays
from spmdrl.episodes.recording import Recording

__all__ = ["DatabaseFeed", "DatabaseRecording", "is_database", "open_recording"]

SCHEME = "sqlite:///"
WAIT_S = 60.0  # for another process's turn to write
TABLES = """
CREATE TABLE IF NOT EXISTS recordings (run_id TEXT PRIMARY KEY, about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (
    run_id TEXT NOT NULL, id INTEGER NOT NULL, about TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (run_id, id));
"""


def open_recording(address: str | Path, verify: bool = True) -> Recording:
    """A recording in a folder or, by an address that begins with sqlite:///, in a database."""
    if is_database(address):
        return DatabaseRecording(str(address), verify)
    return Recording(address, verify)


def is_database(address: str | Path) -> bool:
    return str(address).startswith(SCHEME)


def split_address(address: str) -> tuple[Path, str]:
    """`(file, run id)`; the id may be empty."""
    name, _, run_id = address.removeprefix(SCHEME).partition("#")
    if not name:
        raise ConfigError(f"{address} names no file; write {SCHEME}games.db")
    return Path(name), run_id


@contextlib.contextmanager
def connection(file: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """One transaction; `mode` is ro, or rwc to make what is missing."""
    made = None
    try:
        address = f"file:{quote(str(file))}?mode={mode}"
        made = sqlite3.connect(address, timeout=WAIT_S, uri=True)
        with made:
            yield made
    except sqlite3.Error as error:
        raise ConfigError(f"{file} cannot be used as a recording: {error}") from error
    finally:
        if made is not None:
            made.close()


class DatabaseFeed:
    """Where a recording goes: rows of its run's id."""

    def __init__(self, address: str, run_id: str):
        self.address, self._run_id = address, run_id
        self._file, named = split_address(address)
        if named:
            raise ConfigError(f"{address}: a recording has the id of its run; leave out #{named}")
        self._shown: set[int] = set()

    def check(self) -> None:
        """Raise ConfigError if this run's episodes are there already."""
        if not self._file.parent.is_dir():
            raise ConfigError(f"out {self.address}: there is no folder {self._file.parent}")
        if not self._file.exists():
            return
        with connection(self._file, "ro") as db:
            unfinished = db.execute(
                "SELECT 1 FROM episodes WHERE run_id = ? LIMIT 1", (self._run_id,)
            ).fetchone()
            if self._run_id in _run_ids(db) or unfinished:
                raise ConfigError(
                    f"out {self.address} holds a recording of run {self._run_id} already; choose "
                    "another file with --out"
                )

    def open(self) -> None:
        with connection(self._file, "rwc") as db:
            db.execute("PRAGMA journal_mode=WAL")  # readers do not wait for writers
            db.executescript(TABLES)

    def add(self, episode: Episode, data: bytes) -> None:
        row = (self._run_id, episode.id, json.dumps(episode.to_json()), data)
        with connection(self._file, "rwc") as db:
            db.execute("INSERT INTO episodes VALUES (?, ?, ?, ?)", row)

    def publish(self, about: dict[str, Any], episodes: Iterable[Episode]) -> None:
        """These are what it holds from now on; those of before that are not among them go."""
        kept = {episode.id for episode in episodes}
        index = json.dumps({"format": FORMAT, **about, "shown": sorted(kept)})
        with connection(self._file, "rwc") as db:
            db.execute("INSERT OR REPLACE INTO recordings VALUES (?, ?)", (self._run_id, index))
            gone = [(self._run_id, number) for number in self._shown - kept]
            db.executemany("DELETE FROM episodes WHERE run_id = ? AND id = ?", gone)
        self._shown = kept


class DatabaseRecording(Recording):
    """The same reader; observations are read into memory."""

    def __init__(self, address: str, verify: bool = True):
        self._file, self._run_id = split_address(address)
        if not self._file.is_file():
            raise ConfigError(f"{address}: there is no file {self._file}")
        super().__init__(self._file, verify)

    @property
    def source(self) -> str:
        return f"{self._file}, run {self._run_id}"

    def _read_index(self) -> dict[str, Any]:
        with connection(self._file, "ro") as db:
            self._run_id = self._run_id or _only(self._file, _run_ids(db))
            found = db.execute(
                "SELECT about FROM recordings WHERE run_id = ?", (self._run_id,)
            ).fetchone()
            if found is None:
                ids = ", ".join(_run_ids(db)) or "none"
                raise ConfigError(f"{self._file} has no run {self._run_id}; there are: {ids}")
            rows = db.execute(
                "SELECT about FROM episodes WHERE run_id = ? ORDER BY id", (self._run_id,)
            ).fetchall()
        try:
            index = parse_json(found[0])
            shown = set(index["shown"])
            episodes = [row for row in (parse_json(text) for (text,) in rows) if row["id"] in shown]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.source} is damaged: {error!r}") from error
        return {**index, "episodes": episodes}

    def arrays(self, episode: Episode) -> dict[str, np.ndarray]:
        try:
            return check_arrays(self.source, load_bytes(self._data(episode)))
        except SafetensorError as error:
            raise ConfigError(f"episode {episode.id} of {self.source} is damaged") from error

    def _verify(self, episode: Episode) -> None:
        if hashlib.sha256(self._data(episode)).hexdigest() != episode.sha256:
            raise ConfigError(f"episode {episode.id} of {self.source} does not match its SHA-256")

    def _data(self, episode: Episode) -> bytes:
        with connection(self._file, "ro") as db:
            found = db.execute(
                "SELECT data FROM episodes WHERE run_id = ? AND id = ?", (self._run_id, episode.id)
            ).fetchone()
        if found is None:
            raise ConfigError(f"episode {episode.id} of {self.source} is missing")
        return bytes(found[0])


def _run_ids(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT run_id FROM recordings ORDER BY run_id")]


def _only(file: Path, ids: list[str]) -> str:
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigError(f"{file} holds no recording yet")
    raise ConfigError(f"{file} holds several runs; name one, as {SCHEME}{file}#{ids[0]}: {ids}")

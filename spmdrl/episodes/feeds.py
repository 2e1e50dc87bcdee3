"""Where recorded episodes go: files in a folder, or a database."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config import ConfigError
from spmdrl.episodes.database import DatabaseFeed, is_database
from spmdrl.episodes.format import INDEX, Episode, write_index
from spmdrl.runtime.checkpoint import write_file

__all__ = ["Feed", "FolderFeed", "make_feed"]

EPISODES = "worker-*-episode-*.safetensors"


class Feed(Protocol):
    """Every worker has one; only rank 0 checks, opens and publishes."""

    address: str

    def check(self) -> None:
        """Raise ConfigError if nothing new can be written there; changes nothing."""

    def open(self) -> None: ...

    def add(self, episode: Episode, data: bytes) -> None:
        """One more, whole or not at all; readers see it once it is published."""

    def publish(self, about: dict[str, Any], episodes: Iterable[Episode]) -> None:
        """These are what it holds from now on; those of before that are not among them go."""


def make_feed(address: str, run_id: str) -> Feed:
    return DatabaseFeed(address, run_id) if is_database(address) else FolderFeed(address)


class FolderFeed:
    """A file for each episode, and an index of those that are published."""

    def __init__(self, address: str):
        self.address = address
        self._folder = Path(address)
        self._shown: set[str] = set()

    def check(self) -> None:
        out = self._folder
        if not out.exists():
            return
        if not out.is_dir():
            raise ConfigError(f"out {out} is not a directory; choose another with --out")
        if (out / INDEX).exists():
            raise ConfigError(f"out {out} holds a recording already; choose another with --out")
        if any(out.glob(EPISODES)):
            raise ConfigError(
                f"out {out} holds an unfinished recording; delete it or choose another with --out"
            )
        if any(out.iterdir()):
            raise ConfigError(f"out {out} is not empty; choose another with --out")

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, episode: Episode, data: bytes) -> None:
        write_file(self._folder / episode.file, data)

    def publish(self, about: dict[str, Any], episodes: Iterable[Episode]) -> None:
        listed = list(episodes)
        kept = {episode.file for episode in listed}
        write_index(self._folder, about, listed)
        # Only then: whoever has read the older index finds most of its files still there, and
        # those that are mapped stay readable.
        for name in self._shown - kept:
            (self._folder / name).unlink(missing_ok=True)
        self._shown = kept

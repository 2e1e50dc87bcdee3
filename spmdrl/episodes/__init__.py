"""Recorded episodes on disk: what a recording is, and reading it in shuffled batches.

A recording is a folder with one safetensors file per episode and an `index.json`, written last, or
a part of an SQLite database. Observations in a folder are mapped into memory, so that a recording
may be larger than it.
"""

from spmdrl.episodes.batches import Batches
from spmdrl.episodes.database import open_recording
from spmdrl.episodes.format import (
    FIELDS,
    INDEX,
    Episode,
    describe_spec,
    map_arrays,
    named_obs,
    obs_in,
    write_episode,
    write_index,
)
from spmdrl.episodes.recording import Recording

__all__ = [
    "FIELDS", "INDEX", "Batches", "Episode", "Recording", "describe_spec", "map_arrays",
    "named_obs", "obs_in", "open_recording", "write_episode", "write_index",
]  # fmt: skip

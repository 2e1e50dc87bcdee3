"""Numbers to console, files and TensorBoard.

Rank 0 has a `Logger`, the others one that does nothing or only prints.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmdrl.config import Config
from spmdrl.runtime.clock import Row
from spmdrl.runtime.console import Console, make_console
from spmdrl.runtime.files import read_rows, replace_text, write_json

__all__ = ["EpisodeStats", "Logger", "NullLogger", "make_logger", "write_json"]


class EpisodeStats:
    """The last episodes of the whole run, in the same order on every topology."""

    def __init__(self, window: int):
        self.returns: collections.deque[float] = collections.deque(maxlen=window)
        self.lengths: collections.deque[int] = collections.deque(maxlen=window)
        self.count = 0

    def add(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        self.returns.extend(float(r) for r in returns)
        self.lengths.extend(int(n) for n in lengths)
        self.count += len(returns)

    def row(self) -> Row:
        return {
            "episode/return_mean": _mean(self.returns),
            "episode/length_mean": _mean(self.lengths),
            "episode/count": self.count,
        }

    def to_json(self) -> dict[str, Any]:
        return {"returns": list(self.returns), "lengths": list(self.lengths), "count": self.count}

    def from_json(self, saved: dict[str, Any]) -> None:
        self.returns.extend(saved["returns"])
        self.lengths.extend(saved["lengths"])
        self.count = saved["count"]


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


class AppendFile:
    """A text file that grows by whole lines; what a full disk refuses is tried again later."""

    def __init__(self, path: Path, complain: Callable[[Path, OSError], None]):
        self.path, self._complain = path, complain
        self._file = path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size  # of what is whole
        self._waiting = b""

    def append(self, text: str) -> None:
        failed_before = bool(self._waiting)
        self._waiting += text.encode()
        try:
            written = self._file.write(self._waiting) or 0
            if written < len(self._waiting):
                raise OSError(errno.ENOSPC, "only a part could be written")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
            if not failed_before:
                self._complain(self.path, error)
            return
        self._size, self._waiting = self._size + len(self._waiting), b""

    def close(self) -> None:
        self._file.close()


class NullLogger:
    """Does nothing: the logger of every rank but 0, by default."""

    def info(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def write(self, row: Row) -> None: ...
    def rewind(self, update: int) -> None: ...
    def close(self, summary: Mapping[str, Any] | None = None) -> None: ...


class Logger(NullLogger):
    """Writes `metrics.jsonl`, `log.txt` and whatever else the config asks for."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, console: Console | None = None):
        self._dir, self._id = run_dir, run_id
        self._metrics = AppendFile(run_dir / "metrics.jsonl", self._say_unwritten)
        self._log = AppendFile(run_dir / "log.txt", self._say_unwritten)
        self._console: Console = console or make_console(config, run_dir)
        self._writers = _extra_writers(config, run_dir, run_id)

    def info(self, text: str) -> None:
        self._note("", text)

    def warning(self, text: str) -> None:
        self._note("warning: ", text)

    def _note(self, level: str, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.append(f"{stamp} [{self._id}] {level}{text}\n")
        self._console.say(f"{level}{text}")

    def write(self, row: Row) -> None:
        """One row per logged update."""
        self._metrics.append(json.dumps(_finite(row)) + "\n")
        for writer in self._writers:
            writer.write(row)
        self._console.show(row)

    def rewind(self, update: int) -> None:
        """Forget the rows after `update`: a resumed run writes them again."""
        path = self._metrics.path
        self._metrics.close()
        kept = [row for row in read_rows(path) if row["progress/update"] <= update]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._metrics = AppendFile(path, self._say_unwritten)

    def _say_unwritten(self, path: Path, error: OSError) -> None:
        self._console.say(f"warning: {path} cannot be written: {error}; trying again with each row")

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        if summary is not None:
            write_json(self._dir / "summary.json", summary)
        for writer in self._writers:
            writer.close()
        self._console.close(summary)
        self._metrics.close()
        self._log.close()


def _finite(row: Row) -> Row:
    """JSON has no NaN; what is not a number is null there."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}


class RankLogger(NullLogger):
    """Prints the messages of a rank other than 0, with `log.all_ranks`."""

    def __init__(self, rank: int, run_id: str):
        self._origin = f"[{run_id} rank {rank}]"

    def info(self, text: str) -> None:
        print(f"{self._origin} {text}", flush=True)

    def warning(self, text: str) -> None:
        self.info(f"warning: {text}")


def make_logger(config: Config, run_dir: Path, run_id: str, rank: int) -> NullLogger:
    if rank == 0:
        return Logger(config, run_dir, run_id)
    return RankLogger(rank, run_id) if config.log.all_ranks else NullLogger()


# ---------------------------------------------------------------------------------------------
# Optional destinations


class TensorBoardWriter:
    def __init__(self, run_dir: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tb"))

    def write(self, row: Row) -> None:
        step = int(row["progress/steps"] or 0)
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    def __init__(self, project: str, run_id: str, config: Config):
        import dataclasses

        import wandb

        self._run = wandb.init(
            project=project, id=run_id, resume="allow", config=dataclasses.asdict(config)
        )

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None}, step=row["progress/steps"])

    def close(self) -> None:
        self._run.finish()


def _extra_writers(config: Config, run_dir: Path, run_id: str) -> list[Any]:
    writers: list[Any] = []
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(run_dir))
    if config.log.wandb:
        writers.append(WandbWriter(config.log.wandb, run_id, config))
    return writers

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

from spmdrl.config import Config, to_json
from spmdrl.runtime.clock import Row
from spmdrl.runtime.console import Console, make_console
from spmdrl.runtime.files import (
    is_plain_file,
    open_plain,
    read_rows,
    replace_text,
    set_aside,
    write_json,
)

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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
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

    def flush(self) -> None:
        """Onto the disk; OSError where lines are still waiting for room there."""
        if self._waiting:
            raise OSError(errno.ENOSPC, "some lines could not be written yet", str(self.path))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class NullLogger:
    """Does nothing: the logger of every rank but 0, by default."""

    def info(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def write(self, row: Row) -> None: ...
    def rewind(self, update: int) -> None: ...
    def flush(self) -> None: ...
    def close(self, summary: Mapping[str, Any] | None = None, last: str = "") -> None: ...


class Logger(NullLogger):
    """Writes `metrics.jsonl`, `log.txt` and whatever else the config asks for."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, console: Console | None = None):
        self._dir, self._id = run_dir, run_id
        files = [run_dir / "metrics.jsonl", run_dir / "log.txt"]
        moved = [f"{file} is no plain file; set aside as {set_aside(file)}" for file in files
                 if os.path.lexists(file) and not is_plain_file(file)]  # fmt: skip
        self._metrics, self._log = (AppendFile(file, self._say_unwritten) for file in files)
        self._console: Console = console or make_console(config, run_dir)
        for text in moved:
            self.warning(text)
        self._writers = Writers(config, run_dir, run_id, self.warning)

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
        self._writers.write(row)
        self._console.show(row)

    def rewind(self, update: int) -> None:
        """Forget the rows after `update`: a resumed run writes them again."""
        path = self._metrics.path
        self._metrics.close()
        kept, damaged = _rows_until(path, update)
        if damaged:
            aside = set_aside(path)
            self.warning(f"{path} has {damaged}, left out; the old file is kept as {aside}")
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._metrics = AppendFile(path, self._say_unwritten)

    def flush(self) -> None:
        """What was logged is on the disk, or OSError."""
        self._metrics.flush()

    def _say_unwritten(self, path: Path, error: OSError) -> None:
        self._console.say(f"warning: {path} cannot be written: {error}; trying again with each row")

    def close(self, summary: Mapping[str, Any] | None = None, last: str = "") -> None:
        """`last` is said after everything else: below the panel, not above it."""
        if summary is not None:
            write_json(self._dir / "summary.json", summary)
        self._writers.close()
        self._console.close(summary)
        if last:
            self.info(last)
        self._metrics.close()
        self._log.close()


def _rows_until(path: Path, update: int) -> tuple[list[Row], str]:
    """The rows up to an update, and what is wrong with the file, if anything.

    A last line without its end is what a kill leaves, and nothing to speak of.
    """
    with open_plain(path) as stream:
        lines = sum(line.endswith(b"\n") for line in stream)
    try:
        rows = read_rows(path)
    except OSError as error:
        return [], str(error)
    whole = [row for row in rows if type(row.get("progress/update")) is int]
    lost = max(lines - len(whole), len(rows) - len(whole))
    damaged = f"{lost} line(s) that are no rows" if lost else ""
    return [row for row in whole if row["progress/update"] <= update], damaged


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
    """Every number of every row by its name, over environment steps; and the config as text."""

    def __init__(self, run_dir: Path, config: Config):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tb"))
        self._writer.add_text("config", "```json\n" + to_json(config) + "\n```", 0)

    def write(self, row: Row) -> None:
        step = int(row["progress/steps"] or 0)
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """The same rows and config; a resumed run goes on in the same one there."""

    def __init__(self, project: str, run_id: str, config: Config):
        import wandb

        self._run = wandb.init(
            project=project, id=run_id, resume="allow", config=json.loads(to_json(config))
        )

    def write(self, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None}, step=row["progress/steps"])

    def close(self) -> None:
        self._run.finish()


class Writers:
    """The destinations that the config asks for; one that fails costs a warning, not the run."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, warn: Callable[[str], None]):
        self._warn = warn
        self._open: dict[str, Any] = {}
        if config.log.tensorboard:
            self._begin("TensorBoard", lambda: TensorBoardWriter(run_dir, config))
        if config.log.wandb:
            project = config.log.wandb
            self._begin("W&B", lambda: WandbWriter(project, run_id, config))

    def write(self, row: Row) -> None:
        for name, writer in list(self._open.items()):
            try:
                writer.write(row)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        for name, writer in list(self._open.items()):
            try:
                writer.close()
            except Exception as error:
                self._give_up(name, error)

    def _begin(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self._open[name] = make()
        except Exception as error:
            self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        said = f"{type(error).__name__}: {error}"
        self._warn(f"{name} has failed ({said}) and gets no more rows; metrics.jsonl has them all")

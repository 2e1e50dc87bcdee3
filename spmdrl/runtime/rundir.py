"""The run directory: made on rank 0, explains itself, and is found again on resume."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from spmdrl.config import AlgoConfig, Config, ConfigError, changes, from_json, to_json
from spmdrl.config.rules import check_fields
from spmdrl.runtime import lock
from spmdrl.runtime.files import (
    make_folder,
    read_json,
    read_plain,
    replace_text,
    set_aside,
    write_json,
)
from spmdrl.runtime.hints import suggested
from spmdrl.runtime.provenance import CODE_FILE, Code, changed_files, read_code, write_code

__all__ = [
    "CLONE_MARK",
    "RunDir",
    "State",
    "check_run_dir",
    "close_run",
    "command_line",
    "new_run_dir",
    "open_run",
    "read_run",
    "versions",
    "write_status",
]

PACKAGES = (
    "spmdrl", "jax", "jaxlib", "flax", "optax",
    "envpool", "gymnasium", "numpy", "mpi4py", "mpi4jax",
)  # fmt: skip

# What a run leaves that was killed while it made its directory.
UNFINISHED = {
    lock.LOCK_NAME, "versions.json", ".versions.json.tmp", CODE_FILE, f".{CODE_FILE}.tmp",
    ".config.json.tmp",
}  # fmt: skip
CLONE_MARK = "clone.json"  # in a run that spmdrl.clone made: no optimiser state to resume with


@dataclass(frozen=True)
class RunDir:
    path: Path
    run_id: str
    resumed: bool
    notes: tuple[str, ...] = ()
    """What the user has to know about the changes since it was last trained."""
    changed_code: tuple[str, ...] = ()
    """Files of the user's that are not what they were when the run was last started."""


def open_run(config: Config, code: Code | None = None) -> RunDir:
    """Create the run directory, or open the one that is there, and lock it. Rank 0 only.

    `code` is the user's own that the run needs, to be recorded.
    The lock is kept until `close_run`, or for the life of this process.
    """
    check_run_dir(config)
    path = Path(new_run_dir(config))
    _make_and_lock(path, config.restart)
    try:
        _check_content(path, config)  # again: it may be another job's work of the last moment
        if (path / "config.json").exists():
            return _reopen(path, config, code)
        run_id = path.name if not config.run_dir else f"{path.name}-{secrets.token_hex(2)}"
        _write_config(path, config, run_id, code)
        return RunDir(path, run_id, resumed=False)
    except OSError as error:  # the disk is full at the very start
        lock.release(path)
        raise _unwritable(path, error) from error
    except BaseException:
        lock.release(path)
        raise


def close_run(run: RunDir) -> None:
    """Let another job have the directory."""
    lock.release(run.path)


def _make_and_lock(path: Path, restart: bool) -> None:
    try:
        if restart and path.exists():
            _move_aside(path)
        make_folder(path, parents=True)
        lock.take(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run_dir {path} cannot be written ({error.strerror or error}); choose another with "
        "--run-dir"
    )


def check_run_dir(config: Config) -> None:
    """Raise ConfigError for a run directory that `open_run` would refuse; changes nothing."""
    path = Path(config.run_dir or "runs")
    _check_writable(path)
    if config.run_dir is None or not path.exists():
        return
    lock.check_free(path)
    _check_content(path, config)


def _check_content(path: Path, config: Config) -> None:
    if not (path / "config.json").exists():
        if any(file.name not in UNFINISHED for file in path.iterdir()):
            raise ConfigError(
                f"run_dir {path} exists, is not empty and holds no run of spmdrl; "
                "choose another with --run-dir"
            )
    elif not config.restart:
        if (path / CLONE_MARK).exists():
            raise ConfigError(
                f"run_dir {path} was made by spmdrl.clone, which training cannot resume; "
                "choose another with --run-dir"
            )
        _check_same_run(path, config)


def _check_writable(path: Path) -> None:
    existing = path.absolute()
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    reason = ""
    if not existing.is_dir():
        reason = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"no permission to write in {existing}"
    if reason:
        raise ConfigError(
            f"run_dir {path} cannot be written: {reason}; choose another with --run-dir"
        )


def _check_same_run(path: Path, config: Config) -> None:
    found = changes(read_run(path, type(config.algo)), config)
    if found:
        raise ConfigError(
            f"run_dir {path} holds a run with another config: {'; '.join(found)}. Use another "
            "--run-dir, or --restart to move the old run aside and start over"
        )


def new_run_dir(config: Config) -> str:
    """The one that the config names, or a new name below runs/."""
    if config.run_dir:
        return config.run_dir
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = config.name or config.env.id.replace("/", "-")
    return str(Path("runs") / f"{name}-s{config.seed}-{stamp}-{secrets.token_hex(2)}")


def _move_aside(path: Path) -> None:
    lock.take(path)  # else it would be moved away under a job that has just begun
    aside = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    os.rename(path, aside)
    lock.release(aside)


def _write_config(path: Path, config: Config, run_id: str, code: Code | None) -> None:
    resolved = replace(config, run_dir=str(path), restart=False)
    # config.json makes it a run, so it comes last: a kill in between leaves no half of one.
    write_json(path / "versions.json", versions() | {"run_id": run_id})
    if code is not None:
        write_code(path, code)
    replace_text(path / "config.json", to_json(resolved) + "\n")


State = Literal["running", "finished", "stopped", "failed"]


def write_status(path: Path, state: State, reason: str = "") -> None:
    """Who works on this run, or how it ended; `python -m spmdrl.runs` reads it.

    A disk that refuses it must not end a run, nor hide why one ended.
    """
    status = {
        "state": state,
        "reason": next(iter(reason.strip().splitlines()), ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
    }
    with contextlib.suppress(OSError):
        write_json(path / "status.json", status)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _reopen(path: Path, config: Config, code: Code | None) -> RunDir:
    run_id, lost = _known_id(path)
    notes = lost + _changed_schedules(read_run(path, type(config.algo)), config)
    before = read_code(path)
    changed = changed_files(before, code) if before and code else []
    _write_config(path, config, run_id, code)
    return RunDir(path, run_id, resumed=True, notes=notes, changed_code=tuple(changed))


def _known_id(path: Path) -> tuple[str, tuple[str, ...]]:
    """The run's id, and what to say where it is lost: it only names the run in logs."""
    file = path / "versions.json"
    known = read_json(file).get("run_id")
    if isinstance(known, str) and known:
        return known, ()
    aside = f"is damaged; set aside as {set_aside(file)}" if os.path.lexists(file) else "is missing"
    run_id = f"{path.name}-{secrets.token_hex(2)}"
    return run_id, (f"warning: {file} {aside}. The run has a new id, {run_id}",)


def _changed_schedules(before: Config, now: Config) -> tuple[str, ...]:
    """More steps stretch the schedules, which changes the learning rate from here on."""
    old, new = before.schedule_updates, now.schedule_updates
    if old == new:
        return ()
    size = now.batch_size
    return (
        f"schedules now end at step {new * size:,} instead of {old * size:,}: linear and cosine "
        "ones go on from their values on the new line (--schedule-steps sets their length)",
    )


def read_run(path: str | Path, own_algo: type[AlgoConfig] | None = None) -> Config:
    """The config of an existing run; `own_algo` is the class of an algorithm of the user's own."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is not a run directory: it has no config.json")
    try:
        config = from_json(read_plain(file), own_algo)
        check_fields(config)
        return config
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged or not of this version: {error}") from error


def command_line(path: Path, argv: list[str]) -> str:
    """The command that resumes this run."""
    words = [a for a in argv if a != "--restart"]
    if "--run-dir" in words:
        position = words.index("--run-dir")
        del words[position : position + 2]
    return suggested("train", *words, "--run-dir", path)

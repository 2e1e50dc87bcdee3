"""The run directory: made on rank 0, explains itself, and is found again on resume.

Public names: `RunDir`, `open_run`, `newest_run_config`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import secrets
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl.config import Config, ConfigError, flatten, from_json, to_json

PACKAGES = ("spmdrl", "jax", "jaxlib", "flax", "optax", "envpool", "gymnasium", "numpy", "mpi4py", "mpi4jax")

# What may differ between a run and its resumption: it changes how long, how fast or how loud the
# run is, never what it learns next. All of `log.`, `checkpoint.` and `eval.` may too.
FREE = {
    "run_dir", "name", "restart", "total_steps", "nprocs", "devices", "env.threads",
    "sync.strategy", "sync.check_every", "sync.phase_timeout_s", "sync.start_timeout_s", "net.conv",
}  # fmt: skip
FREE_PARTS = ("log.", "checkpoint.", "eval.")
FIXED = {"checkpoint.renew_every"}


@dataclass(frozen=True)
class RunDir:
    path: Path
    run_id: str
    resumed: bool


def open_run(config: Config) -> RunDir:
    """Create the run directory, or open the one that is there. Rank 0 only."""
    path = Path(config.run_dir) if config.run_dir else _new_path(config)
    if config.restart and path.exists():
        _move_aside(path)
    if (path / "config.json").exists():
        return _reopen(path, config)
    run_id = path.name if not config.run_dir else f"{path.name}-{secrets.token_hex(2)}"
    try:
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"run_dir {path} exists, is not empty and holds no run of spmdrl")
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir {path} cannot be written ({error.strerror}); choose another with --run-dir"
        ) from error
    _write_config(path, config, run_id)
    return RunDir(path, run_id, resumed=False)


def _new_path(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = config.name or config.env.id.replace("/", "-")
    return Path("runs") / f"{name}-s{config.seed}-{stamp}-{secrets.token_hex(2)}"


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    os.rename(path, aside)


def _write_config(path: Path, config: Config, run_id: str) -> None:
    resolved = replace(config, run_dir=str(path), restart=False)
    (path / "config.json").write_text(to_json(resolved) + "\n")
    (path / "versions.json").write_text(json.dumps(versions() | {"run_id": run_id}, indent=2) + "\n")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _reopen(path: Path, config: Config) -> RunDir:
    before = from_json((path / "config.json").read_text())
    changes = forbidden_changes(before, config)
    if changes:
        raise ConfigError(
            f"run_dir {path} holds a run with another config: {'; '.join(changes)}. Use another "
            "--run-dir, or --restart to move the old run aside and begin anew"
        )
    run_id = json.loads((path / "versions.json").read_text())["run_id"]
    if not os.access(path, os.W_OK):
        raise ConfigError(f"run_dir {path} cannot be written")
    _write_config(path, config, run_id)
    return RunDir(path, run_id, resumed=True)


def forbidden_changes(before: Config, now: Config) -> list[str]:
    """`field: old -> new` for every change that a resumed run cannot take."""
    old, new = flatten(before), flatten(now)

    def free(name: str) -> bool:
        return name not in FIXED and (name in FREE or name.startswith(FREE_PARTS))

    return [f"{k}: {old[k]!r} -> {new[k]!r}" for k in old if old[k] != new[k] and not free(k)]


def read_run(path: str | Path) -> Config:
    """The config of an existing run, for the tools that look at it afterwards."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is not a run directory: it has no config.json")
    return from_json(file.read_text())


def command_line(path: Path, argv: list[str]) -> str:
    """The command that goes on with this run."""
    words = [a for a in argv if a != "--restart"]
    if "--run-dir" in words:
        position = words.index("--run-dir")
        del words[position : position + 2]
    return " ".join(["python -m spmdrl.train", *words, "--run-dir", str(path)])


def is_interactive() -> bool:
    return sys.stdout.isatty()

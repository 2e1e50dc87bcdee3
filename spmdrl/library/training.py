"""Training from a script or a notebook: `result = spmdrl.train(config)`."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import EXIT_BAD_INPUT, EXIT_STOPPED, Config, ConfigError, read_file
from spmdrl.envs.ids import check_id
from spmdrl.parallel.job_folder import start_folder
from spmdrl.parallel.process import prepare_run
from spmdrl.parallel.roles import check_ranks
from spmdrl.parallel.topology import detect
from spmdrl.runtime.files import read_json, read_metrics
from spmdrl.runtime.rundir import check_run_dir, new_run_dir
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.validate import check_extras, validate
from spmdrl.runtime.warm_start import check_init_from
from spmdrl.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from spmdrl.library.trained import TrainedPolicy

__all__ = ["Result", "train"]


@dataclass(frozen=True)
class Result:
    """What a run has left."""

    run_dir: Path
    summary: dict[str, Any]
    """What summary.json holds; empty if the run was stopped before its end."""

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop; the same call resumes it."""
        return not self.summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each logged update."""
        return read_metrics(self.run_dir)

    def policy(self, checkpoint: str | int = "latest") -> TrainedPolicy:
        from spmdrl.library.trained import load

        return load(self.run_dir, checkpoint, trust=True)  # this process has just executed it


def train(config: Config | str | Path, **changes: Any) -> Result:
    """Train in this process, or resume the run in `config.run_dir`.

    `config` is a Config or a config file; `changes` are fields of it, such as seed=3. Started by
    mpirun or srun, every rank calls this. Raises ConfigError for what cannot work, RuntimeError if
    the run fails; Ctrl-C stops it after a checkpoint.
    """
    given = config if isinstance(config, Config) else _of_file(Path(config))
    wanted = checked(given, changes)
    topology = detect()
    watchdog = Watchdog(topology.rank, topology.size, start_folder())
    with _own_signals() as stop:
        if topology.size > 1:
            watchdog.start()
        from spmdrl.parallel.world import connect

        world = connect(topology)
        prepare_run(wanted, topology)
        from spmdrl.runtime.session import run_session

        run_dir = world.from_root(lambda: new_run_dir(wanted))
        again = f"call spmdrl.train again with run_dir={run_dir!r}"
        wanted = dataclasses.replace(wanted, run_dir=run_dir)
        code = run_session(wanted, topology, world, stop, watchdog, [], again)
    return _result(Path(run_dir), code)


def _of_file(file: Path) -> Config:
    config = read_file(str(file))
    return config if config.name else dataclasses.replace(config, name=file.stem)


def checked(config: Config, changes: dict[str, Any]) -> Config:
    """With the changes; raise ConfigError if it cannot work here."""
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ConfigError(f"a config has no field {unknown[0]!r}; parts are changed as a whole")
    config = dataclasses.replace(config, **changes)
    if config.nprocs != 1:
        raise ConfigError(
            f"nprocs is {config.nprocs}, but spmdrl.train trains in the process that calls it; for "
            "several ranks start the script by mpirun, or train by `spmdrl train CONFIG.py`"
        )
    topology = detect()
    if config.learners and topology.size == 1:
        raise ConfigError(
            f"learners is {config.learners}, but spmdrl.train trains in the process that calls it; "
            "start the script by mpirun: the ranks after the learners act"
        )
    check_ranks(config, topology.size, topology.launcher)
    validate(config, topology.size, max(1, config.devices))
    check_id(config.env)
    check_extras(config)
    check_run_dir(config)
    check_init_from(config)
    return config


def _result(run_dir: Path, code: int) -> Result:
    if code not in (0, EXIT_STOPPED):
        reason = read_json(run_dir / "status.json").get("reason") or "see what was printed"
        if code == EXIT_BAD_INPUT:
            raise ConfigError(reason)
        raise RuntimeError(f"the run in {run_dir} failed: {reason}")
    return Result(run_dir, read_json(run_dir / "summary.json") if code == 0 else {})


@contextlib.contextmanager
def _own_signals() -> Iterator[StopRequest]:
    """Signals ask the run to stop while it lasts; then they are the caller's again."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("spmdrl.train must be called from the main thread, which gets signals")
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield stop.listen()
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)

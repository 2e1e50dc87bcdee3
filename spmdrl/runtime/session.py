"""One process's part in a run, from the handshake of the ranks to the exit code."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_STOPPED, Config, ConfigError
from spmdrl.parallel.guards import GuardError
from spmdrl.parallel.placement import ids_of_ranks
from spmdrl.parallel.process import settings
from spmdrl.parallel.topology import LaunchError, Topology, threads_per_rank
from spmdrl.parallel.world import World, abort_all
from spmdrl.runtime.build import Trainer, build_trainer
from spmdrl.runtime.logger import NullLogger, make_logger
from spmdrl.runtime.loop import Stopped, TrainingLoop
from spmdrl.runtime.rundir import (
    RunDir,
    State,
    close_run,
    command_line,
    open_run,
    versions,
    write_status,
)
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog, report_fault

__all__ = ["handshake", "run_session"]


def run_session(
    config: Config,
    topology: Topology,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    argv: Sequence[str],
) -> int:
    """Train, and say how it ended; the exit code."""
    session = Session(config, topology, world, watchdog, argv)
    try:
        session.train(stop)
        return 0
    except Stopped as stopped:
        return session.stopped(stopped)
    except (ConfigError, LaunchError) as error:
        return session.refused(error)
    except BaseException as error:  # SystemExit too: a rank that just leaves would hang the others
        return session.failed(error)
    finally:
        watchdog.stop()
        session.close()


class Session:
    """One process of a run, and what it leaves behind at each kind of end."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        world: World,
        watchdog: Watchdog,
        argv: Sequence[str],
    ):
        self._config, self._topology, self._world = config, topology, world
        self._watchdog, self._argv = watchdog, list(argv)
        self._logger = NullLogger()
        self._run: RunDir | None = None
        self._again = ""

    def train(self, stop: StopRequest) -> None:
        config, topology, world = self._config, self._topology, self._world
        if config.sync.strategy == "jax" and world.size > 1:
            start_jax_distributed(topology, world)
        ranks = handshake(config, world, self._argv)
        self._run = run = share_run(config, world)
        self._again = command_line(run.path, self._argv)
        self._watchdog.move(run.path / ".heartbeat")
        self._watchdog.enter("start", 0, config.sync.start_timeout_s)
        self._write_status("running")
        self._logger = logger = make_logger(config, run.path, run.run_id, world.rank)
        for line in ranks if world.size > 1 else []:
            logger.info(line)
        threads = config.env.threads or threads_per_rank(topology)
        trainer = build_trainer(config, world, threads)
        publishes = topology.local_rank == 0
        loop = TrainingLoop(trainer, run.path, logger, stop, self._watchdog, publishes)
        logger.info(header(trainer))
        logger.info(f"rank {world.rank}: {settings(threads)}")
        summary = loop.train()
        logger.close(summary | {"run_dir": str(run.path), "command": self._again})
        self._write_status("finished")

    def stopped(self, stopped: Stopped) -> int:
        self._logger.info(f"{stopped}; to resume: {self._again}")
        self._logger.close()
        self._write_status("stopped", str(stopped))
        self._world.barrier()  # mpirun ends everyone as soon as the first leaves with a code
        return EXIT_STOPPED

    def refused(self, error: Exception) -> int:
        self._logger.close()
        if self._world.is_root:
            print(f"spmdrl: {error}", file=sys.stderr, flush=True)
        self._write_status("failed", str(error))
        # The others leave it to rank 0, which must have said it before they end the job.
        return abort_all(self._world, EXIT_BAD_INPUT, after_s=0.0 if self._world.is_root else 5.0)

    def failed(self, error: BaseException) -> int:
        self._logger.close()
        world, where = self._world, self._watchdog.where()
        if isinstance(error, GuardError) and world.rank != min(error.ranks):
            # All ranks have found it together; the guilty one reports it and ends the job.
            return abort_all(world, EXIT_FAULT, after_s=5.0)
        report_fault(world.rank, world.size, where, error)
        if self._run:  # whichever rank it is: the others are about to be ended without a report
            reason = f"{type(error).__name__}: {error}"
            write_status(self._run.path, "failed", f"rank {world.rank}, {where}: {reason}")
        self._watchdog.stop()
        return abort_all(world, EXIT_FAULT)

    def close(self) -> None:
        if self._run and self._world.is_root:
            close_run(self._run)

    def _write_status(self, state: State, reason: str = "") -> None:
        if self._world.is_root and self._run:
            write_status(self._run.path, state, reason)


def header(trainer: Trainer) -> str:
    """What is about to happen, in one line."""
    config = trainer.config
    return (
        f"{config.env.id}: {config.env.num_envs} environments on {trainer.world.size} rank(s) x "
        f"{trainer.devices} device(s), {config.num_updates:,} updates of {config.batch_size:,} "
        f"steps; rollouts {trainer.collector.description}"
    )


def handshake(config: Config, world: World, argv: Sequence[str]) -> list[str]:
    """Compare what must be the same on all ranks, before the first collective of the training.

    Returns a line about each rank. Raises LaunchError that names the rank and the difference.
    """
    devices = [d for d in jax.local_devices() if d.process_index == jax.process_index()]
    packages = {k: v for k, v in versions().items() if k != "platform"}
    mine = {
        "command line": list(argv),
        "versions": packages,
        "devices": [devices[0].platform, config.devices or len(devices)],
        "host": socket.gethostname(),
        "ready_s": world.ready_s,
    }
    ranks = world.assemble(mine, config.sync.start_timeout_s)
    for rank, other in enumerate(ranks):
        for what in ("command line", "versions", "devices"):
            if other[what] != ranks[0][what]:
                raise LaunchError(
                    f"rank {rank} on {other['host']} and rank 0 on {ranks[0]['host']} have "
                    f"different {what} (phase start): "
                    f"{differences(other[what], ranks[0][what])}. Start all "
                    "ranks with the same command from the same environment"
                )
    envs = [len(ids) for ids in ids_of_ranks(config, world.size)]
    return [
        f"rank {i}/{world.size} on {r['host']}: {r['devices'][1]} {r['devices'][0]} device(s), "
        f"{n} environment(s), MPI ready in {r['ready_s']:.1f} s"
        for i, (r, n) in enumerate(zip(ranks, envs, strict=True))
    ]


def differences(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict):
        odd = [k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)]
        return "; ".join(f"{k} {mine.get(k)} against {theirs.get(k)}" for k in sorted(odd))
    return f"{mine} against {theirs}"


def start_jax_distributed(topology: Topology, world: World) -> None:
    """One jax over all ranks; rank 0 says where it can be reached."""
    address = None
    if world.is_root:
        host = "127.0.0.1" if topology.local_size == topology.size else socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = f"{socket.gethostbyname(host)}:{probe.getsockname()[1]}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(world.broadcast_json(address), world.size, world.rank)


def share_run(config: Config, world: World) -> RunDir:
    """Rank 0 opens the run directory and tells the others; its refusal ends everyone."""

    def opened() -> dict[str, Any]:
        run = open_run(config)
        return {"path": str(run.path), "run_id": run.run_id, "resumed": run.resumed}

    found = world.from_root(opened)
    return RunDir(Path(found["path"]), found["run_id"], found["resumed"])

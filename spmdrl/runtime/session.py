"""One process's part in a run, from the handshake of the ranks to the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_STOPPED, Config, ConfigError
from spmdrl.nets.describe import describe
from spmdrl.parallel.guards import GuardError
from spmdrl.parallel.process import settings
from spmdrl.parallel.roles import Layout, layout_of, role_of
from spmdrl.parallel.topology import LaunchError, Topology, threads_per_rank
from spmdrl.parallel.wire import run_hash
from spmdrl.parallel.world import World, abort_all
from spmdrl.runtime.act import ActingLoop
from spmdrl.runtime.build import Trainer, build_learner, build_trainer
from spmdrl.runtime.handshake import handshake, share_run, start_jax_distributed
from spmdrl.runtime.logger import NullLogger, make_logger
from spmdrl.runtime.loop import Stopped, TrainingLoop
from spmdrl.runtime.rundir import (
    RunDir,
    State,
    close_run,
    command_line,
    write_status,
)
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.spaces import write_spaces
from spmdrl.runtime.warm_start import read_source
from spmdrl.runtime.watchdog import Watchdog, report_fault

__all__ = ["run_session"]


def run_session(
    config: Config,
    topology: Topology,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    argv: Sequence[str],
    again: str = "",
) -> int:
    """Train, and say how it ended; the exit code.

    `again` says how to resume, where that is not the command line.
    """
    session = Session(config, topology, world, watchdog, argv, again)
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
        again: str = "",
    ):
        self._config, self._topology, self._world = config, topology, world
        self._watchdog, self._argv = watchdog, list(argv)
        self._logger = NullLogger()
        self._run: RunDir | None = None
        self._again = again
        self._role = watchdog.role = role_of(config, topology.rank)

    def train(self, stop: StopRequest) -> None:
        """This rank's part, whichever it is, to the end of the run."""
        config, topology, world = self._config, self._topology, self._world
        layout = layout_of(config, world.size)
        if layout and not world.has_threads:
            raise LaunchError(
                f"ranks that only act need an MPI with MPI_THREAD_MULTIPLE; this one provides "
                f"MPI_THREAD_{world.thread_level.upper()}. Leave --learners out"
            )
        if config.sync.strategy == "jax" and world.size > 1:
            start_jax_distributed(topology, world)
        ranks = handshake(config, world, self._argv, layout)
        self._run = run = share_run(config, world)
        self._again = self._again or command_line(run.path, self._argv)
        self._watchdog.move(run.path / ".heartbeat")
        self._watchdog.enter("start", 0, config.sync.start_timeout_s)
        self._write_status("running")
        self._logger = logger = make_logger(config, run.path, run.run_id, world.rank)
        for line in (*(ranks if world.size > 1 else []), *run.notes):
            logger.info(line)
        if run.changed_code:
            files = ", ".join(run.changed_code)
            logger.warning(f"code has changed since this run was last started: {files}")
        threads = config.env.threads or threads_per_rank(topology)
        if layout and self._role == "actor":
            self._act(stop, layout, run, threads)
        else:
            self._learn(stop, layout, run, threads)

    def _act(self, stop: StopRequest, layout: Layout, run: RunDir, threads: int) -> None:
        rank = self._world.rank
        first = rank == layout.learners or self._topology.local_rank == 0
        self._logger.info(f"rank {rank}: {settings(threads)}")
        loop = ActingLoop(
            self._config, self._world, layout, run.path, run_hash(run.run_id, layout), threads,
            stop, self._watchdog, publishes=first,
        )  # fmt: skip
        loop.act()

    def _learn(self, stop: StopRequest, layout: Layout | None, run: RunDir, threads: int) -> None:
        config, topology, world, logger = self._config, self._topology, self._world, self._logger
        source = read_source(config, run.path) if world.is_root else None
        if source is not None:
            logger.info(f"begins with the parameters of {config.init_from}, update {source.step}")
        if layout:
            run_id = run_hash(run.run_id, layout)
            trainer = build_learner(config, world, layout, run_id, source)
        else:
            trainer = build_trainer(config, world, threads, source=source)
        if world.is_root:
            write_spaces(run.path, trainer.collector.spec)
        publishes = topology.local_rank == 0
        loop = TrainingLoop(trainer, run.path, logger, stop, self._watchdog, publishes)
        logger.info(header(trainer))
        logger.info(f"networks see {describe(config, trainer.collector.spec)}")
        logger.info(f"rank {world.rank}: {settings(threads)}")
        logger.info("compiling: the first update takes longer than the others")
        summary = loop.train()
        logger.close(summary | {"run_dir": str(run.path), "command": self._again})
        self._write_status("finished")

    def stopped(self, stopped: Stopped) -> int:
        self._logger.close(last=f"{stopped}; to resume: {self._again}")
        self._write_status("stopped", str(stopped))
        self._world.barrier()  # mpirun ends everyone as soon as the first leaves with a code
        return EXIT_STOPPED

    def refused(self, error: Exception) -> int:
        self._logger.close()
        if self._world.is_root:
            print(f"spmdrl: {error}", file=sys.stderr, flush=True)
        self._write_status("failed", str(error))
        self._watchdog.stop()  # else survivors would report this rank as killed
        # The others leave it to rank 0, which must have said it before they end the job.
        return abort_all(self._world, EXIT_BAD_INPUT, after_s=0.0 if self._world.is_root else 5.0)

    def failed(self, error: BaseException) -> int:
        self._logger.close()
        world, where = self._world, self._watchdog.where()
        if isinstance(error, GuardError) and world.rank != min(error.ranks):
            # All ranks have found it together; the guilty one reports it and ends the job.
            return abort_all(world, EXIT_FAULT, after_s=5.0)
        report_fault(world.rank, world.size, where, error, self._role)
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
    where = f"{trainer.world.size} rank(s) x {trainer.devices} device(s)"
    if trainer.everyone:
        actors = trainer.everyone.size - trainer.world.size
        learners = f"{trainer.world.size} learner(s) x {trainer.devices} device(s)"
        where = f"{actors} actor(s), learned from by {learners}"
    return (
        f"{config.env.id}: {config.env.num_envs} environments on {where}, "
        f"{config.num_updates:,} updates of {config.batch_size:,} steps; rollouts "
        f"{trainer.collector.description}{lag_note(config)}"
    )


def lag_note(config: Config) -> str:
    if not config.lag:
        return ""
    return f"; lag {config.lag}, {'corrected' if config.algo.corrects_lag else 'uncorrected'}"

"""One process's part in a run, from the handshake of the ranks to the exit code.

Public names: `run_session`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_STOPPED, Config, ConfigError
from spmdrl.parallel.placement import ids_of_ranks
from spmdrl.parallel.topology import LaunchError, Topology
from spmdrl.parallel.world import World, abort_all
from spmdrl.runtime.logger import NullLogger, make_logger
from spmdrl.runtime.loop import Stopped, train
from spmdrl.runtime.rundir import RunDir, close_run, command_line, open_run, versions, write_status
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.watchdog import Watchdog, report_fault


def run_session(
    config: Config,
    topology: Topology,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    argv: Sequence[str],
) -> int:
    logger = NullLogger()
    run: RunDir | None = None
    try:
        if config.sync.strategy == "jax" and world.size > 1:
            start_jax_distributed(topology, world)
        places = handshake(config, world, argv)
        run = share_run(config, world)
        again = command_line(run.path, list(argv))
        watchdog.move(run.path / ".heartbeat")
        if world.is_root:
            write_status(run.path, "running")
        logger = make_logger(config, run.path, run.run_id, world.rank)
        for place in places if world.size > 1 else []:
            logger.info(place)
        summary = train(config, topology, world, run, logger, stop, watchdog)
        logger.close(summary | {"run_dir": str(run.path), "command": again})
        if world.is_root:
            write_status(run.path, "finished")
        return 0
    except Stopped as stopped:
        logger.info(f"{stopped}; the same command goes on: {again}")
        logger.close()
        if world.is_root and run:
            write_status(run.path, "stopped", str(stopped))
        world.barrier()  # mpirun ends everyone as soon as the first leaves with a code
        return EXIT_STOPPED
    except (ConfigError, LaunchError) as error:
        logger.close()
        if world.is_root:
            print(f"spmdrl: {error}", file=sys.stderr, flush=True)
            if run:
                write_status(run.path, "failed", str(error))
        # The others leave it to rank 0, which must have said it before they end the job.
        return abort_all(world, EXIT_BAD_INPUT, after_s=0.0 if world.is_root else 5.0)
    except BaseException as error:  # SystemExit too: a rank that just leaves would hang the others
        logger.close()
        report_fault(world.rank, world.size, watchdog.where(), error)
        if run:  # whichever rank it is: the others are about to be ended without a word
            reason = f"{type(error).__name__}: {error}"
            write_status(run.path, "failed", f"rank {world.rank}, {watchdog.where()}: {reason}")
        watchdog.stop()
        return abort_all(world, EXIT_FAULT)
    finally:
        watchdog.stop()
        if run and world.is_root:
            close_run(run)


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

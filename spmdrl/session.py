"""One process's part in a run, from the first word with the other ranks to the exit code.

Public names: `run_session`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spmdrl.config import (
    EXIT_BAD_INPUT,
    EXIT_FAULT,
    EXIT_STOPPED,
    Config,
    ConfigError,
    from_json,
    to_json,
)
from spmdrl.launch import LaunchError, Topology
from spmdrl.loop import Stopped, train
from spmdrl.metrics import NullLogger, make_logger
from spmdrl.rundir import RunDir, command_line, open_run
from spmdrl.safety import StopRequest, Watchdog, report_fault
from spmdrl.world import World, connect


def run_session(config: Config, topology: Topology, argv: Sequence[str]) -> int:
    stop = StopRequest().listen()
    world, watchdog, logger = World(), Watchdog(topology.rank, topology.size, None), NullLogger()
    try:
        world = connect(topology)
        config = from_json(world.broadcast_json(to_json(config)))
        run = share_run(config, world)
        watchdog = Watchdog(topology.rank, topology.size, run.path / ".heartbeat").start()
        logger = make_logger(config, run.path, run.run_id, world.is_root)
        summary = train(config, topology, world, run, logger, stop, watchdog)
        extra = {"run_dir": str(run.path), "command": command_line(run.path, list(argv))}
        logger.close(summary | extra)
        return 0
    except Stopped as stopped:
        logger.info(f"{stopped}; the same command goes on: {command_line(run.path, list(argv))}")
        logger.close()
        return EXIT_STOPPED
    except (ConfigError, LaunchError) as error:
        print(f"spmdrl: {error}", file=sys.stderr, flush=True)
        logger.close()
        return _leave(world, EXIT_BAD_INPUT)
    except BaseException as error:  # SystemExit too: a rank that just leaves would hang the others
        logger.close()
        report_fault(topology.rank, topology.size, watchdog.where(), error)
        return _leave(world, EXIT_FAULT)
    finally:
        watchdog.stop()


def share_run(config: Config, world: World) -> RunDir:
    """Rank 0 opens the run directory and tells the others; its refusal ends everyone."""
    answer: dict[str, object] = {}
    if world.is_root:
        try:
            run = open_run(config)
            answer = {"path": str(run.path), "run_id": run.run_id, "resumed": run.resumed}
        except ConfigError as error:
            answer = {"error": str(error)}
    answer = world.broadcast_json(answer)
    if "error" in answer:
        raise ConfigError(str(answer["error"]) if world.is_root else "rank 0 refused the run")
    from pathlib import Path

    return RunDir(Path(str(answer["path"])), str(answer["run_id"]), bool(answer["resumed"]))


def _leave(world: World, code: int) -> int:
    if world.size > 1:
        world.abort(code)
    return code

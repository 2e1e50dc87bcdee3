"""The entry point: `python -m spmdrl.train CONFIG.py [--field value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spmdrl.cli import answer_errors
from spmdrl.config import (
    EXIT_BAD_INPUT,
    EXIT_STOPPED,
    AlgoConfig,
    Config,
    ConfigError,
    from_json,
    load,
    read_file,
    to_json,
)
from spmdrl.envs.ids import check_id
from spmdrl.library import training
from spmdrl.library.training import Result
from spmdrl.parallel.ending import hand_over
from spmdrl.parallel.job_folder import start_folder
from spmdrl.parallel.process import prepare_run
from spmdrl.parallel.roles import check_ranks, ranks_of_roles
from spmdrl.parallel.spawn import spawn
from spmdrl.parallel.topology import Topology, auto_ranks, detect
from spmdrl.runtime.rundir import check_run_dir
from spmdrl.runtime.signals import StopRequest
from spmdrl.runtime.validate import check_extras, validate
from spmdrl.runtime.warm_start import check_init_from
from spmdrl.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from spmdrl.parallel.world import World

__all__ = ["main"]

CONFIG_LIMIT_S = 600.0  # for a config file: the other ranks wait, and have no limit from it yet


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    """Train, or resume a run; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    stop = StopRequest().listen()  # first of all: an early signal would kill the process
    topology = detect()
    watchdog = Watchdog(topology.rank, topology.size, start_folder())
    if topology.size > 1:
        watchdog.start()
    from spmdrl.parallel.world import connect  # numpy and MPI load under the watchdog's eyes

    world = connect(topology)
    watchdog.enter("config" if world.is_root else "start", 0, CONFIG_LIMIT_S)
    config = shared_config(argv, topology, world)
    watchdog.enter("start", 0, float("inf"))
    ranks = ranks_to_start(config, topology)
    if ranks > 1:
        print(f"starting {ranks} ranks by mpirun; they load Python and MPI", flush=True)
        return spawn(ranks, "spmdrl.train", argv)
    if topology.is_root:
        print(first_words(config, topology), flush=True)
    prepare_run(config, topology)
    from spmdrl.runtime.session import run_session  # jax from here on

    code = run_session(config, topology, world, stop, watchdog, argv)
    return hand_over(code, topology.is_root) if code == EXIT_STOPPED else code


def first_words(config: Config, topology: Topology) -> str:
    """What the next seconds are for."""
    who = f"{topology.size} ranks are connected: " if topology.size > 1 else ""
    return f"{who}loading jax, then making {config.env.num_envs} environments of {config.env.id}"


def shared_config(argv: Sequence[str], topology: Topology, world: World) -> Config:
    """Rank 0 reads and checks the config; the others receive it, or its refusal, as JSON.

    They execute the config file too, for what it imports and defines: an algorithm or an
    environment of the user's own must be known on every rank.
    """
    answer: dict[str, Any] = {}
    if world.is_root:
        try:
            config = checked_config(argv, topology)
            answer = {"config": to_json(config)}
        except ConfigError as error:
            answer = {"error": str(error)}
        except SystemExit as leaving:  # tyro has shown its help, or what was wrong
            answer = {"exit": leaving.code}
    answer = world.broadcast_json(answer)
    if "exit" in answer:
        raise SystemExit(answer["exit"])
    if "error" in answer:
        raise ConfigError(answer["error"]) if world.is_root else SystemExit(EXIT_BAD_INPUT)
    own = own_algorithm(argv, config if world.is_root else None, world)
    return from_json(answer["config"], own)


def own_algorithm(argv: Sequence[str], read: Config | None, world: World) -> type[AlgoConfig]:
    """The class that the config file gives on this rank; `read` where it was executed already.

    All ranks learn of one that cannot execute it, such as one on a host without the file: the
    others would wait for it.
    """
    failed = ""
    try:
        read = read or read_file(argv[0])
    except ConfigError as error:
        failed = str(error)
    for rank, reason in enumerate(world.gather_json(failed)):
        if reason:
            refusal = ConfigError(f"rank {rank}: {reason}")
            raise refusal if world.is_root else SystemExit(EXIT_BAD_INPUT)
    assert read is not None
    return type(read.algo)


def ranks_to_start(config: Config, topology: Topology) -> int:
    """0 where a launcher has started them already."""
    if topology.size > 1:
        return 0
    if config.learners > 0:
        return ranks_of_roles(config)
    return auto_ranks(config) if config.nprocs == "auto" else config.nprocs


def checked_config(argv: Sequence[str], topology: Topology) -> Config:
    config = load(argv)
    if topology.size > 1 and config.nprocs not in (1, topology.size, "auto"):
        raise ConfigError(
            f"nprocs is {config.nprocs}, but {topology.launcher} has started {topology.size} "
            "ranks already; leave --nprocs out"
        )
    if topology.size > 1:
        check_ranks(config, topology.size, topology.launcher)
    else:
        check_ranks(config, ranks_to_start(config, topology), "--nprocs")
    validate(config, max(topology.size, ranks_to_start(config, topology)), max(1, config.devices))
    check_id(config.env)
    check_extras(config)
    check_run_dir(config)
    check_init_from(config)
    return config


class _Callable(ModuleType):
    """`spmdrl.train(config)`: what scripts call has the name of this module."""

    def __call__(self, config: Config | str | Path, **changes: Any) -> Result:
        return training.train(config, **changes)


if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__].__class__ = _Callable

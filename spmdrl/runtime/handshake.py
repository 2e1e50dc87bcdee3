"""Before the first collective of the training: are all ranks here, and are they the same?"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jaxlib import _jax

from spmdrl.config import Config
from spmdrl.parallel.ids import ids_of_ranks
from spmdrl.parallel.roles import ROLE_MARK, Layout, role_of
from spmdrl.parallel.topology import LaunchError, Topology
from spmdrl.parallel.world import World
from spmdrl.runtime.provenance import find_code
from spmdrl.runtime.rundir import RunDir, open_run, versions

__all__ = ["handshake", "share_run", "start_jax_distributed"]


def handshake(
    config: Config, world: World, argv: Sequence[str], layout: Layout | None = None
) -> list[str]:
    """Compare what must be the same on all ranks, before the first collective of the training.

    Returns a line about each rank. Raises LaunchError that names the rank and the difference.
    """
    devices = [d for d in jax.local_devices() if d.process_index == jax.process_index()]
    packages = {k: v for k, v in versions().items() if k != "platform"}
    mine = {
        "role": role_of(config, world.rank),
        "meant": os.environ.get(ROLE_MARK, ""),
        "command line": list(argv),
        "versions": packages,
        "devices": [devices[0].platform, config.devices or len(devices)],
        "host": socket.gethostname(),
        "ready_s": world.ready_s,
    }
    ranks = world.assemble(mine, config.sync.start_timeout_s)
    for rank, other in enumerate(ranks):
        if other["meant"] not in ("", other["role"]):
            raise LaunchError(
                f"rank {rank} on {other['host']} was started as {other['meant']}, but is "
                f"{other['role'] or 'both'} by --learners {config.learners}; learners come first"
            )
        for what in ("command line", "versions", "devices"):
            if what == "devices" and other["role"] == "actor":
                continue  # a learner's may be others
            if other[what] != ranks[0][what]:
                raise LaunchError(
                    f"rank {rank} on {other['host']} and rank 0 on {ranks[0]['host']} have "
                    f"different {what} (phase start): "
                    f"{differences(other[what], ranks[0][what])}. Start all "
                    "ranks with the same command from the same environment"
                )
    return [
        f"rank {i}/{world.size} on {r['host']}: {part}, MPI ready in {r['ready_s']:.1f} s"
        for i, (r, part) in enumerate(zip(ranks, parts(config, ranks, layout), strict=True))
    ]


def parts(config: Config, ranks: Sequence[Any], layout: Layout | None) -> list[str]:
    """What each rank has, and where some only act, its role."""
    having = [f"{r['devices'][1]} {r['devices'][0]} device(s)" for r in ranks]
    if layout is None:
        envs = [len(ids) for ids in ids_of_ranks(config, len(ranks))]
        return [f"{devices}, {n} environment(s)" for devices, n in zip(having, envs, strict=True)]
    found = []
    for rank in range(layout.size):
        ids, acts = layout.ids(rank), layout.role(rank) == "actor"
        role = f"actor of rank {layout.learner_of(rank)}" if acts else "learner"
        where = "cpu" if acts else having[rank]
        found.append(f"{role}, environments {ids.start} to {ids.stop - 1}, {where}")
    return found


def differences(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict):
        odd = [k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)]
        return "; ".join(f"{k} {mine.get(k)} against {theirs.get(k)}" for k in sorted(odd))
    return f"{mine} against {theirs}"


def start_jax_distributed(topology: Topology, world: World) -> None:
    """One jax over all ranks; rank 0 says where it can be reached."""
    address = None
    here = topology.local_size == topology.size
    if world.is_root:
        host = "127.0.0.1" if here else socket.gethostname()
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = f"{socket.gethostbyname(host)}:{probe.getsockname()[1]}"
    address = world.broadcast_json(address)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By itself the coordinator, which asks nobody who he is, would listen on every interface.
    bind = address if here else None
    if here:
        _keep_gloo_on_loopback()
    jax.distributed.initialize(address, world.size, world.rank, coordinator_bind_address=bind)


def _keep_gloo_on_loopback() -> None:
    """Else it listens where the name of this host leads, which may be a network.

    jax makes it without a way to say so; a version that makes it otherwise is left alone.
    """
    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None:
        _jax.make_gloo_tcp_collectives = partial(make, hostname="127.0.0.1")


def share_run(config: Config, world: World) -> RunDir:
    """Rank 0 opens the run directory and tells the others; its refusal ends everyone."""

    def opened() -> dict[str, Any]:
        run = open_run(config, find_code(config))
        return asdict(run) | {"path": str(run.path)}

    found = world.from_root(opened)
    notes, changed = tuple(found["notes"]), tuple(found["changed_code"])
    return RunDir(Path(found["path"]), found["run_id"], found["resumed"], notes, changed)

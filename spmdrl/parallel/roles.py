"""Ranks that only learn and ranks that only act: who is what, and for whom.

Nothing here imports jax, so that a layout that cannot work is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from spmdrl.config import Config, ConfigError
from spmdrl.parallel.ids import ids_of_ranks, shards_in, share_out, split_ids
from spmdrl.parallel.topology import Topology

__all__ = [
    "ROLE_MARK", "Layout", "Role", "check_ranks", "layout_of", "learners_here", "ranks_of_roles",
    "role_of",
]  # fmt: skip

ROLE_MARK = "SPMDRL_ROLE"  # what a list of hosts has meant this rank to be
Role = Literal["", "learner", "actor"]  # of a rank that does both: no name


@dataclass(frozen=True)
class Layout:
    """The first ranks learn, the others act, each for the learner that has its environments."""

    learned: tuple[range, ...]  # environments of each learner
    acted: tuple[range, ...]  # and of each actor

    @property
    def learners(self) -> int:
        return len(self.learned)

    @property
    def size(self) -> int:
        return len(self.learned) + len(self.acted)

    def role(self, rank: int) -> Role:
        return "learner" if rank < self.learners else "actor"

    def ids(self, rank: int) -> range:
        """The environments that this rank learns from, or that it steps."""
        return (*self.learned, *self.acted)[rank]

    def learner_of(self, actor: int) -> int:
        """The rank that learns from this actor."""
        first = self.ids(actor).start
        return next(rank for rank, ids in enumerate(self.learned) if first in ids)

    def actors_of(self, learner: int) -> list[int]:
        """The ranks that act for this learner, in order of their environments."""
        actors = range(self.learners, self.size)
        return [rank for rank in actors if self.ids(rank).start in self.learned[learner]]


def layout_of(config: Config, ranks: int) -> Layout | None:
    """None where every rank does both. Raises ConfigError for what cannot be shared out."""
    if not config.learners:
        _refuse_leftovers(config)
        return None
    actors = ranks - config.learners
    if actors < 1:
        raise ConfigError("no rank is left to act; leave --learners out for ranks that do both")
    if config.sync.strategy != "allreduce":
        raise ConfigError(
            f"roles go with allreduce between the learners, not with sync.strategy "
            f"{config.sync.strategy}; leave --sync.strategy out"
        )
    if config.eval.every:
        raise ConfigError(
            "eval.every plays on rank 0, which only learns and makes no environments; leave it "
            "out, and play checkpoints by spmdrl.evaluate"
        )
    learned = ids_of_ranks(config, config.learners)
    acted = _by_sizes(config, actors) if config.actor_envs else _evenly(config, learned, actors)
    layout = Layout(tuple(learned), tuple(acted))
    _check_shards(config, layout)
    _check_borders(config, layout)
    return layout


def _refuse_leftovers(config: Config) -> None:
    for name in ("actors", "actor_envs"):
        if getattr(config, name):
            raise ConfigError(f"{name} has no effect without --learners; add --learners 1")


def _evenly(config: Config, learned: list[range], actors: int) -> list[range]:
    """Each learner's environments among its share of the actors."""
    if actors < len(learned):
        raise ConfigError(
            f"{len(learned)} learners need an actor each, but {actors} rank(s) are left to act; "
            f"nearest: --learners {actors}"
        )
    teams = split_ids(actors, len(learned))
    for ids, team in zip(learned, teams, strict=True):
        if len(team) > len(ids):
            raise ConfigError(
                f"{len(team)} actors share {len(ids)} environments; nearest: env.num_envs "
                f"{len(team) * len(learned)}, or fewer actors"
            )
    return [
        block
        for ids, team in zip(learned, teams, strict=True)
        for block in share_out(config, ids, len(team))
    ]


def _by_sizes(config: Config, actors: int) -> list[range]:
    sizes, envs = config.actor_envs, config.env.num_envs
    if len(sizes) != actors:
        raise ConfigError(f"actor_envs has {len(sizes)} numbers for {actors} actors")
    if sum(sizes) != envs:
        raise ConfigError(f"actor_envs add up to {sum(sizes)}, env.num_envs is {envs}")
    return [range(a, b) for a, b in pairwise((0, *accumulate(sizes)))]


def _check_borders(config: Config, layout: Layout) -> None:
    """An actor has one learner, and a learner at least one actor."""
    for rank in range(layout.learners, layout.size):
        ids, learner = layout.ids(rank), layout.learner_of(rank)
        if ids.stop > layout.learned[learner].stop:
            raise ConfigError(
                f"actor_envs {_listed(config)}: the actor of rank {rank} has environments "
                f"{ids.start} to {ids.stop - 1}, but rank {learner} learns from "
                f"{layout.learned[learner].start} to {layout.learned[learner].stop - 1}; let the "
                "numbers of each learner's actors add up to its environments"
            )


def _check_shards(config: Config, layout: Layout) -> None:
    if not config.sync.deterministic:
        return
    shard = config.env.num_envs // config.sync.shards
    odd = [len(ids) for ids in layout.acted if len(ids) % shard]
    if odd:
        raise ConfigError(
            f"actor_envs {odd[0]} is not a multiple of the {shard} environments of a shard "
            f"(env.num_envs / sync.shards), which stay together in deterministic mode"
        )
    # A loop over one shard alone is unrolled by XLA, with other bits.
    if any(shards_in(config, len(ids)) < 2 for ids in layout.acted):
        most = -(-len(layout.acted) // layout.learners)  # actors of a learner
        wanted = 2 * most * layout.learners
        remedy = f"--sync.shards {wanted}" if not config.actor_envs else f"at least {2 * shard}"
        raise ConfigError(f"every actor needs two shards: {remedy}")


def _listed(config: Config) -> str:
    return " ".join(map(str, config.actor_envs))


def ranks_of_roles(config: Config) -> int:
    """How many ranks to start on this machine for a config with roles."""
    if isinstance(config.nprocs, int) and config.nprocs > 1:
        return config.nprocs
    if config.actors == 0:
        raise ConfigError(
            f"learners is {config.learners}, but nobody acts; add --actors N, or start the ranks "
            "by mpirun or srun: those after the learners act"
        )
    return config.learners + config.actors


def check_ranks(config: Config, ranks: int, starter: str) -> None:
    """Raise ConfigError unless so many ranks were asked for; `starter` is who started them."""
    wanted = config.learners + config.actors
    if config.learners > 0 and config.actors > 0 and wanted != ranks:
        raise ConfigError(
            f"{config.learners} learners and {config.actors} actors are {wanted} ranks, but "
            f"{starter} has started {ranks}; leave --actors out, and all other ranks act"
        )


def role_of(config: Config, rank: int) -> Role:
    """Of a rank of this run."""
    if not config.learners:
        return ""
    return "learner" if rank < config.learners else "actor"


def learners_here(config: Config, topology: Topology) -> Topology:
    """The topology as its learners see it: they alone share this machine's accelerators."""
    if not config.learners:
        return topology
    first = topology.rank - topology.local_rank
    here = min(config.learners, first + topology.local_size) - first
    return replace(topology, local_size=max(1, here))

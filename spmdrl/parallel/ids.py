"""Which environments belong to whom: contiguous blocks of global ids.

Nothing here imports jax.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmdrl.config import Config

__all__ = ["WHOLE_VECTORS", "ids_of_ranks", "shards_in", "share_out", "split_ids"]

WHOLE_VECTORS = 8  # rows; a network's last bits are the same for every multiple of so many


def split_ids(num_envs: int, parts: int) -> list[range]:
    """Contiguous blocks of global ids, as even as possible, the longer ones first."""
    size, longer = divmod(num_envs, parts)
    ends = [size * i + min(i, longer) for i in range(parts + 1)]
    return [range(ends[i], ends[i + 1]) for i in range(parts)]


def ids_of_ranks(config: Config, ranks: int) -> list[range]:
    """The environments of each rank, as even as possible."""
    return share_out(config, range(config.env.num_envs), ranks)


def share_out(config: Config, ids: Sequence[int], parts: int) -> list[range]:
    """These consecutive environments in as many blocks, as even as possible."""
    size, first = _smallest_block(config, len(ids), parts), ids[0]
    blocks = split_ids(len(ids) // size, parts)
    return [range(first + block.start * size, first + block.stop * size) for block in blocks]


def _smallest_block(config: Config, envs: int, parts: int) -> int:
    """Environments that stay together: a shard, or where parts are uneven anyway, whole vectors."""
    if config.sync.deterministic:
        return config.env.num_envs // config.sync.shards
    enough = envs % WHOLE_VECTORS == 0 and envs // WHOLE_VECTORS >= parts
    return WHOLE_VECTORS if envs % parts and enough else 1


def shards_in(config: Config, envs: int) -> int:
    """How many shards so many environments are; all of them are one without deterministic."""
    if not config.sync.deterministic:
        return 1
    return envs * config.sync.shards // config.env.num_envs

"""Batches of environments, one file per backend. Light to import: simulators load on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spmdrl.config import Config

if TYPE_CHECKING:
    from spmdrl.envs.base import EnvBatch

__all__ = ["make_env"]


def make_env(
    config: Config,
    env_ids: Sequence[int],
    threads: int = 0,
    generation: int = 0,
    batches: int = 1,
) -> EnvBatch:
    """The environments with these global ids, as the config's policy sees them; `batches` of a
    device share its worker processes."""
    from spmdrl.envs.view import ViewedBatch, make_view

    batch = _make_batch(config, env_ids, threads, generation, batches)
    view = make_view(config, batch.spec)
    return batch if view.is_plain else ViewedBatch(batch, view)


def _make_batch(
    config: Config, env_ids: Sequence[int], threads: int, generation: int, batches: int
) -> EnvBatch:
    from spmdrl.envs.base import env_seeds

    options = dict(config.env.options)
    if config.env.backend == "jax":
        from spmdrl.envs.jax_backend import JaxBatch

        return JaxBatch(config.env.id, config.seed, generation, env_ids, options)
    seeds = env_seeds(config.seed, env_ids, generation)
    if config.env.backend == "envpool":
        from spmdrl.envs.envpool_backend import EnvpoolBatch

        return EnvpoolBatch(config.env.id, seeds, threads, options)
    from spmdrl.envs.gymnasium_backend import GymnasiumBatch

    return GymnasiumBatch(config.env, env_ids, seeds, threads, batches)

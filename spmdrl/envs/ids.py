"""Which environment ids exist, answered without loading a simulator."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

from spmdrl.config import ConfigError, EnvConfig, suggest

__all__ = ["check_id", "envpool_ids", "write_envpool_ids"]

IDS_FILE = Path(__file__).with_name("envpool_ids.txt")


def check_id(config: EnvConfig) -> None:
    """Raise ConfigError for an id that the chosen backend does not know."""
    if config.backend == "envpool":
        _check_envpool(config.id)
    elif config.backend == "jax":
        from spmdrl.envs.jax_libraries import check_jax_id

        check_jax_id(config.id)
    else:
        _check_gymnasium(config.id)


def envpool_ids() -> list[str]:
    """Every id of the installed envpool, from a list where that is of the installed version.

    Importing envpool takes seconds, too long to answer a typo.
    """
    version, *ids = IDS_FILE.read_text().split()
    if version == importlib.metadata.version("envpool"):
        return ids
    import envpool

    return sorted(envpool.list_all_envs())


def write_envpool_ids() -> None:
    """Renew the list, after an upgrade of envpool."""
    import envpool

    IDS_FILE.write_text("\n".join([envpool.__version__, *sorted(envpool.list_all_envs())]) + "\n")


def _check_envpool(env_id: str) -> None:
    ids = envpool_ids()
    if env_id not in ids:
        raise ConfigError(
            f"env.id {env_id!r} is not an envpool environment{suggest(env_id, ids)} "
            "(any other Gymnasium environment: --env.backend gymnasium)"
        )


def _check_gymnasium(env_id: str) -> None:
    import gymnasium as gym

    module, _, name = env_id.rpartition(":")
    try:
        if module:  # "package:Name-v0" registers its environments when it is imported
            importlib.import_module(module)
        gym.spec(name)
    except ImportError as error:
        raise ConfigError(f"env.id {env_id!r}: {error}") from error
    except gym.error.Error as error:
        close = suggest(name, gym.registry.keys())
        raise ConfigError(f"env.id {env_id!r} is not a Gymnasium environment{close}") from error

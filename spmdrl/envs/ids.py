"""Which environment ids exist, answered without loading a simulator."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from pathlib import Path

from spmdrl.config import ConfigError, EnvConfig, suggest

__all__ = [
    "check_id",
    "envpool_families",
    "envpool_ids",
    "registered_families",
    "write_envpool_ids",
]

IDS_FILE = Path(__file__).with_name("envpool_ids.txt")


def check_id(config: EnvConfig) -> None:
    """Raise ConfigError for an id that the chosen backend does not know."""
    if config.backend == "envpool":
        _check_envpool(config.id)
    else:
        _check_gymnasium(config.id)


def envpool_ids() -> list[str]:
    """Every id of the installed envpool."""
    return sorted(envpool_families())


@functools.cache
def envpool_families() -> dict[str, str]:
    """envpool's module of every id, from a list where that is of the installed version.

    Importing envpool takes seconds, too long to answer a typo.
    """
    version, *lines = IDS_FILE.read_text().splitlines()
    if version != importlib.metadata.version("envpool"):
        return registered_families()
    return {env_id: module for module, *ids in map(str.split, lines) for env_id in ids}


def registered_families() -> dict[str, str]:
    """The same, from envpool itself."""
    import envpool.entry  # noqa: F401 (all families)
    from envpool.registration import registry

    return {env_id: entry[0] for env_id, entry in registry.specs.items()}


def write_envpool_ids() -> None:
    """Renew the list, after an upgrade of envpool."""
    families: dict[str, list[str]] = {}
    for env_id, module in sorted(registered_families().items()):
        families.setdefault(module, []).append(env_id)
    lines = [" ".join([module, *ids]) for module, ids in sorted(families.items())]
    version = importlib.metadata.version("envpool")
    IDS_FILE.write_text("\n".join([version, *lines]) + "\n")


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

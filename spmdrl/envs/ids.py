"""Which environment ids exist, answered without loading a simulator."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Literal

from spmdrl.config import ConfigError, EnvConfig, suggest
from spmdrl.envs.jax_libraries import LIBRARIES, check_jax_id, listed_names, split_id

__all__ = [
    "Backend", "check_id", "envpool_families", "envpool_ids", "likely_backend", "listed_ids",
    "registered_families", "write_envpool_ids",
]  # fmt: skip

Backend = Literal["envpool", "gymnasium", "jax"]

IDS_FILE = Path(__file__).with_name("envpool_ids.txt")


def check_id(config: EnvConfig) -> None:
    """Raise ConfigError for an id, or a wrapper, that the chosen backend does not know."""
    if config.backend == "gymnasium":
        _check_gymnasium(config)
        return
    if config.wrap:
        raise ConfigError(
            f"env.wrap {config.wrap!r} needs --env.backend gymnasium: {config.backend} takes no "
            "wrappers"
        )
    if config.backend == "jax":
        check_jax_id(config.id)
    else:
        _check_envpool(config.id)


def listed_ids() -> list[str]:
    """Every id of envpool and of the JAX libraries, whether they are installed or not."""
    names = {library: listed_names(library)[1] for library in LIBRARIES}
    return [*envpool_ids(), *(f"{library}:{name}" for library in names for name in names[library])]


def likely_backend(env_id: str) -> Backend:
    """Where nobody has named one: the first that may know the id."""
    if split_id(env_id)[0] in LIBRARIES:
        return "jax"
    return "envpool" if env_id in envpool_families() else "gymnasium"


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
    if env_id in ids:
        return
    if split_id(env_id)[0] in LIBRARIES:
        raise ConfigError(
            f"env.id {env_id!r} is not an envpool environment; write --env.backend jax for it"
        )
    raise ConfigError(
        f"env.id {env_id!r} is not an envpool environment{suggest(env_id, ids)} "
        "(any other Gymnasium environment: --env.backend gymnasium)"
    )


def _check_gymnasium(config: EnvConfig) -> None:
    from spmdrl.envs.making import find_entry, find_wrapper
    from spmdrl.envs.origin import wrapper_names

    find_entry(config.id)
    for name in wrapper_names(config.wrap):
        find_wrapper(name)

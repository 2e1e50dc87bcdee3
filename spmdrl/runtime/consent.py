"""What may be executed for a run that somebody else may have made.

A run directory names the user's environment and network, and its `code.json` the config file that
brings them.
Neither is executed or imported unless the user asks for it: by `--config FILE`, his own file, or by
`--trust`, whatever the run names.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from spmdrl.config import Config, ConfigError, EnvConfig, own_code, read_file
from spmdrl.envs.ids import check_id
from spmdrl.envs.origin import named_code, needs_own_code
from spmdrl.runtime.provenance import (
    Code,
    changed_since,
    code_named,
    find_code,
    needs_code,
    read_code,
)

__all__ = ["Consent", "bring_code", "trust_words"]


@dataclass(frozen=True)
class Consent:
    """What the user has allowed; by default nothing."""

    config: str | None = None
    """A config file of his own."""
    trust: bool = False
    """Whatever the run names."""
    command: str = "the same command"
    """As he has typed it, to be repeated with what is missing."""
    announces: bool = True
    """Whether this process says what it executes; one of a job is enough."""

    @property
    def with_trust(self) -> str:
        """What to type for it."""
        return f"{self.command} --trust"

    @property
    def with_config(self) -> str:
        return f"{self.command} --config FILE.py"

    @property
    def words(self) -> list[str]:
        """The same consent for another command."""
        return [*(["--config", self.config] if self.config else []), *["--trust"] * self.trust]


def bring_code(
    config: Config, code: Code | None, where: str | Path, consent: Consent
) -> Code | None:
    """Execute what environments and network need, as far as the user has allowed it, and check the
    id of the environments.

    `code` is what `where`, a run directory or a recording, says about it. Returns what is to be
    recorded in its place. Where consent is missing, ConfigError has the command to paste.
    """
    needed = needs_code(config) or (code is not None and code.needed)
    if consent.config:
        _execute_given(consent.config, config, where, consent)
    elif consent.trust:
        _execute_recorded(config, code, where, consent)
    elif needed:
        raise ConfigError(_refusal(config, code, where, consent))
    _check_id(config.env, needed, consent)
    return find_code(config) if consent.config or consent.trust else code


def trust_words(run_dir: str | Path) -> list[str]:
    """What a command on this run needs to be given so that it works."""
    code = read_code(run_dir)
    return ["--trust"] if code is not None and code.needed else []


# ---------------------------------------------------------------------------------------------
# Executing


def _execute_given(file: str, config: Config, where: str | Path, consent: Consent) -> None:
    """The user's file; the run may then have what this names as well, and nothing else."""
    own = read_file(file)
    unknown = set(code_named(config)) - set(code_named(own))
    if unknown and not consent.trust:
        raise ConfigError(
            f"{where} uses {_listed(sorted(unknown))}, which {file} does not name; "
            f"to import that too: {consent.with_trust}"
        )


def _execute_recorded(
    config: Config, code: Code | None, where: str | Path, consent: Consent
) -> None:
    own_code.search_in_cwd()
    named = [f"importing {_listed(code_named(config))}"] if code_named(config) else []
    if code is None or code.config is None:
        if needs_code(config) and not named:
            raise ConfigError(_refusal(config, None, where, consent))
        _announce(named, [], consent)
        return
    file = code.config.file
    if not _is_there(file):
        raise ConfigError(_refusal(config, code, where, consent))
    own_code.search_in(folder for folder in code.folders if Path(folder).is_dir())
    _announce([f"executing {file!r}", *named], changed_since(code), consent)
    try:
        read_file(file)
    except ConfigError as error:
        raise ConfigError(f"{error}; another one in its place: {consent.with_config}") from error


def _check_id(env: EnvConfig, needed: bool, consent: Consent) -> None:
    try:
        check_id(env)
    except ConfigError as error:
        if not needed:
            raise
        raise ConfigError(
            f"{error}; the config file that brings it can be named: {consent.with_config}"
        ) from error


def _announce(what: list[str], changed: list[str], consent: Consent) -> None:
    if what and consent.announces:
        since = f"; changed since the run was trained: {_listed(changed)}" if changed else ""
        print(f"spmdrl: {' and '.join(what)}{since}", file=sys.stderr, flush=True)


def _is_there(file: str) -> bool:
    """Absolute, because a relative one would depend on where the user happens to be."""
    return Path(file).is_absolute() and Path(file).is_file()


# ---------------------------------------------------------------------------------------------
# Words. Names are quoted: a stranger may have put anything into them.


def _refusal(config: Config, code: Code | None, where: str | Path, consent: Consent) -> str:
    uses = f"{where} uses {_whose(config)}"
    if code is not None and code.config is not None:
        file = code.config.file
        if not _is_there(file):
            gone = f"{uses} from {file!r}, which is not there"
            return f"{gone}; name the file that brings it: {consent.with_config}"
        return f"{uses} from {file!r}; to execute that code: {consent.with_trust}"
    if code_named(config):
        return f"{uses}; to import that code: {consent.with_trust}"
    unsaid = f"{uses}, and does not say where it came from"
    return f"{unsaid}; name the config file that brings it: {consent.with_config}"


def _whose(config: Config) -> str:
    """What of the run is the user's own."""
    network = own_code.own_network(config.net.torso)
    parts = [f"the network {network!r}"] if network else []
    if needs_own_code(config.env) or not parts:
        parts = [_environment(config.env), *parts]
    return " and ".join(parts)


def _environment(env: EnvConfig) -> str:
    wrappers = [name for name in named_code(env) if name != env.id]
    return f"the environment {env.id!r}" + (f" in {_listed(wrappers)}" if wrappers else "")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))

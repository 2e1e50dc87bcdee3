"""How commands declare and read their options: one frozen dataclass each.

The first argument is positional, the rest are flags; the docstrings are the help.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from spmdrl.config import ConfigError
from spmdrl.config.typed_words import as_typed
from spmdrl.parallel.topology import CHILD_MARK, detect
from spmdrl.runtime.consent import Consent
from spmdrl.runtime.hints import suggested

__all__ = [
    "CodeOptions", "ConfigFile", "PlayOptions", "RunPath", "check_positive", "given_words", "parse",
    "parse_with_config",
]  # fmt: skip

T = TypeVar("T")

RunPath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
ConfigFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG.py")]

_one_of = tyro.conf.create_mutex_group(required=False, title="how actions are chosen")


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """For commands on what an earlier run has left, which may need code of the user's."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.py")] = None
    """Your config file, executed first: it brings the run's environment, if that is your own."""
    trust: bool = False
    """Execute the config file that the run was trained with, and import what the run names."""

    def consent(self, command: str, words: Sequence[str]) -> Consent:
        """`words` are those of the command line, to be suggested again with what is missing."""
        # A process that starts ranks by --nprocs has said already what they are about to execute.
        announces = detect().is_root and CHILD_MARK not in os.environ
        return Consent(self.config, self.trust, suggested(command, *words), announces)


@dataclass(frozen=True, kw_only=True)
class PlayOptions(CodeOptions):
    """What all commands that play a trained policy have in common."""

    checkpoint: Annotated[str, tyro.conf.arg(metavar="latest|best|N")] = "latest"
    """Which checkpoint is played: the latest, the best (by evaluation in training where there
    was any, else by training return), or that of update N."""
    deterministic: Annotated[bool, _one_of] = False
    """Take the most likely action."""
    stochastic: Annotated[bool, _one_of] = False
    """Sample actions."""

    def takes_the_mode(self, otherwise: bool) -> bool:
        """Whether actions are the most likely ones; `otherwise` if the user has not said."""
        return self.deterministic or (otherwise and not self.stochastic)


def parse(
    options: type[T],
    command: str,
    argv: Sequence[str] | None,
    renamed: Mapping[str, str] | None = None,
) -> T:
    """The options from the command line. Flags in `renamed` are answered with today's spelling."""
    words = given_words(argv)
    for old, new in (renamed or {}).items():
        if any(word.partition("=")[0] == old for word in words):
            raise ConfigError(f"{command} has no {old} any more; write {new}")
    # A plain flag needs no --no-flag beside it: none of the commands' flags is on by itself.
    plain = (tyro.conf.FlagCreatePairsOff,)
    kinds = typing.get_type_hints(options, include_extras=True)
    words = as_typed(words, kinds, off=lambda _: [])
    return tyro.cli(options, args=words, prog=_program(command), config=plain)


def parse_with_config(
    options: type[T], command: str, argv: Sequence[str] | None
) -> tuple[T, list[str]]:
    """The command's own options, and the words after CONFIG.py that are the trainer's."""
    kinds = typing.get_type_hints(options)
    own = {
        "--" + field.name.replace("_", "-"): _words_of(kinds[field.name])
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
        if field.name != "config"  # which is positional
    }
    words, trainer = given_words(argv), []
    mine: list[str] = []
    while words:
        word = words.pop(0)
        name, has_value, _ = word.partition("=")
        if name in ("-h", "--help"):
            return parse(options, command, ["--help"]), []
        if name in own:
            count = 0 if has_value else own[name]
            mine += [word, *words[:count]]
            words = words[count:]
        else:
            trainer.append(word)
    # The config file comes before the flags, as for `train`; a value of a flag is not one.
    config = trainer[:1] if trainer and not trainer[0].startswith("-") else []
    return parse(options, command, [*config, *mine]), trainer[len(config) :]


def _words_of(kind: Any) -> int:
    """How many words follow an option of this type; one that can be repeated takes a pair."""
    return 2 if typing.get_origin(kind) is tuple else 1


def check_positive(options: object, *names: str) -> None:
    """Raise ConfigError unless each of these fields is None or at least 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")


def given_words(argv: Sequence[str] | None) -> list[str]:
    """Those of the command line, unless a caller has brought others."""
    return list(sys.argv[1:] if argv is None else argv)


def _program(command: str) -> str:
    """As the user has typed it."""
    started = Path(sys.argv[0])
    by_script = started.stem == "spmdrl" or started.parts[-2:] == ("spmdrl", "__main__.py")
    return f"spmdrl {command}" if by_script else f"python -m spmdrl.{command}"

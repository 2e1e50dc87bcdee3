"""What an environment is, and which there are: `python -m spmdrl.envs ID`."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError, EnvConfig, load, own_code, suggest, with_flags
from spmdrl.config.rules import check_fields
from spmdrl.envs.ids import check_id, likely_backend, listed_ids
from spmdrl.options import parse_with_config
from spmdrl.runtime.env_sheet import Played, Sheet, ask_for_sheet
from spmdrl.runtime.hints import suggested

__all__ = ["main"]

WIDTH, INDENT = 100, 16


@dataclass(frozen=True)
class Options:
    """Describe an environment: spaces, what networks see, time limit, options, a short random play.

    Flags of train, such as --env.backend, --env.options and --net.policy-keys, change what is
    described; so does --env.num-envs, as many are played at the same time.
    """

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID|CONFIG.py")] = ""
    """Environment id, or a config file that names one."""
    list: Annotated[str | None, tyro.conf.arg(metavar="REGEX")] = None
    """List the ids of envpool and of the JAX libraries that match, whatever their case."""
    seconds: float = 2.0
    """How long it is played at random."""


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    options, flags = parse_with_config(Options, "envs", argv)
    if options.list is not None:
        print("\n".join(matching(options.list)))
        return 0
    if options.seconds < 0:
        raise ConfigError(f"seconds is {options.seconds}, but must be at least 0")
    sheet = ask_for_sheet(described_config(options.config, flags), options.seconds)
    words = [options.config, *flags] if options.config.endswith(".py") else words_for(sheet)
    for name, value in [*rows(sheet), ("train", suggested("train", *words))]:
        print(row(name, value))
    return 0


def matching(pattern: str) -> list[str]:
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--list {pattern!r} is not a regular expression: {error}") from error
    ids = listed_ids()
    found = [env_id for env_id in ids if wanted.search(env_id)]
    if not found:
        raise ConfigError(f"no id matches {pattern!r}{suggest(pattern, ids)}")
    return found


def described_config(name: str, flags: Sequence[str]) -> Config:
    """What is to be described: a config file's environment or an id, changed by the flags."""
    if not name:
        raise ConfigError(
            f"name an environment, such as {suggested('envs', 'CartPole-v1')}, or list ids: "
            f"{suggested('envs', '--list', 'REGEX')}"
        )
    if name.endswith(".py"):
        return load([name, *flags])
    own_code.search_in_cwd()  # where a module of the user's may lie
    default = Config(env=EnvConfig(id=name, backend=likely_backend(name)))
    config = with_flags(default, flags, f"spmdrl envs {name}")
    check_fields(config)
    if config.env.backend != "gymnasium":
        check_id(config.env)  # from lists; the child does it for what has to be imported
    elif ":" not in config.env.id:
        check_registered(config.env.id)
    return config


def check_registered(env_id: str) -> None:
    """Nobody has registered anything yet, so a name without a module is a known one or none."""
    import gymnasium as gym

    if env_id not in gym.registry:
        known = [*listed_ids(), *gym.registry]
        raise ConfigError(
            f"there is no environment {env_id!r}{suggest(env_id, known)} "
            "(one of your own is MODULE:CLASS, or in a CONFIG.py)"
        )


# ---------------------------------------------------------------------------------------------
# The sheet


def rows(sheet: Sheet) -> Iterator[tuple[str, str]]:
    yield "environment", sheet.env_id
    yield "backend", f"{sheet.backend} ({sheet.family})"
    yield "observation", "\n".join(sheet.observation)
    yield "networks see", sheet.networks_see
    yield "action", "\n".join(sheet.action)
    yield "action kind", sheet.action_kind
    yield "time limit", f"{sheet.time_limit:,} steps" if sheet.time_limit else "none known"
    yield "options", " ".join(f"{k}={v}" for k, v in sheet.options.items()) or "none"
    yield "random play", random_play(sheet.played)
    if sheet.played.wrong:
        yield "warning", f"not as declared: {sheet.played.wrong}"


def words_for(sheet: Sheet) -> list[str]:
    """Of `train`: what it takes beside a config file."""
    return ["CONFIG.py", "--env.backend", sheet.backend, "--env.id", sheet.env_id]


def random_play(played: Played) -> str:
    ends = "no episode ended"
    if played.episodes:
        ends = f"{played.episodes:,} episodes of {between(played.length)} steps, return "
        ends += between(played.returns)
    return (
        f"{played.steps_per_second:,.0f} steps/s with {played.num_envs} environments; "
        f"reward {between(played.reward)}; {ends}"
    )


def between(ends: Sequence[float]) -> str:
    low, high = (f"{end:,.4g}" if abs(end) < 1e4 else f"{end:,.0f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def row(name: str, value: str) -> str:
    """A name and its value, which may have several lines and is wrapped at blanks only."""
    lines = [
        part
        for line in value.split("\n")
        for part in textwrap.wrap(
            line, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False
        )
    ]
    return f"{name:<{INDENT}}" + ("\n" + " " * INDENT).join(lines)


if __name__ == "__main__":
    sys.exit(main())

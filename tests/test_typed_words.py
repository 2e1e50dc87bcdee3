"""Numbers and switches as people type them, in the config's flags and in those of commands."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from spmdrl.algos import Ppo
from spmdrl.config import ConfigError, load
from spmdrl.config.typed_words import as_typed, check_known
from spmdrl.options import parse
from tests.children import CARTPOLE

KINDS = {
    "count": int, "maybe": int | None, "ranks": int | Literal["auto"], "rate": float,
    "widths": Annotated[tuple[int, ...], "a mark"], "part.flag": bool, "name": str,
    "option": dict[str, bool | int | float | str],
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--count 1e6", "--count 1000000"),
        ("--count=2.5E5", "--count=250000"),
        ("--count 500_000", "--count 500000"),
        ("--count -3", "--count -3"),
        ("--maybe 1e3 --maybe None", "--maybe 1000 --maybe None"),
        ("--ranks 1e1 --ranks auto", "--ranks 10 --ranks auto"),
        ("--rate 1e-3 --rate 1_000", "--rate 1e-3 --rate 1_000"),
        ("--widths 1e2 64 --count 1e0", "--widths 100 64 --count 1"),
        ("--part.flag true --count 1", "--part.flag --count 1"),
        ("--part.flag=False", "--part.no-flag"),
        ("--part.flag off", "--part.no-flag"),
        ("--part.flag", "--part.flag"),
        ("--part.flag maybe", "--part.flag maybe"),  # answered by who knows the fields' names
        ("--part.flag --count 1e1", "--part.flag --count 10"),
        ("--name 1e6 --name=true --name a=1e6", "--name 1e6 --name=true --name a=1e6"),
        ("--option scale 1e6 on true", "--option scale 1e6 on true"),
        ("1e6 --unknown 1e6", "1e6 --unknown 1e6"),
        ("--count", "--count"),
    ],
)
def test_words_are_rewritten_for_the_field_they_belong_to(typed, meant):
    assert as_typed(typed.split(), KINDS) == meant.split()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--count abc", "--count is 'abc', but must be a whole number"),
        ("--count 3.5", "--count is '3.5', but must be a whole number"),
        ("--count 1e-3", "--count is '1e-3', but must be a whole number"),
        ("--count=inf", "--count is 'inf', but must be a whole number"),
        ("--widths 64 wide", "--widths is 'wide', but must be a whole number"),
        ("--rate fast", "--rate is 'fast', but must be a number"),
    ],
)
def test_what_is_no_number_is_answered_in_one_line(typed, said):
    with pytest.raises(ConfigError, match=said):
        as_typed(typed.split(), KINDS)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--cuont 1", "there is no field --cuont; did you mean --count?"),
        ("--flg", "did you mean --part.flag?"),
        ("--zzzzzz=3", "there is no field --zzzzzz; --help lists them all"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(typed, said):
    with pytest.raises(ConfigError) as error:
        check_known(typed.split(), KINDS)
    assert said in str(error.value)


def test_known_flags_in_every_spelling():
    words = [
        "--count",
        "1",
        "--part.flag",
        "--part.no-flag",
        "--part.no_flag",
        "--count=2",
        "--option",
        "x",
        "--help",
    ]
    check_known(words, KINDS)
    check_known(["--free.thing"], KINDS, free=("--free",))


def test_a_config_takes_them():
    config = load(
        [CARTPOLE, "--total-steps", "1e6", "--env.num-envs=1e1", "--net.hidden", "1e2", "64",
         "--env.normalize-obs", "true", "--algo.clip-value", "False", "--seed", "1_0",
         "--env.options", "frame_skip", "4"]
    )  # fmt: skip
    assert isinstance(config.algo, Ppo)
    assert (config.total_steps, config.env.num_envs, config.seed) == (1_000_000, 10, 10)
    assert config.net.hidden == (100, 64)
    assert config.env.normalize_obs
    assert not config.algo.clip_value
    assert config.env.options == {"frame_skip": 4}


@dataclass(frozen=True)
class Options:
    """A command's."""

    count: int = 1
    """So many."""
    loud: bool = False
    """Or not."""


def test_a_command_takes_them():
    assert parse(Options, "x", ["--count", "1e3", "--loud", "true"]) == Options(1000, True)
    assert parse(Options, "x", ["--loud", "false"]) == Options(1, False)
    with pytest.raises(ConfigError, match="--count is 'many'"):
        parse(Options, "x", ["--count", "many"])

"""`--env.options` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig, from_json, load, to_json
from spmdrl.config.option_flags import read_value, take_options
from spmdrl.config.rules import check_fields
from tests.children import succeed

FILE = """
from spmdrl.config import Config, EnvConfig
options = {"episodic_life": True, "frame_skip": 4, "layout": [1, None]}
config = Config(env=EnvConfig(options=options))
"""
SET = {"episodic_life": True, "frame_skip": 4, "layout": [1, None]}


@pytest.fixture
def config_file(tmp_path) -> str:
    file = Path(tmp_path, "with_options.py")
    file.write_text(FILE)
    return str(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-0.5", -0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ('[1, {"a": 2}]', [1, {"a": 2}]),
        ("easy", "easy"),
        ('"4"', "4"),
        ("NaN", "NaN"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_values_are_json_or_text(text, value):
    found = read_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--env.options size=3 mode=hard", {"size": 3, "mode": "hard"}),
        ("--env.options size 3 mode hard", {"size": 3, "mode": "hard"}),
        ("--env.options size=3 --env.options mode=hard", {"size": 3, "mode": "hard"}),
        ("--env.options path /a=b", {"path": "/a=b"}),
        ("--env.options shift -1", {"shift": -1}),
        ("--env.options=size=3", {"size": 3}),
        ("--env.options.size 3", {"size": 3}),
        ("--env.options.frame-skip=2", {"frame_skip": 2}),
        ("--env.options.frame_skip [2]", {"frame_skip": [2]}),
        ("--env.options.quick --seed 3", {"quick": True}),
        ("--env.options.episodic-life false", {"episodic_life": False}),
        ("--env.options.no-episodic-life", {"episodic_life": False}),
    ],
)
def test_options_are_added_to_those_of_the_config_file(flags, changed, config_file):
    rest, options = take_options(["--seed", "4", *flags.split()], SET)
    assert options == SET | changed
    assert rest[:2] == ["--seed", "4"]
    assert load([config_file, *flags.split()]).env.options == SET | changed


def test_the_other_flags_are_left(config_file):
    config = load([config_file, "--env.num-envs", "4", "--env.options", "a=1", "--seed", "9"])
    assert (config.env.num_envs, config.seed, config.env.options) == (4, 9, SET | {"a": 1})
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--env.options size", "size has no value"),
        ("--env.options 3=4", "'3' is not the name of an option"),
        ("--env.options.size 3 4", "takes one value, but '4' follows"),
    ],
)
def test_mistakes_are_named(flags, said):
    with pytest.raises(ConfigError, match=said):
        take_options(flags.split(), {})


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), object()])
def test_what_json_does_not_have_is_refused(value):
    with pytest.raises(ConfigError, match=r"env.options is .* made of what JSON has"):
        check_fields(Config(env=EnvConfig(options={"a": value})))


def test_help_explains_them(config_file):
    said = succeed("-m", "spmdrl.train", config_file, "--help")
    assert "NAME=VALUE" in said
    assert "--env.wrap" in said

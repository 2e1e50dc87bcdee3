"""docs/own_environment.md, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.runtime.consent import Consent, bring_code
from spmdrl.runtime.provenance import Code, Source
from tests.children import CARTPOLE, ROOT
from tests.own_commands import succeeds
from tests.pages import python_blocks, written

PAGE = (ROOT / "docs" / "own_environment.md").read_text()
BLOCKS = python_blocks(PAGE)
SMALL = ("--total-steps", 256, "--env.num-envs", 4, "--algo.num-steps", 32, "--log.panel", "off")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return written(BLOCKS, tmp_path_factory.mktemp("page"))


def test_every_block_of_python_on_the_page_is_a_file():
    assert PAGE.count("```python\n") == len(BLOCKS) == 6


CONFIGS = [name for name, text in BLOCKS.items() if "\nconfig = " in text]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "my_config.py"])
def test_every_config_of_the_page_trains(name, page, tmp_path):
    said = succeeds("train", page / name, *SMALL, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert "2 updates of 128 steps" in said


@pytest.mark.slow
def test_the_commands_of_the_page_work_as_they_stand(page):
    commands = re.findall(r"^python -m spmdrl\.(\w+) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "evaluate", "record", "clone"]
    for name, words in commands:
        succeeds(name, *words.split(), *(SMALL if name == "train" else ()), cwd=page)


def test_the_answer_on_the_page_is_what_is_said():
    shown = re.search(r"\$ python -m spmdrl\.evaluate runs/corridor\nspmdrl: (.*)\n", PAGE)
    assert shown is not None
    code = Code(Source("config file", CARTPOLE, "a"), folders=(), modules=(), needed=True)
    config = Config(env=EnvConfig(id="Corridor-v0", backend="gymnasium"))
    consent = Consent(command="python -m spmdrl.evaluate runs/corridor")
    with pytest.raises(ConfigError) as refusal:
        bring_code(config, code, "runs/corridor", consent)
    said = str(refusal.value).replace(CARTPOLE, "/home/me/project/my_config.py")
    assert said == shown[1]

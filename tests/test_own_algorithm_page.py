"""docs/own_algorithm.md, word for word."""

from __future__ import annotations

import json
import re

import pytest

from tests.children import ROOT
from tests.own_commands import succeeds
from tests.pages import python_blocks, written

PAGE = (ROOT / "docs" / "own_algorithm.md").read_text()
BLOCKS = python_blocks(PAGE)
SMALL = ("--total-steps", 256, "--env.num-envs", 4, "--algo.num-steps", 32, "--log.panel", "off")


def test_every_block_of_python_on_the_page_is_a_file():
    assert PAGE.count("```python\n") == len(BLOCKS) == 2


@pytest.mark.slow
def test_the_commands_of_the_page_work_as_they_stand(tmp_path):
    page = written(BLOCKS, tmp_path / "page")
    commands = re.findall(r"^python -m spmdrl\.(\w+) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "evaluate"]
    for name, words in commands:
        succeeds(name, *words.split(), *(SMALL if name == "train" else ()), cwd=page)
    saved = json.loads((page / "runs" / "penalised" / "config.json").read_text())["algo"]
    assert saved["kl_coef"] == 1.0


@pytest.mark.slow
def test_the_algorithm_from_nothing_learns(tmp_path):
    page = written(BLOCKS, tmp_path / "page")
    words = ("--run-dir", "run", "--log.panel", "off", "--optim.lr", 2e-3)
    succeeds("train", page / "my_reinforce.py", *words, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episode_return_mean"] > 60  # 20 at random

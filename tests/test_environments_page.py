"""docs/environments.md, word for word, and what writes its tables."""

from __future__ import annotations

import re

import pytest

from benchmarks.coverage import environments
from benchmarks.coverage.environments import OTHERS, Trained, as_crash, others_page, page, verdict
from spmdrl.config import read_file
from spmdrl.envs.jax_libraries import LIBRARIES
from spmdrl.runtime.env_sheet import make_sheet
from tests.children import ROOT
from tests.own_commands import succeeds
from tests.pages import python_blocks, written

TEXT = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = python_blocks(TEXT)
SMALL = ("--total-steps", 256, "--env.num-envs", 4, "--algo.num-steps", 32, "--log.panel", "off")


def test_every_block_of_python_on_the_page_is_a_file():
    assert list(BLOCKS) == ["shorter.py", "side_by_side.py", "jax_corridor.py"]
    assert TEXT.count("```python\n") == len(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_environment_of_the_page_has_a_sheet(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(written(BLOCKS, tmp_path))
    config = read_file(str(tmp_path / name))
    sheet = make_sheet(config, 0.0)
    limits = {"shorter.py": 50, "side_by_side.py": None, "jax_corridor.py": 100}
    assert sheet.time_limit == limits[name]
    assert not sheet.played.wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_every_config_of_the_page_trains(name, tmp_path):
    folder = written(BLOCKS, tmp_path / "page")
    said = succeeds("train", folder / name, *SMALL, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert "2 updates of 128 steps" in said
    said = succeeds("envs", folder / name, "--seconds", 0.1, cwd=tmp_path)
    assert f"python -m spmdrl.train {folder / name}" in " ".join(said.split())


def test_the_sheet_on_the_page_is_what_is_said():
    from spmdrl.config import Config
    from spmdrl.envs.__main__ import row, rows

    shown = re.search(r"\$ python -m spmdrl\.envs CartPole-v1\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    said = [row(*pair) for pair in rows(make_sheet(Config(), 0.0)) if pair[0] != "random play"]
    for text in said:
        assert f"{text}\n" in shown[1]
    assert len(said) == 8


def test_the_options_of_atari_have_the_defaults_of_the_page():
    from spmdrl.envs.envpool_backend import declared

    spec = declared("Pong-v5", {})
    have = dict(zip(spec._config_keys, spec._config_values, strict=True))
    section = TEXT.partition("## Atari")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", section, re.MULTILINE)
    named: dict[str, str] = {}
    for names, values in rows:
        named |= zip(re.findall(r"`(\w+)`", names), values.strip().split(", "), strict=True)
    assert len(named) >= 12
    assert {name: str(have[name]).lower() for name in named} == named


# ---------------------------------------------------------------------------------------------
# The tables


def test_every_library_is_tried():
    assert {library for library, *_ in OTHERS} == {*LIBRARIES, "Gymnasium"}


def test_ids_of_other_backends_have_a_row_each():
    look = {"id": "CartPole-v1", "observation": "observation vector 4", "action": "2 choices"}
    trained = [
        Trained("CartPole-v1", "envpool", 1, "not this one"),
        Trained("CartPole-v1", "gymnasium", 0, "4 numbers -> MLP"),
        Trained("brax:ant", "jax", 2, "spmdrl: env.id brax:ant needs the package brax"),
    ]
    lines = others_page({"gymnasium CartPole-v1": look}, trained).splitlines()
    row = "`CartPole-v1` | trains | observation vector 4 | 2 choices | 4 numbers -> MLP |"
    assert f"| Gymnasium | {row}" in lines
    assert "| brax | `brax:ant` | no: env.id brax:ant needs the package brax |  |  |  |" in lines
    assert sum("not tried" in line for line in lines) == len(lines) - 4


def test_families_count_what_was_found():
    sound = {"id": "CartPole-v1", "refused": "", "wrong": "", "action": "2 choices"}
    looks = {
        "CartPole-v1": sound,
        "Pendulum-v1": sound | {"id": "Pendulum-v1", "wrong": "a reward is not finite"},
        "Acrobot-v1": {"id": "Acrobot-v1"} | as_crash({"fault": "raised", "details": "..."}),
    }
    assert [verdict(found) for found in looks.values()] == ["sound", "wrong", "crash"]
    lines = page(looks, [Trained("CartPole-v1", "envpool", 0, "4 numbers -> MLP")]).splitlines()
    seen = "CartPole-v1: trains<br>4 numbers -> MLP<br>action: 2 choices"
    assert f"| classic control | 3 | 1 | 0 | 1 | 1 | {seen} |" in lines
    assert lines[-1].startswith("| **all** | 3 | 1 | 0 | 1 | 1 |")


def test_tables_are_written_between_their_marks(tmp_path, monkeypatch):
    copy = tmp_path / "environments.md"
    copy.write_text(TEXT)
    monkeypatch.setattr(environments, "PAGE", copy)
    for _ in range(2):
        environments.write_into_page("families", "| a |")
        environments.write_into_page("libraries", "| b |")
        environments.write_into_page("nowhere", "| c |")
    text = copy.read_text()
    assert "<!-- families: begin -->\n\n| a |\n\n<!-- families: end -->" in text
    assert "<!-- libraries: begin -->\n\n| b |\n\n<!-- libraries: end -->" in text
    assert "| c |" not in text
    assert text.endswith(TEXT[-200:])

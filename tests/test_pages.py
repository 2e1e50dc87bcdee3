"""What the documents tell a reader to type exists: commands, flags and fields."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from spmdrl import slurm
from spmdrl.cluster.hostfile import HEADER
from spmdrl.config import Config, load
from spmdrl.config.rules import fields_of
from spmdrl.envs.ids import check_id
from spmdrl.options import parse
from spmdrl.reference import ALGORITHMS
from spmdrl.runtime.validate import validate
from tests.children import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHECKED = ("README.md", "faq.md", "slurm.md", "coming_from.md", "concepts.md")
COMMAND = re.compile(
    r"^(?:uv run (?:--extra \w+ )?)?(?:mpirun -np (?P<ranks>\d+) )?"
    r"python -m spmdrl\.(?P<name>\w+)(?P<words>[^#]*)"
)
PARTS = "env|net|algo|optim|sync|log|checkpoint|eval"


def code_of(text: str) -> list[str]:
    """Lines of fenced blocks, and what is between backticks elsewhere."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", rest)]


def commands() -> list[tuple[str, int, list[str]]]:
    """Name, ranks and words of every complete command; examples of mistakes begin with $."""
    found = {}
    for page in PAGES:
        for line in code_of(page.read_text()) if page.name in CHECKED else []:
            match = COMMAND.match(line)
            words = shlex.split(match["words"]) if match else []
            if match and words and "..." not in words:
                found[line] = (match["name"], int(match["ranks"] or 1), words)
    return list(found.values())


COMMANDS = commands()
IDS = [" ".join((name, *words)) for name, _, words in COMMANDS]


def test_the_reading_of_pages():
    """Else the tests below could be satisfied by seeing nothing."""
    names = [name for name, _, _ in COMMANDS]
    assert {"train", "evaluate", "record", "clone", "slurm", "sweep"} <= set(names)
    assert len(COMMANDS) > 25


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with what the commands name."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "CONFIG.py").symlink_to(ROOT / "configs" / "cartpole.py")
    hosts = re.search(
        r"```\n# hosts.txt\n(.*?)```", (ROOT / "docs/slurm.md").read_text(), re.DOTALL
    )
    assert hosts is not None
    (tmp_path / "hosts.txt").write_text(hosts[1])
    header = ",".join(HEADER)
    rows = "learner,10.0.0.1,1,,22,me,\nactor,10.0.0.2,1,,22,me,\n"
    (tmp_path / "hosts.csv").write_text(f"{header}\n{rows}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "ranks", "words"), COMMANDS, ids=IDS)
def test_every_command_is_understood(name, ranks, words, project):
    if name == "train":
        config = load(words)
        started = config.nprocs if isinstance(config.nprocs, int) else 1
        validate(config, max(ranks, started), max(1, config.devices))
        if config.env.backend != "jax":  # these need packages that may not be installed
            check_id(config.env)
    elif name == "slurm":
        assert slurm.main([word for word in words if word != "--submit"]) == 0
    elif name == "sweep":
        from spmdrl.sweep import Options, planned_runs

        assert planned_runs(parse(Options, name, words), [])
    else:
        parse(importlib.import_module(f"spmdrl.{name}").Options, name, words)


def known_fields() -> set[str]:
    fields = [*fields_of(Config()), *(f for kind in ALGORITHMS for f in fields_of(kind(), "algo."))]
    return {field.name for field in fields}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_flag_and_field_on_a_page_exists(page):
    text, known = page.read_text(), known_fields()
    flags = re.findall(rf"--((?:{PARTS})\.[a-z0-9.-]*[a-z0-9])", text)
    switches = {name.replace(".no_", ".") for name in (f.replace("-", "_") for f in flags)}
    named = set(re.findall(rf"`((?:{PARTS})\.[a-z0-9_]+)`", text))
    own = {"algo.kl_coef"}  # of the algorithm on its page
    files = {"eval.json", "log.txt"}
    odd = {n for n in (switches | named) - known - own - files if not n.startswith("env.options")}
    assert not odd

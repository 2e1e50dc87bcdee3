"""The reference of fields and metrics: complete, and docs/reference.md is what the code says."""

from __future__ import annotations

import ast
import dataclasses
import json
import re

import pytest

from spmdrl import reference
from spmdrl.algos import ALGORITHMS, Ppo
from spmdrl.config import AlgoConfig, Config
from spmdrl.config.rules import fields_of
from spmdrl.parallel.comm_meter import PHASES
from spmdrl.reference import COMMAND, docstrings, kind_words, page
from spmdrl.runtime.metric_names import METRICS, describe_metric
from tests.children import ROOT, succeed

FAMILIES = {metric.name.partition("/")[0] for metric in METRICS}
METRIC = re.compile(r"[a-z]+/[a-z0-9_]+")


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "reference.md").read_text() == page(), f"run: {COMMAND}"


def test_every_field_is_on_the_page_with_its_help():
    text = page()
    parts = [Config(), *(kind() for kind in ALGORITHMS)]
    for part in parts:
        prefix = "algo." if isinstance(part, AlgoConfig) else ""
        for field in fields_of(part, prefix):
            if not dataclasses.is_dataclass(field.value):
                row = re.search(
                    rf"^\| `{re.escape(field.name)}` \|.*\| (.*) \|$", text, re.MULTILINE
                )
                assert row is not None, f"{field.name} is missing"
                assert row[1].strip(), f"{field.name} has no help"


def test_a_row_says_type_default_rule_and_resume():
    row = next(line for line in page().splitlines() if line.startswith("| `log.window`"))
    assert row.split(" | ")[1:5] == ["whole number", "`100`", "from 1 to 1000000", "may change"]
    row = next(line for line in page().splitlines() if line.startswith("| `optim.lr` "))
    assert row.split(" | ")[1:5] == ["number", "`0.00025`", "above 0 and finite", ""]


def test_help_is_found_below_fields_of_base_classes_too():
    found = docstrings(Ppo)
    assert found["gamma"] == "Discount."
    assert found["clip_eps"] == "Bound of the probability ratio."
    assert kind_words(int | None) == "whole number or nothing"


def names_in_code() -> set[str]:
    """Texts in the code that look like metrics of one of the known families."""
    found = set()
    for file in (ROOT / "spmdrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                family = node.value.partition("/")[0]
                if METRIC.fullmatch(node.value) and family in FAMILIES:
                    found.add(node.value)
    return found


def test_every_metric_in_the_code_is_described():
    unknown = sorted(name for name in names_in_code() if describe_metric(name) is None)
    assert not unknown, f"add a line to METRICS in spmdrl/runtime/metric_names.py for {unknown}"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_metric_that_is_described_is_in_the_code():
    made = {f"time/{name}" for name in (*PHASES, "check", "save", "env", "inference")}
    made |= {f"rank/N/{name}" for name in PHASES}
    assert {metric.name for metric in METRICS} - names_in_code() <= made


def test_a_file_is_written_or_refused_in_one_line(tmp_path, capsys):
    out = tmp_path / "reference.md"
    assert reference.main(["--out", str(out)]) == 0
    assert out.read_text() == page()
    assert reference.main(["--out", str(tmp_path / "no" / "where.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--nprocs", 2), ("--lag", 1, "--env.backend", "gymnasium")],
    ids=["two ranks", "stepped from Python"],
)
def test_rows_of_a_real_run_hold_nothing_else(flags, tmp_path):
    sizes = ("--total-steps", 512, "--algo.num-steps", 32, "--checkpoint.every", 1)
    words = (*sizes, *flags, "--run-dir", tmp_path / "run", "--log.panel", "off")
    succeed("-m", "spmdrl.train", ROOT / "configs" / "cartpole.py", *words)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 4
    names = {name for row in rows for name in row}
    assert [name for name in sorted(names) if describe_metric(name) is None] == []
    expected = (
        {"rank/0/update", "time/comm"} if "--nprocs" in flags else {"time/env", "rollout/lag"}
    )
    assert expected <= names

"""Which curves a picture has: those of the runs' algorithms, and no others."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import matplotlib.figure
import pytest

from spmdrl import plot
from spmdrl.algos import Ppo
from spmdrl.config import Config, to_json

ROW = {"progress/steps": 8, "episode/return_mean": 1.0, "loss/value": 2.0, "perf/sps": 3.0}
COMMON = ["return (mean of the last episodes)", "value loss", "steps per second"]


def make_run(path: Path, **more: float | None) -> str:
    path.mkdir()
    (path / "config.json").write_text(to_json(Config(run_dir=str(path))))
    rows = [ROW | more, ROW | more | {"progress/steps": 16}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def pictures(monkeypatch) -> list[dict[str, int]]:
    """For each picture {title: curves}, instead of a file."""
    found: list[dict[str, int]] = []

    def keep(figure, *_, **__):
        found.append({a.get_title(): len(a.lines) for a in figure.axes if a.axison})

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return found


def test_the_algorithm_says_what_it_wants_to_be_shown():
    @dataclass(frozen=True)
    class Own(Ppo):
        plots: ClassVar[tuple[tuple[str, str], ...]] = (("own/number", "a number of its own"),)

    names = [name for name, _ in plot.panels_of(replace(Config(), algo=Own()))]
    assert names[0] == "episode/return_mean"
    assert names[-1] == "perf/sps"
    assert "own/number" in names
    assert "own/number" not in [name for name, _ in plot.panels_of(Config())]


def test_panels_without_a_number_are_left_out(tmp_path, pictures):
    run = make_run(tmp_path / "a", **{"loss/policy": None})
    assert plot.main([run]) == 0
    assert pictures == [dict.fromkeys(COMMON, 1)]


def test_several_runs_lie_over_each_other(tmp_path, pictures):
    one = make_run(tmp_path / "a")
    two = make_run(tmp_path / "b", **{"loss/entropy": 0.5})
    assert plot.main([one, two]) == 0
    assert set(pictures[0]) == {*COMMON, "entropy"}
    assert set(pictures[0].values()) == {2}


def test_panels_can_be_given(tmp_path, pictures):
    run = make_run(tmp_path / "a", other=1.0)
    plot.draw([run], "x.png", panels=[("other", "another"), ("missing", "nothing")])
    assert pictures == [{"another": 1}]


def test_what_cannot_be_drawn_is_bad_input(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    for out, said in (("x.nothing", "--out"), ("no/such/x.png", "No such file or directory")):
        assert plot.main([run, "--out", str(tmp_path / out)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("spmdrl: ")
        assert said in message
    empty = tmp_path / "empty"
    make_run(empty)
    (empty / "metrics.jsonl").write_text('{"progress/steps": 1}\n')
    assert plot.main([str(empty)]) == 2
    assert "a number to plot" in capsys.readouterr().err

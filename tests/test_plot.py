"""Pictures and pages of curves: which panels, which runs together, and never over another file."""

import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import matplotlib.figure
import pytest

from spmdrl import plot
from spmdrl.algos import Ppo
from spmdrl.config import Config, to_json
from spmdrl.curves.groups import group_runs, notes, read_runs
from spmdrl.curves.panels import elapsed
from spmdrl.curves.svg import number, ticks

ROW = {"progress/steps": 8, "episode/return_mean": 1.0, "loss/value": 2.0, "perf/sps": 4.0}
COMMON = ["return (mean of the last episodes)", "value loss", "steps per second"]


def make_run(path: Path, config: Config | None = None, **more: float | None) -> str:
    """A run of two rows that are the same but for their steps."""
    path.mkdir(parents=True)
    config = replace(config or Config(), run_dir=str(path), name=path.name)
    (path / "config.json").write_text(to_json(config))
    rows = [ROW | more, ROW | more | {"progress/steps": 16}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def with_lr(lr: float, seed: int = 1) -> Config:
    config = Config(seed=seed)
    return replace(config, optim=replace(config.optim, lr=lr))


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pictures(monkeypatch) -> list[dict[str, tuple[int, int]]]:
    """For each picture {title: (lines, bands)}, instead of a file."""
    found: list[dict[str, tuple[int, int]]] = []

    def keep(figure, *_, **__):
        axes = [axis for axis in figure.axes if axis.axison]
        found.append({a.get_title(): (len(a.lines), len(a.collections)) for a in axes})

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return found


# ---------------------------------------------------------------------------------------------
# Panels


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
    assert pictures == [dict.fromkeys(COMMON, (1, 0))]


def test_panels_can_be_given(tmp_path, pictures):
    run = make_run(tmp_path / "a", other=1.0)
    plot.draw([run], "x.png", panels=[("other", "another"), ("missing", "nothing")])
    assert pictures == [{"another": (1, 0)}]


def test_metrics_are_chosen_by_name(tmp_path, pictures):
    run = make_run(tmp_path / "a", None, **{"own/number": 1.0})
    assert plot.main([run, "--metrics", "own/number", "perf/sps"]) == 0
    assert list(pictures[0]) == ["own/number", "steps per second"]


def test_an_unknown_metric_is_answered_with_the_nearest(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    assert plot.main([run, "--metrics", "loss/valu"]) == 2
    assert "has loss/valu; did you mean loss/value?" in capsys.readouterr().err
    assert plot.main([run, "--metrics", "???"]) == 2
    assert "there are: progress/steps, episode/return_mean" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# Groups


def test_seeds_of_one_config_are_one_line_with_a_band(tmp_path, pictures):
    runs = [make_run(tmp_path / str(seed), Config(seed=seed)) for seed in (1, 2, 3)]
    assert plot.main(runs) == 0
    assert pictures == [dict.fromkeys(COMMON, (1, 1))]


def test_every_run_can_be_drawn_by_itself(tmp_path, pictures):
    runs = [make_run(tmp_path / str(seed), Config(seed=seed)) for seed in (1, 2, 3)]
    assert plot.main([*runs, "--each"]) == 0
    assert set(pictures[0].values()) == {(3, 0)}


def test_two_configs_are_compared_and_named_by_what_differs(tmp_path, pictures, capsys):
    for lr, value in ((0.1, 10.0), (0.2, 30.0)):
        for seed in (1, 2):
            folder = tmp_path / "runs" / f"{lr}-{seed}"
            make_run(folder, with_lr(lr, seed), **{"episode/return_mean": value + seed})
    assert plot.main([str(tmp_path / "runs")]) == 0  # a folder stands for the runs in it
    assert set(pictures[0].values()) == {(2, 2)}
    said = capsys.readouterr().out
    assert re.search(r"CartPole-v1, optim.lr 0.1 \(2 seeds\) +11.5, 95 % interval 11 to 12\n", said)
    assert re.search(r"second less first +20, 95 % interval 19 to 21\n", said)


def test_what_is_only_written_about_a_run_does_not_set_it_apart(tmp_path):
    one = replace(Config(seed=1), log=replace(Config().log, panel="off"))
    two = replace(Config(seed=2), eval=replace(Config().eval, episodes=3))
    runs = [make_run(tmp_path / "a", one), make_run(tmp_path / "b", two)]
    assert len(group_runs(read_runs(runs))) == 1
    other = make_run(tmp_path / "c", replace(Config(seed=3), total_steps=9))
    assert len(group_runs(read_runs([*runs, other]))) == 2


def test_a_seed_that_counts_twice_and_a_run_that_is_short_are_said(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    twice, short = notes(group_runs(read_runs(runs)))
    assert "several runs have seed 1" in twice
    assert f"drawn up to step 8, where {tmp_path / 'b'} is; the longest is at 16" in short
    assert notes(group_runs(read_runs(runs[:1]))) == []


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    run = make_run(tmp_path / "a")
    assert len(read_runs([run, run, tmp_path])) == 1


def test_seconds_of_training_follow_from_speed_and_steps(tmp_path):
    [run] = read_runs([make_run(tmp_path / "a")])
    assert elapsed(run).tolist() == [2.0, 4.0]  # 8 steps at 4 a second, twice


# ---------------------------------------------------------------------------------------------
# Files


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


def test_a_file_is_replaced_only_if_that_is_asked_for(tmp_path, capsys):
    run, mine = make_run(tmp_path / "a"), tmp_path / "mine.html"
    mine.write_text("do not lose this")
    assert plot.main([run, "--out", str(mine)]) == 2
    assert f"{mine} exists; name another file, or add --overwrite" in capsys.readouterr().err
    assert mine.read_text() == "do not lose this"
    assert plot.main([run, "--out", str(mine), "--overwrite"]) == 0
    assert mine.read_text().startswith("<!doctype html>")


def test_the_default_name_counts_on(tmp_path, pictures, capsys):
    run = make_run(tmp_path / "a")
    for name in ("curves.png", "curves-2.png", "curves-3.png"):
        assert plot.main([run]) == 0
        assert capsys.readouterr().out.endswith(f"written to {name}\n")
        Path(name).touch()  # which the fixture has kept it from


class Page(HTMLParser):
    """What a page holds, and whether its tags are closed in order."""

    VOID: ClassVar = {"meta", "img", "br", "link"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.classes: list[str] = []
        self.addresses: list[str] = []
        self.data: list[Any] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.classes += (values.get("class") or "").split()
        self.addresses += [v for k, v in attrs if k in ("src", "href") and v]
        self.is_data = values.get("type") == "application/json"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.classes += (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and self.is_data:
            self.data.append(json.loads(data))


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"a{seed}", with_lr(0.1, seed), **{"loss/value": 5.0 + seed})
    make_run(tmp_path / "b<script>", with_lr(0.2))
    out = tmp_path / "x.html"
    assert plot.main([*map(str, tmp_path.iterdir()), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert (page.open, page.wrong, page.addresses) == ([], [], [])
    assert page.classes.count("panel") == len(page.data) == len(COMMON)
    assert page.classes.count("band") == len(COMMON)  # of the group of two
    assert page.classes.count("line") == 2 * len(COMMON)
    values = {s["label"]: s for s in page.data[1]["series"]}
    assert values["CartPole-v1, optim.lr 0.1 (2 seeds)"]["y"] == [6.5, 6.5]
    assert values["CartPole-v1, optim.lr 0.1 (2 seeds)"]["low"] == [6.0, 6.0]
    assert any(label.endswith("(b<script>)") for label in values)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 500_000, [0, 100_000, 200_000, 300_000, 400_000, 500_000]),
        (-0.03, 0.011, [-0.03, -0.02, -0.01, 0.0, 0.01]),
        (495.2, 500.1, [496, 497, 498, 499, 500]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_beside_an_axis_are_short():
    assert [number(v) for v in (1.5e6, 20_000, 0.05, 0.0, -3e9)] == [
        "1.5M", "20k", "0.05", "0", "-3G",
    ]  # fmt: skip

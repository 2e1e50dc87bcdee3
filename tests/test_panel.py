"""What is seen while a run trains: whole in any terminal, moving from the start, without the
compilation in its estimates."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spmdrl.algos import Ppo
from spmdrl.config import Config, EvalConfig
from spmdrl.parallel.ending import ENDING_MARK, Ending, hand_over
from spmdrl.runtime import panel as panel_module
from spmdrl.runtime.clock import Rate
from spmdrl.runtime.console import Lines, closing_words
from spmdrl.runtime.panel import Panel, Starting, chart, pack, spark
from spmdrl.runtime.signals import StopRequest

ROW = {
    "progress/update": 120, "progress/steps": 61440, "progress/eta_s": 33.0, "perf/sps": 20123.0,
    "episode/return_mean": 499.0, "episode/count": 812, "episode/length_mean": 499.0,
    "ppo/approx_kl": 0.01, "ppo/clip_frac": 0.1, "loss/entropy": 0.5, "optim/lr": 1e-4,
    "ppo/explained_variance": 0.9, "time/env": 0.1, "time/inference": 0.1, "time/collect": 0.3,
    "time/update": 0.5, "time/comm": 0.02, "time/wait": 0.1, "time/eval": 0.05, "time/other": 0.01,
}  # fmt: skip
RETURNS = [500 / (1 + math.exp((50 - i) / 9)) for i in range(120)]


def shown(monkeypatch, width: int, height: int, row: dict[str, Any] = ROW) -> list[str]:
    """The lines of a panel in a terminal of that size, the last row of which is this."""
    screen = io.StringIO()

    def console() -> Console:
        return Console(file=screen, width=width, height=height, force_terminal=True)

    monkeypatch.setattr(panel_module, "RichConsole", console)
    panel = Panel(Config(eval=EvalConfig(every=5)), Path("runs/a-run"))
    try:
        for value in RETURNS:
            panel.show(row | {"episode/return_mean": value})
        panel.show(row)
        box = panel.render(row)
    finally:
        panel.close(None)
    paper = Console(file=io.StringIO(), width=width, height=height)
    paper.print(box)
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (160, 50), (240, 70)])
def test_a_panel_fills_the_width_and_is_whole(monkeypatch, width, height):
    lines = shown(monkeypatch, width, height)
    assert {len(line) for line in lines} == {width}
    assert len(lines) < height
    assert "runs/a-run" in lines[-1]
    text = "\n".join(lines)
    for word in ("61,440 steps", "20,123 steps/s", "0:33 left", "499.0", "other 1%", "kl 0.01"):
        assert word in text
    assert text.count("█") > 2 * width or height < 40, "the chart"


def test_a_panel_has_the_newest_evaluation(monkeypatch):
    row = ROW | {"eval/return_mean": 481.25, "eval/return_std": 12.5}
    assert any("481.2 ± 12.5 at update 120" in line for line in shown(monkeypatch, 80, 24, row))


def test_the_last_line_of_what_is_live_is_empty(monkeypatch):
    """mpirun passes on whole lines only."""
    console = Console(file=io.StringIO(), width=80)
    console.print(panel_module._whole("a"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "a\n\n\n"
    request = StopRequest()
    request.signal = "SIGINT"
    monkeypatch.setattr(StopRequest, "heard", request)
    console.print(panel_module._whole("b"))
    assert console.file.getvalue().splitlines()[-2].startswith("SIGINT: stopping after this update")
    assert console.file.getvalue().endswith("\n\n")


def test_something_moves_before_the_first_update(monkeypatch):
    now = 100.0
    monkeypatch.setattr(panel_module.time, "monotonic", lambda: now)
    starting = Starting()
    first = starting.__rich__().plain
    now += 2.2
    assert starting.__rich__().plain != first
    assert "compiling the first update (2 s)" in starting.__rich__().plain


def test_lines_are_filled_and_no_word_is_cut():
    from rich.text import Text

    lines = [line.plain for line in pack([Text(w) for w in ("aa", "bb", "cccc", "d")], 7)]
    assert lines == ["aa  bb", "cccc  d"]


def test_curves_begin_and_end_where_the_values_do():
    assert spark([0.0, 1.0], 4) == "▁▁▁█"
    assert spark([1.0], 4) == ""
    lines = chart([0.0, 2.0, 1.0], 7, 2).plain.splitlines()
    assert lines == ["2   ██▁", "0 ▁▁███"]


# ---------------------------------------------------------------------------------------------
# Speed and what is left


def test_the_first_interval_which_compiles_gives_no_estimate():
    config = Config(total_steps=10 * Config().batch_size, algo=Ppo())
    batch, rate = config.batch_size, Rate(config, first=0)
    assert rate.row(1, 60.0)["progress/eta_s"] is None
    assert rate.row(2, 1.0)["progress/eta_s"] == pytest.approx(8.0)
    assert rate.row(3, 1.0)["progress/eta_s"] == pytest.approx(7.0)
    assert rate.row(10, 7.0)["progress/eta_s"] == 0.0
    alone = Rate(config, first=0).row(10, 60.0)
    assert (alone["progress/eta_s"], alone["perf/sps"]) == (0.0, batch * 10 / 60.0)


def test_lines_say_so_too(capsys):
    lines = Lines(Config())
    lines.show(ROW | {"progress/eta_s": None, "perf/sps": 16.0})
    said = capsys.readouterr().out
    assert "first update, with its compilation" in said
    assert "16 steps/s" not in said
    lines._next = 0.0
    lines.show(ROW | {"eval/return_mean": 481.25})
    assert "evaluated 481.2  20,123 steps/s, 0:33 left" in capsys.readouterr().out


def test_the_closing_words_have_the_last_evaluation():
    summary = {
        "episode_return_mean": 9.0, "env_steps": 1, "wall_s": 1.0, "sps": 1.0, "command": "again",
        "eval_return_mean": 481.25,
    }  # fmt: skip
    assert closing_words(Path("runs/x"), summary)[0].endswith(", 481.2 in the last evaluation")


# ---------------------------------------------------------------------------------------------
# The exit code of stopped ranks


def test_a_code_is_handed_over_past_mpirun(monkeypatch):
    ending = Ending()
    folder = Path(ending.marks[ENDING_MARK]).parent
    monkeypatch.setenv(ENDING_MARK, ending.marks[ENDING_MARK])
    assert hand_over(75, is_root=False) == 0
    assert not list(folder.iterdir())
    assert hand_over(75, is_root=True) == 0
    assert ending.read(0) == 75
    assert not folder.exists()


def test_a_fault_of_the_launcher_is_not_hidden(monkeypatch):
    ending = Ending()
    monkeypatch.setenv(ENDING_MARK, ending.marks[ENDING_MARK])
    hand_over(75, is_root=True)
    assert ending.read(137) == 137


def test_under_another_launcher_the_code_is_the_ranks_own(monkeypatch):
    monkeypatch.delenv(ENDING_MARK, raising=False)
    assert hand_over(75, is_root=True) == 75

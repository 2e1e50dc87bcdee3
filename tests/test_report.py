"""The page about a run: every part is there, it needs no other file, and nothing is overwritten."""

import json
from dataclasses import replace

import pytest

from spmdrl import report
from spmdrl.config import Config
from tests.test_plot import Page, make_run

EVALUATION = {
    "checkpoint": "update-00000007", "episodes": 20, "deterministic": True,
    "return_mean": 123.0, "return_ci95": [120.0, 126.0],
}  # fmt: skip
TIMES = {"time/collect": 3.0, "time/env": 1.0, "time/inference": 1.0, "time/update": 1.0}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "a"
    make_run(path, replace(Config(), seed=4, total_steps=2048), **TIMES)
    (path / "eval.json").write_text(json.dumps(EVALUATION))
    (path / "status.json").write_text('{"state": "failed", "reason": "<disk> full"}')
    (path / "log.txt").write_text("one line & another\n")
    return path


def text_of(path) -> str:
    return (path / "report.html").read_text()


def test_one_run_has_every_part(run):
    assert report.main([str(run)]) == 0
    text, page = text_of(run), Page(text_of(run))
    assert (page.open, page.wrong, page.addresses) == ([], [], [])
    assert "failed: &lt;disk&gt; full" in text
    assert "update-00000007" in text
    assert "120 to 126" in text
    assert "one line &amp; another" in text
    assert "env 25 %, inference 25 %, collect 25 %, update 25 %" in text
    assert "<td>total_steps</td><td>2048</td><td>500000</td>" in text
    assert "<td>seed</td>" not in text  # a name of the run, not a change
    assert page.classes.count("panel") == 3
    assert "none yet: spmdrl evaluate RUN_DIR --video" in text


def test_a_video_in_the_run_is_inside_the_page(run):
    (run / "play.gif").write_bytes(b"GIF89a")
    (run / "long.mp4").write_bytes(b"x")
    assert report.main([str(run)]) == 0
    addresses = Page(text_of(run)).addresses
    assert addresses == ["data:video/mp4;base64,eA==", "data:image/gif;base64,R0lGODlh"]


def test_a_large_video_is_only_named(run, monkeypatch):
    monkeypatch.setattr("spmdrl.curves.sections.LARGEST_VIDEO", 3)
    (run / "play.gif").write_bytes(b"GIF89a")
    assert report.main([str(run)]) == 0
    assert Page(text_of(run)).addresses == []
    assert "play.gif is too large for this page" in text_of(run)


def test_two_configs_are_told_apart(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = make_run(tmp_path / "b", replace(Config(), total_steps=4096))
    assert report.main([str(run), other]) == 0
    text = text_of(tmp_path)
    assert "<td>total_steps</td><td>2048</td><td>4096</td>" in text
    assert report.main([str(run), other]) == 0
    assert (tmp_path / "report-2.html").exists()


def test_no_page_is_replaced_by_accident(run, capsys):
    mine = run / "mine.html"
    mine.write_text("do not lose this")
    assert report.main([str(run), "--out", str(mine)]) == 2
    assert "exists; name another file, or add --overwrite" in capsys.readouterr().err
    assert mine.read_text() == "do not lose this"


def test_what_is_no_run_is_said(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a run directory" in capsys.readouterr().err
    assert report.main([]) == 2
    assert "no run directory given" in capsys.readouterr().err

"""The logic of the comparison with other trainers; nothing is installed or run."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.lib import venvs
from benchmarks.lib.common import Spread
from benchmarks.peers import comparison, contest, rivals
from benchmarks.peers.contest import Case, Contest, Entry, Found
from benchmarks.peers.references.work import Clock, Work, read_work

WORK = Work(envs=4, steps=8, updates=2, skip=1)
CASE = Case("toy", "cartpole", WORK, (Entry("spmdrl", 2, 1), Entry("SB3", 2, 1, goal=8)))


def lines(*seconds):
    return [json.dumps({"update": i, "steps": 32, "seconds": s}) for i, s in enumerate(seconds, 1)]


# ---------------------------------------------------------------------------------------------
# What a reference is asked, and what it answers


def test_work_survives_the_command_line(monkeypatch):
    work = Work(env="Pong-v5", envs=16, lr=3e-4, entropy=0.0, hidden=(32, 16, 8))
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    monkeypatch.setattr(sys, "argv", ["x", *work.flags(), "--threads", "2"])
    found, others = read_work(parser)
    assert found == work
    assert others.threads == 2


def test_clock_prints_what_is_read(capsys):
    clock = Clock("2 threads")
    for _ in range(3):
        clock.update(32)
    text = capsys.readouterr().out
    assert json.loads(text.splitlines()[0]) == {"settings": "2 threads"}
    assert [row["update"] for row in rivals.read_updates(text)] == [1, 2, 3]
    assert rivals.read_rate(text, WORK) > 0


def test_rate_leaves_out_the_first_updates_and_those_after_the_end():
    text = "\n".join(lines(100.0, 1.0, 3.0, 500.0))
    assert rivals.read_rate(text, WORK) == 64 / 4  # not the mean of 32 and 10.7


def test_other_output_is_passed_over():
    noise = ["Fps is 30", "3", "[1]", '{"settings": "x"}', '{"update": 1}', ""]
    assert rivals.read_rate("\n".join(noise + lines(9, 1, 1)), WORK) == 32


def test_too_few_updates_are_a_failure():
    with pytest.raises(rivals.RunFailed, match="2 of 3 updates"):
        rivals.read_rate("\n".join(lines(1, 1)), WORK)


def test_reason_is_the_last_line():
    home = Path.home()
    text = f"Traceback\n  more\nOSError: {home}/x | y\n\n"
    assert venvs.last_line(text) == "OSError: ~/x / y"
    assert venvs.last_line("\n") == ""


# ---------------------------------------------------------------------------------------------
# Environments


def test_environment_is_built_when_its_requirements_are_marked(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_PEERS", str(tmp_path))
    venv = venvs.Venv("toy", ("a==1",))
    assert not venv.is_built()
    venv.folder.mkdir()
    (venv.folder / venvs.MARK).write_text(json.dumps(venv.requirements))
    assert venv.is_built()
    assert not venvs.Venv("toy", ("a==2",)).is_built()
    assert not venvs.Venv("toy", ("a==1",), python_version="3.12").is_built()


def test_torch_comes_from_its_own_index_or_else_from_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDRL_PEERS", str(tmp_path))
    calls = []

    def uv(*arguments):
        calls.append(arguments)
        if "--torch-backend" in arguments:
            raise venvs.NotBuilt("no such host")
        if arguments[0] == "venv":
            Path(arguments[-1]).mkdir()

    monkeypatch.setattr(venvs, "_uv", uv)
    venvs.Venv("toy", ("torch==2", "b==1")).build()
    assert [c[0] for c in calls] == ["venv", "pip", "pip"]
    assert "--torch-backend" not in calls[-1]
    venvs.Venv("toy", ("torch==2", "b==1")).build()
    assert len(calls) == 3  # it was there


def test_every_version_is_pinned():
    for peer in rivals.PEERS.values():
        assert all("==" in package for package in peer.venv.packages), peer.name
        assert (rivals.REFERENCES / peer.script).is_file()


# ---------------------------------------------------------------------------------------------
# Rounds


@pytest.fixture
def toy():
    """A contest whose rates are made up: SB3 is faster in processes, spmdrl with two ranks."""
    rates = {("spmdrl", "1 rank"): 100.0, ("spmdrl", "2 ranks"): 200.0,
             ("spmdrl", "2 devices"): 150.0,
             ("SB3", "DummyVecEnv"): 10.0, ("SB3", "SubprocVecEnv"): 20.0}  # fmt: skip

    def rate(case, entry, setting):
        if (entry.name, setting) not in rates:
            raise rivals.RunFailed("out of memory")
        return rates[entry.name, setting]

    return Contest([CASE], rate), rates


def test_fastest_setting_is_used(toy):
    made, _ = toy
    made.try_settings()
    made.measure(3)
    assert made.found["toy", "spmdrl"].setting == "2 ranks"
    assert made.found["toy", "SB3"].rates == [20.0] * 3
    assert len(made.loads) == 3


def test_settings_near_the_fastest_are_tried_again():
    runs = {"1 rank": [95.0, 100.0, 90.0], "2 ranks": [80.0, 96.0, 99.0], "2 devices": [60.0]}
    left = {setting: list(rates) for setting, rates in runs.items()}
    made = Contest([CASE], lambda case, entry, setting: left[setting].pop(0))
    made.pairs = made.pairs[:1]
    made.try_settings()
    found = made.found["toy", "spmdrl"]
    assert found.trial == {"1 rank": 95.0, "2 ranks": 96.0, "2 devices": 60.0}  # the medians
    assert found.setting == "2 ranks"


def test_setting_that_fails_is_reported_and_the_other_used(toy):
    made, rates = toy
    del rates["SB3", "SubprocVecEnv"]
    made.try_settings()
    assert made.found["toy", "SB3"].setting == "DummyVecEnv"
    assert made.found["toy", "SB3"].refused == {"SubprocVecEnv": "out of memory"}


def test_peer_that_fails_later_has_no_ratio(toy):
    made, rates = toy
    made.try_settings()
    made.measure(1)
    del rates["SB3", "SubprocVecEnv"]
    made.measure(2)
    row = comparison.summarize([CASE], made.found)[1]
    assert row["failure"] == "failed in round 2: out of memory"
    assert row["ratio"] is None


def test_peer_that_cannot_be_installed_stays_in_the_table(toy, monkeypatch):
    made, _ = toy

    def build(self):
        raise venvs.NotBuilt("uv pip: no such package")

    monkeypatch.setattr(venvs.Venv, "build", build)
    made.build()
    made.try_settings()
    made.measure(1)
    row = comparison.summarize([CASE], made.found)[1]
    assert row["failure"] == "cannot be installed: uv pip: no such package"
    assert (row["trainer"], row["ratio"], row["goal"]) == ("SB3", None, 8)


# ---------------------------------------------------------------------------------------------
# Tables


def test_ratio_is_taken_in_each_round():
    ours, theirs = Found(rates=[100.0, 300.0, 80.0]), Found(rates=[10.0, 10.0, 10.0])
    assert comparison.ratio(ours, theirs) == Spread(10, 8, 30)
    assert comparison.ratio(ours, Found(failure="no")) is None


def test_cases_that_were_not_measured_again_stay():
    earlier = [
        {"case": case, "trainer": trainer, **vars(Found({"": rate}, {}, [rate]))}
        for case in ("CartPole 8", "Pong 8")
        for trainer, rate in (("spmdrl", 6.0), ("SB3", 2.0), ("torch reference", 3.0))
    ]
    now = {("Pong 8", "spmdrl"): Found({"": 9.0}, {}, [9.0]),
           ("Pong 8", "torch reference"): Found({"": 1.0}, {}, [1.0])}  # fmt: skip
    cases, found = comparison.joined(earlier, now)
    rows = comparison.summarize(cases, found)
    assert [(r["case"], r["trainer"]) for r in rows] == [
        ("CartPole 8", "spmdrl"), ("CartPole 8", "SB3"),
        ("Pong 8", "spmdrl"), ("Pong 8", "torch reference"),
    ]  # fmt: skip
    assert [row["ratio"].median for row in rows if row["ratio"]] == [3.0, 9.0]


def test_choice_of_cases_and_peers():
    (case,) = contest.choose(["CartPole 8", "Pong 8"], ["SB3", "RLlib"], updates=5)
    assert [entry.name for entry in case.entries] == ["spmdrl", "SB3", "RLlib"]
    assert all(entry.updates == 5 for entry in case.entries)
    everything = contest.choose([c.name for c in contest.CASES], list(rivals.PEERS), updates=0)
    assert everything == contest.CASES


def test_every_entry_is_known():
    for case in contest.CASES:
        assert case.entries[0].name == "spmdrl"
        assert all(entry.name in rivals.PEERS for entry in case.entries[1:])

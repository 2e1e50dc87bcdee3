"""An algorithm of one's own, in one file, trains on one rank and on several."""

from __future__ import annotations

import json
import sys

import pytest

from spmdrl.algos import Ppo
from spmdrl.config import Config, ConfigError, from_json, load, to_json
from spmdrl.runtime.rundir import open_run, read_run
from tests.children import ROOT, python, succeed

A2C = ROOT / "tests" / "a2c.py"


def test_it_is_one_short_file_that_uses_only_the_public_seam():
    text = A2C.read_text()
    assert len(text.splitlines()) < 80
    assert "ppo" not in text.lower()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_cartpole(ranks, tmp_path):
    flags = ["--nprocs", ranks, "--run-dir", tmp_path / "run", "--log.panel", "off"]
    succeed("-m", "spmdrl.train", A2C, *flags)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == ranks
    assert summary["episode_return_mean"] >= 475


@pytest.mark.slow
def test_it_trains_resumes_and_is_evaluated_from_the_command_line(tmp_path):
    sizes = ["--env.num-envs", 8, "--algo.num-steps", 16, "--total-steps", 8 * 16 * 4]
    flags = [*sizes, "--run-dir", tmp_path / "run", "--log.panel", "off"]
    succeed("-m", "spmdrl.train", A2C, *flags, "--algo.value-coef", 0.25)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["algo"]
    assert saved["type"].endswith(":A2c")
    assert saved["value_coef"] == 0.25
    done = python("-m", "spmdrl.train", A2C, *flags)
    assert (done.returncode, "algo.value_coef: 0.25 -> 0.5" in done.stderr) == (2, True)
    succeed("-m", "spmdrl.evaluate", tmp_path / "run", "--episodes", 2)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--algo.valu-coef", "--algo.value-coef"),
        ("--algo.clip-eps", "there is no field --algo.clip-eps"),
    ],
)
def test_an_unknown_field_gets_the_usual_answer(flag, answer):
    with pytest.raises(ConfigError, match=answer):
        load([str(A2C), flag, "0.3"])


def test_a_run_of_an_unknown_algorithm_can_be_read_but_imports_nothing(tmp_path):
    config = load([str(A2C), "--run-dir", str(tmp_path / "run")])
    open_run(config)
    found = read_run(tmp_path / "run")
    assert type(found.algo).__name__ == "ForeignAlgo"
    assert found.batch_size == config.batch_size
    assert read_run(tmp_path / "run", type(config.algo)) == config
    text = to_json(config).replace("config_file_a2c:A2c", "nowhere.at_all:Evil")
    assert type(from_json(text).algo).__name__ == "ForeignAlgo"
    assert "nowhere" not in sys.modules


def test_ours_is_found_by_its_name_and_an_old_run_is_ours():
    values = json.loads(to_json(Config()))
    assert values["algo"].pop("type") == "ppo"
    assert from_json(json.dumps(values)) == Config()
    values["algo"]["type"] = "ppoo"
    with pytest.raises(ConfigError, match="unknown algorithm 'ppoo'"):
        from_json(json.dumps(values))
    assert isinstance(Config().algo, Ppo)

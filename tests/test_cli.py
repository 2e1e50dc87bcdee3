"""The commands as a user meets them: help, exit codes, and one line that says what is wrong."""

import dataclasses
import importlib
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spmdrl import cli
from spmdrl.options import PlayOptions, parse_with_config
from spmdrl.runtime import trial_runs
from spmdrl.runtime.console import closing_words
from spmdrl.runtime.hints import BY_UV, suggested
from spmdrl.tune import Options as TuneOptions
from tests.children import ROOT, clean_environment, python

HEAVY = {
    "jax", "jaxlib", "flax", "optax", "envpool", "gymnasium", "mpi4py", "mpi4jax", "matplotlib",
    "tensorboardX", "wandb", "PIL",
}  # fmt: skip


def refusal(*words: object, code: int = 2) -> str:
    """The one line with which `python -m spmdrl WORDS` refuses."""
    done = python("-m", "spmdrl", *words)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("spmdrl: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---------------------------------------------------------------------------------------------
# The front door


def test_help_lists_every_command_with_a_line():
    done = python("-m", "spmdrl", "--help")
    assert done.returncode == 0
    for name, what in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", done.stdout, re.MULTILINE)


def test_no_command_shows_the_same_and_is_an_error():
    done = python("-m", "spmdrl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == python("-m", "spmdrl", "--help").stdout


def test_the_version():
    done = python("-m", "spmdrl", "--version")
    assert done.returncode == 0
    assert re.fullmatch(r"spmdrl \d+\.\d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evalute", "runs/x"], "there is no command 'evalute'; did you mean evaluate?"),
        (["zzz"], "there are: doctor, train, "),
        (["configs/cartpole.py"], "did you mean: spmdrl train configs/cartpole.py?"),
        (["--evaluate"], "there is no command '--evaluate'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(words, said):
    assert said in refusal(*words)


def test_the_console_script_is_the_front_door():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["spmdrl"].partition(":")
    assert getattr(importlib.import_module(module), name) is cli.main


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_the_same_through_both_doors(name):
    """Apart from the name in `usage`, which is as it was typed."""
    one, two = python("-m", f"spmdrl.{name}", "--help"), python("-m", "spmdrl", name, "--help")
    assert (one.returncode, two.returncode) == (0, 0)
    assert "usage: " in one.stdout
    said = two.stdout.replace(f"spmdrl {name}", f"python -m spmdrl.{name}")
    assert said.split() == one.stdout.split()


# ---------------------------------------------------------------------------------------------
# Help


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_loads_nothing_heavy(name):
    module = f"spmdrl.{name}" if name else "spmdrl"
    done = python("-X", "importtime", "-m", module, "--help")
    assert done.returncode == 0
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert {"spmdrl.cli", "spmdrl.config"} <= imported, "else nothing was seen"
    assert not imported & HEAVY


FIRST_ARGUMENT = {
    "doctor": None, "runs": "dir", "evaluate": "run_dir", "plot": "run_dirs", "report": "run_dirs",
    "record": "run_dir", "clone": "data", "sweep": "config", "verify": "config", "tune": "config",
    "slurm": "config",
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_ARGUMENT)
def test_help_explains_every_option(name):
    boxes = python("-m", f"spmdrl.{name}", "--help").stdout.partition("╭")[2]
    shown = " ".join(boxes.replace("│", " ").split())
    fields = dataclasses.fields(importlib.import_module(f"spmdrl.{name}").Options)
    for field in fields:
        if field.name == FIRST_ARGUMENT[name]:
            continue
        flag = "--" + field.name.replace("_", "-")
        text = re.search(rf" {flag} (.*?)\((default|required)", shown)
        assert text, f"{flag} is not listed"
        assert len(text[1].split()) >= 2, f"{flag} has no text"
    assert ("positional arguments" in shown) == (FIRST_ARGUMENT[name] is not None)


@pytest.mark.parametrize("name", ["verify", "tune", "sweep"])
def test_help_of_what_takes_a_config_says_what_the_other_flags_are(name):
    shown = " ".join(python("-m", f"spmdrl.{name}", "--help").stdout.split())
    assert "CONFIG.py" in shown
    assert ("--seeds" if name == "sweep" else "--updates") in shown
    assert "All other flags after CONFIG.py are fields of the config" in shown


# ---------------------------------------------------------------------------------------------
# Exit codes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "nowhere"], "nowhere is not a run directory"),
        (["plot", "nowhere"], "nowhere is not a run directory"),
        (["plot"], "no run directory given"),
        (["record", "nowhere", "--out", "TMP/out"], "nowhere is not a run directory"),
        (["clone", "nowhere", "--run-dir", "TMP/out"], "nowhere"),
        (["runs", "nowhere"], "nowhere is not a directory"),
        (["train"], "the first argument must be a config file"),
        (["train", "configs/cartpol.py"], "did you mean configs/cartpole.py?"),
        (["slurm", "configs/cartpol.py"], "did you mean configs/cartpole.py?"),
        (["tune", "configs/cartpol.py"], "did you mean configs/cartpole.py?"),
        (["verify", "configs/cartpol.py"], "did you mean configs/cartpole.py?"),
        (["verify", "configs/cartpole.py", "--updates", "0"], "updates is 0"),
        (["tune", "configs/cartpole.py", "--updates=-1"], "updates is -1"),
        (["tune", "configs/cartpole.py", "--updates", "many"], "--updates is 'many'"),
        (["tune", "configs/cartpole.py", "--env.id", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["verify", "configs/cartpole.py", "--env.id", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["verify", "configs/cartpole.py", "--env.num-envs", "3"], "topology 1 x 2: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, tmp_path):
    assert said in refusal(*(word.replace("TMP", str(tmp_path)) for word in words))


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate"],
        ["evaluate", "run", "--deterministic", "--stochastic"],
        ["record", "run", "--out", "x", "--deterministic", "--stochastic"],
        ["runs", "--jsn"],
        ["doctor", "all"],
        ["verify", "--updates", "3"],
        ["slurm", "configs/cartpole.py", "--pbs", "--hostfile", "x"],
    ],
)
def test_a_wrong_option_ends_with_exit_code_2(words):
    done = python("-m", "spmdrl", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--help" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new"), [("--best", "--checkpoint best"), ("--no-deterministic", "--stochastic")]
)
def test_an_old_spelling_of_evaluate_is_answered_with_the_new_one(old, new):
    assert f"evaluate has no {old} any more; write {new}" in refusal("evaluate", "run", old)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_child_that_refuses_makes_verify_refuse():
    """Only the trainer itself asks for what a field needs."""
    done = python("-m", "spmdrl", "verify", "configs/cartpole.py", "--log.wandb", "mine",
               "--env.num-envs", "64")  # fmt: skip
    assert done.returncode == 2
    assert "wandb" in done.stderr
    assert "exit code 2 of: python -m spmdrl.train configs/cartpole.py" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_child_that_fails_is_a_fault_with_its_own_words(monkeypatch, capsys):
    output = "Traceback (most recent call last):\n  File x\nspmdrl: rank 1 of 2 failed\nmore\n"
    done = subprocess.CompletedProcess([], 137, stdout="", stderr=output)
    monkeypatch.setattr(trial_runs.subprocess, "run", lambda *_, **__: done)
    assert cli.main(["tune", str(ROOT / "configs/cartpole.py")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("spmdrl: rank 1 of 2 failed (exit code 137 of: python -m spmdrl.train ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [("a\nspmdrl: one\nspmdrl: two\nb\n", "two"), ("a\n b\n\n", "b"), ("", "without any output")],
)
def test_the_last_words_of_a_run(output, words):
    assert words in trial_runs.last_words(output)


WAITS = """
import signal, sys, time
from spmdrl.cli import answer_errors

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background

@answer_errors()
def main(argv=None):
    print("ready", flush=True)
    time.sleep(60)

sys.exit(main())
"""


def test_ctrl_c_ends_with_exit_code_130():
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (130, "spmdrl: interrupted\n")


def test_a_closed_pipe_is_no_error(tmp_path):
    script = f"{sys.executable} -m spmdrl runs {tmp_path} --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_os_errors_are_bad_input_only_where_a_command_asks_for_it(tmp_path, capsys):
    def read(argv=None):
        return len((tmp_path / "missing").read_text())

    assert cli.answer_errors(os_errors=True)(read)() == 2
    assert capsys.readouterr().err == f"spmdrl: {tmp_path}/missing: No such file or directory\n"
    with pytest.raises(FileNotFoundError):
        cli.answer_errors()(read)()


# ---------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("given", "otherwise", "mode"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"deterministic": True}, False, True),
        ({"stochastic": True}, True, False),
    ],
)
def test_how_actions_are_chosen(given, otherwise, mode):
    assert PlayOptions(**given).takes_the_mode(otherwise) is mode


@pytest.mark.parametrize(
    ("words", "updates", "rest"),
    [
        (["c.py"], 10, []),
        (["c.py", "--updates", "3", "--seed", "4"], 3, ["--seed", "4"]),
        (["--updates=3", "c.py", "--seed=4"], 3, ["--seed=4"]),
        (["c.py", "--env.options", "a", "1", "--updates", "3"], 3, ["--env.options", "a", "1"]),
    ],
)
def test_the_words_of_the_trainer_are_told_from_our_own(words, updates, rest):
    options, flags = parse_with_config(TuneOptions, "tune", words)
    assert (options.config, options.updates, flags) == ("c.py", updates, rest)


# ---------------------------------------------------------------------------------------------
# Hints


def test_hints_are_spelled_as_they_can_be_pasted():
    assert suggested("plot", "a b", environ={}) == "python -m spmdrl.plot 'a b'"
    assert suggested("runs", environ={BY_UV: "1"}) == "uv run python -m spmdrl.runs"


def test_the_end_of_a_run_suggests_uv_to_whoever_came_by_it(monkeypatch):
    summary = {"episode_return_mean": 1.0, "env_steps": 1, "wall_s": 1.0, "sps": 1.0}
    for start, value in (("python -m", ""), ("uv run python -m", "1")):
        monkeypatch.setenv(BY_UV, value)
        said = closing_words(Path("runs/x"), summary | {"command": "again"})
        assert f"evaluate  {start} spmdrl.evaluate runs/x" in said
        assert f"plot      {start} spmdrl.plot runs/x" in said


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_run_really_sets_the_variable():
    program = "from spmdrl.runtime.hints import suggested; print(suggested('doctor'))"
    command = ["uv", "run", "--no-project", "--offline", "--python", sys.executable]
    done = subprocess.run(
        [*command, "python", "-c", program], capture_output=True, text=True, cwd=ROOT,
        env=clean_environment(PYTHONPATH=str(ROOT)), check=False,
    )  # fmt: skip
    assert done.stdout == "uv run python -m spmdrl.doctor\n", done.stderr


def test_a_run_without_a_finished_episode_ends_without_a_fault():
    summary = {"episode_return_mean": None, "env_steps": 1, "wall_s": 1.0, "sps": 1.0}
    said = closing_words(Path("runs/x"), summary | {"command": "again"})
    assert said[0].endswith("no episode has ended")

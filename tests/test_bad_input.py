"""Bad input is answered at once: exit code 2, a short message that names the thing, no jax.

All cases run one after the other in a single child interpreter, which reports what `main` returned,
what it said and whether jax or a simulator was imported by then. A few run as real commands too.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spmdrl.config import Config, EnvConfig, to_json
from tests.children import ROOT, clean_environment, python

GOOD = "configs/cartpole.py"
HEAVY = ("jax", "jaxlib", "flax", "envpool", "mpi4py", "matplotlib")


@dataclass(frozen=True)
class Case:
    name: str
    argv: list[str]
    says: list[str]  # substrings of the message


def change(name: str, flags: str, *says: str) -> Case:
    """The good config with these flags."""
    return Case(name, [GOOD, *flags.split()], list(says))


def file(name: str, *says: str) -> Case:
    """A bad config file, see FILES."""
    return Case(f"file_{name}", [f"TMP/{name}.py"], [f"{name}.py", *says])


FILES = {
    "syntax": "from spmdrl.config import Config\nconfig = Config(seed=3\n",
    "raises": "x = 1\nconfig = {}['nothing']\n",
    "get_config_raises": "def get_config():\n    return 1 / 0\n",
    "imports_missing": "import a_module_that_is_not_there\n",
    "empty": "",
    "leaves": "import sys\nsys.exit(0)\n",
    "leaves_at_once": "import os\nos._exit(0)\n",
    "generator_exit": "raise GeneratorExit\n",
    "wrong_object": "config = {'seed': 1}\n",
    "field_typo": "from spmdrl.config import Config\nconfig = Config(sede=3)\n",
    "field_renamed": "from spmdrl.config import Config\nconfig = Config(overlap=True)\n",
    "variant_typo": (
        "from dataclasses import replace\nfrom spmdrl.config import Config\n"
        "base = Config()\nconfig = replace(base, algo=replace(base.algo, gama=0.9))\n"
    ),
    "wrong_type": (
        "from spmdrl.config import Config, EnvConfig\n"
        "config = Config(env=EnvConfig(num_envs='8'))\n"
    ),
    "wrong_choice": (
        "from spmdrl.config import Config, EnvConfig\n"
        "config = Config(env=EnvConfig(backend='envpol'))\n"
    ),
    "wrong_part": "from spmdrl.config import Config\nconfig = Config(env='CartPole-v1')\n",
}

CASES = [
    # the config file
    Case("nothing", [], ["first argument must be a config file", "configs/cartpole.py"]),
    Case("flags_only", ["--seed", "1"], ["first argument must be a config file"]),
    Case("file_missing", ["configs/cartpol.py"], ["cartpol.py", "mean configs/cartpole.py?"]),
    Case("folder_missing", ["config/cartpole.py"], ["config/", "mean configs/cartpole.py?"]),
    Case("file_is_folder", ["configs"], ["configs", "is not a file"]),
    file("syntax", "SyntaxError", "line 2"),
    file("raises", "KeyError", "'nothing'", "line 2"),
    file("get_config_raises", "ZeroDivisionError", "line 2"),
    file("imports_missing", "a_module_that_is_not_there", "line 1"),
    file("empty", "must define `config = Config(...)`"),
    file("wrong_object", "must define `config = Config(...)`", "found dict"),
    file("leaves", "ended by sys.exit(0)"),
    file("leaves_at_once", "ended by sys.exit(0)"),
    file("generator_exit", "GeneratorExit"),
    file("field_typo", "'sede'", "line 2", "mean seed?"),
    file("field_renamed", "'overlap'", "line 2", "write lag=1"),
    file("variant_typo", "'gama'", "line 4", "mean gamma?"),
    Case("file_wrong_type", ["TMP/wrong_type.py"], ["env.num_envs is '8'", "must be int"]),
    Case("file_wrong_choice", ["TMP/wrong_choice.py"], ["env.backend", "mean envpool?"]),
    Case("file_wrong_part", ["TMP/wrong_part.py"], ["env is 'CartPole-v1'", "must be EnvConfig"]),
    # names and types of flags
    change("flag_typo", "--sede 3", "--sede", "--seed"),
    change("nested_flag_typo", "--algo.gama 0.9", "--algo.gama", "--algo.gamma"),
    change("flag_in_wrong_part", "--optim.gamma 0.9", "--optim.gamma", "--algo.gamma"),
    change("flag_typo_without_part", "--epocs 3", "no field --epocs", "mean --algo.epochs?"),
    change("flag_renamed", "--overlap", "no field --overlap", "mean --lag 1?"),
    change("flag_renamed_off", "--no-overlap", "no field --no-overlap", "mean --lag 0?"),
    change("lag_negative", "--lag -1", "lag is -1", "from 0 to 16"),
    change("lag_too_large", "--lag 100", "lag is 100", "from 0 to 16"),
    change("lag_text", "--lag some", "--lag is 'some'", "whole number"),
    change("flag_of_another_world", "--frobnicate 3", "no field --frobnicate", "--help lists them"),
    change("fraction_by_exponent", "--total-steps 1e-3", "--total-steps is '1e-3'", "whole"),
    change("text_for_width", "--net.hidden 64 wide", "--net.hidden is 'wide'", "whole"),
    change("flag_without_part", "--num-envs 4", "--num-envs", "--env.num-envs or --eval.num-envs"),
    change("stray_word", "fast", "fast"),
    change("value_missing", "--seed", "--seed", "Missing value"),
    change("text_for_int", "--seed abc", "--seed", "'abc'"),
    change("fraction_for_int", "--env.num-envs 3.5", "--env.num-envs", "'3.5'"),
    change("text_for_float", "--optim.lr fast", "--optim.lr", "'fast'"),
    change("value_for_switch", "--env.normalize-obs maybe", "normalize_obs", "'maybe'", "no-norm"),
    change("value_by_equals", "--restart=maybe", "restart", "'maybe'", "--no-restart"),
    change("choice", "--algo.normalize-advantage mini", "'mini'", "advantage", "'minibatch'"),
    change("strategy", "--sync.strategy nccl", "'nccl'", "--sync.strategy", "'allreduce'"),
    change("backend", "--env.backend gym", "'gym'", "--env.backend", "'gymnasium'"),
    # values
    change("seed_negative", "--seed -1", "seed is -1", "0 to 2147483647"),
    change("seed_too_large", "--seed 2147483648", "seed is 2147483648", "0 to 2147483647"),
    change("gamma", "--algo.gamma 1.5", "algo.gamma is 1.5", "between 0 and 1"),
    change("gamma_nan", "--algo.gamma nan", "algo.gamma is nan", "between 0 and 1"),
    change("lambda", "--algo.gae-lambda -0.1", "algo.gae_lambda is -0.1", "between 0 and 1"),
    change("lr_zero", "--optim.lr 0", "optim.lr is 0.0", "above 0"),
    change("lr_infinite", "--optim.lr inf", "optim.lr is inf", "finite"),
    change("beta", "--optim.adam-b2 1", "optim.adam_b2 is 1.0", "below 1"),
    change("clip", "--algo.clip-eps -0.2", "algo.clip_eps is -0.2", "above 0"),
    change("log_std", "--net.log-std-init nan", "net.log_std_init is nan", "finite"),
    change("epochs", "--algo.epochs 0", "algo.epochs is 0", "at least 1"),
    change("envs_zero", "--env.num-envs 0", "env.num_envs is 0", "at least 1"),
    change("width_zero", "--net.hidden 64 0", "net.hidden is (64, 0)", "at least 1"),
    change("torso", "--net.torso natur_cnn", "net.torso is 'natur_cnn'", "mean nature_cnn?"),
    change("torso_of_no_module", "--net.torso nowhere:Net", "no module nowhere", "nowhere.py"),
    change("target_kl", "--algo.target-kl 0", "algo.target_kl is 0.0", "above 0"),
    change("log_every", "--log.every 0", "log.every is 0", "at least 1"),
    change("window", f"--log.window 1{'0' * 30}", "log.window is 1000", "from 1 to 1000000"),
    Case("name_nul", [GOOD, "--name", "a\0b"], ["name is 'a", "must be printable"]),
    Case("name_newline", [GOOD, "--name", "a\nb"], ["name is 'a", "must be printable"]),
    change("name_long", f"--name {'n' * 256}", "name is 'nnn", "at most 200 bytes"),
    change("name_outside", "--name ../../x", "name is '../../x'", "without .."),
    change("name_absolute", "--name /x", "name is '/x'", "without .."),
    Case("run_dir_empty", [GOOD, "--run-dir", ""], ["run_dir is ''", "not empty"]),
    Case("run_dir_nul", [GOOD, "--run-dir", "a\0b"], ["run_dir is 'a", "printable"]),
    change("run_dir_long", f"--run-dir {'n' * 256}", "run_dir is 'nnn", "at most 255 bytes"),
    change("keep_none", "--checkpoint.keep 0", "checkpoint.keep is 0", "at least 1"),
    change("save_every", "--checkpoint.every -5", "checkpoint.every is -5", "0 or more"),
    # sizes
    change(
        "minibatches", "--algo.minibatches 3",
        "128", "algo.minibatches 3", "nearest: 126, 129; or algo.minibatches 2, 4",
    ),
    change("too_few_steps", "--total-steps 100", "total_steps 100", "4 x", "nearest: 512"),
    change(
        "too_many_updates", f"--total-steps 1{'0' * 30}", "more than 2147483646", "nearest: 10995",
    ),
    change("envs_by_devices", "--devices 3", "env.num_envs 4", "3 devices", "nearest: 3, 6"),
    change("envs_below_devices", "--devices 8", "env.num_envs 4", "8 devices", "nearest: 8"),
    change(
        "envs_by_jax_ranks",
        "--env.num-envs 10 --nprocs 4 --sync.strategy jax",
        "env.num_envs 10", "4 ranks", "nearest: 8, 12",
    ),
    change("envs_below_ranks", "--nprocs 8", "env.num_envs 4", "8 ranks", "nearest: 8"),
    change(
        "shards_by_envs", "--sync.deterministic --sync.shards 3",
        "env.num_envs 4", "sync.shards 3", "nearest: 3, 6",
    ),
    change(
        "shards_by_devices",
        "--env.num-envs 8 --sync.deterministic --sync.shards 4 --devices 4",
        "sync.shards 4", "two per device", "nearest: 8",
    ),
    # ranks and devices
    change("nprocs_zero", "--nprocs 0", "nprocs is 0", "at least 1"),
    change("nprocs_text", "--nprocs two", "--nprocs", "'two'"),
    change("devices_negative", "--devices -1", "devices is -1", "0 or more"),
    # roles
    change("learners_alone", "--learners 1", "learners is 1", "add --actors N"),
    change("learners_negative", "--learners -1", "learners is -1", "0 or more"),
    change("actors_alone", "--actors 2", "actors has no effect without --learners"),
    change("actor_envs_alone", "--actor-envs 2 2", "actor_envs has no effect without --learners"),
    change("actor_envs_zero", "--learners 1 --actors 2 --actor-envs 0 4", "actor_envs is (0, 4)"),
    change(
        "actor_envs_sum", "--env.num-envs 64 --learners 1 --actors 2 --actor-envs 8 16",
        "actor_envs add up to 24, env.num_envs is 64",
    ),
    change("too_few_actors", "--learners 3 --actors 2", "3 learners need an actor each"),
    change("all_learn", "--nprocs 4 --learners 4", "no rank is left to act", "--learners out"),
    change(
        "nprocs_and_roles", "--nprocs 4 --learners 3 --actors 2",
        "3 learners and 2 actors are 5 ranks, but --nprocs has started 4",
    ),
    change(
        "shards_of_actors",
        "--env.num-envs 64 --sync.deterministic --learners 1 --actors 8",
        "every actor needs two shards: --sync.shards 16",
    ),
    *(
        change(
            f"roles_with_{strategy}", f"--learners 1 --actors 2 --sync.strategy {strategy}",
            "roles go with allreduce between the learners", strategy,
        )
        for strategy in ("gather", "jax")
    ),
    change("roles_with_eval", "--learners 1 --actors 2 --eval.every 5", "eval.every", "evaluate"),
    # environments
    change("env_typo", "--env.id CartPol-v1", "env.id 'CartPol-v1'", "mean CartPole-v1?"),
    change("env_version", "--env.id Ant-v9", "env.id 'Ant-v9'", "mean Ant-v5?"),
    change("env_of_gymnasium", "--env.id ALE/Pong-v5", "'ALE/Pong-v5'", "mean Pong-v5?"),
    change(
        "gymnasium_typo", "--env.backend gymnasium --env.id Acrobt-v1",
        "env.id 'Acrobt-v1'", "mean Acrobot-v1?",
    ),
    change(
        "gymnasium_module", "--env.backend gymnasium --env.id not_there:Maze-v0",
        "env.id 'not_there:Maze-v0'", "No module named 'not_there'",
    ),
    # run directories
    change("below_a_file", "--run-dir TMP/empty.py/run", "TMP/empty.py/run", "not a directory"),
    change("is_a_file", "--run-dir TMP/empty.py", "run_dir TMP/empty.py", "not a directory"),
    change("foreign", "--run-dir TMP/foreign", "run_dir TMP/foreign", "no run of spmdrl"),
    change("foreign_restart", "--run-dir TMP/foreign --restart", "TMP/foreign", "no run of spmdrl"),
    change("changed_env", "--run-dir TMP/run", "TMP/run", "env.id: 'Acrobot-v1' ->", "--restart"),
    change("changed_seed", "--run-dir TMP/run --seed 7", "seed: 1 -> 7", "--restart"),
    change("clone", "--run-dir TMP/clone", "TMP/clone", "made by spmdrl.clone", "--run-dir"),
    change("damaged_run", "--run-dir TMP/damaged", "TMP/damaged/config.json", "damaged"),
    # other runs
    change("init_from_nowhere", "--init-from TMP/nowhere", "init_from TMP/nowhere", "not a run"),
    change("init_from_empty", "--init-from TMP/run:best", "init_from TMP/run:best", "no check"),
    change(
        "schedule_too_short", "--schedule-steps 1000",
        "schedule_steps 1000 is less than total_steps 500000", "constant",
    ),
    change("schedule_of_nothing", "--schedule-steps 5", "schedule_steps 5", "nearest: 512"),
    # optional packages
    change("no_wandb", "--log.wandb project", "log.wandb", "--extra wandb"),
    change("no_tensorboard", "--log.tensorboard", "log.tensorboard", "--extra tb"),
]  # fmt: skip

# Reads the cases, answers in JSON. What must not happen is replaced by something harmless.
RUNNER = """
import contextlib, io, json, sys, types
for optional in ("wandb", "tensorboardX"):
    sys.modules[optional] = None  # as where they are not installed
from spmdrl import train
session = types.ModuleType("spmdrl.runtime.session")
session.run_session = lambda *_: "training began"
sys.modules["spmdrl.runtime.session"] = session
train.spawn = lambda *_: "mpirun was started"
heavy = json.loads(sys.argv[1])
answers = []
for argv in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = train.main(argv)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    answers.append([code, said.getvalue(), [m for m in heavy if m in sys.modules]])
print(json.dumps(answers))
"""


def plain(text: str) -> str:
    """Without the frames that tyro draws, on one line."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Bad config files and run directories."""
    place = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (place / f"{name}.py").write_text(text)
    for name in ("foreign", "run", "damaged", "clone"):
        (place / name).mkdir()
    (place / "foreign" / "thesis.tex").write_text("do not lose this")
    before = Config(seed=1, env=EnvConfig(id="Acrobot-v1", num_envs=4))
    (place / "run" / "config.json").write_text(to_json(replace(before, run_dir=str(place / "run"))))
    (place / "damaged" / "config.json").write_text(to_json(before)[:100])
    (place / "clone" / "config.json").write_text(to_json(before))
    (place / "clone" / "clone.json").write_text("{}")
    return place


def filled(words: list[str], folder: Path) -> list[str]:
    return [word.replace("TMP", str(folder)) for word in words]


@pytest.fixture(scope="module")
def answers(folder) -> dict[str, tuple[object, str, list[str]]]:
    questions = [filled(case.argv, folder) for case in CASES]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(HEAVY)],
        input=json.dumps(questions),
        capture_output=True, text=True, cwd=ROOT, env=clean_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip([case.name for case in CASES], found, strict=True))


def test_there_are_enough_cases_with_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input(case, answers, folder):
    code, said, heavy = answers[case.name]
    message = plain(said)
    assert code == 2, (code, message)
    assert heavy == []
    for part in filled(case.says, folder):
        assert part in message
    assert "Traceback" not in message
    assert len(message.replace(str(folder), "")) < 450, message


@pytest.mark.parametrize("name", ["file_missing", "nested_flag_typo", "env_typo", "foreign"])
def test_bad_input_as_a_command(name, folder):
    case = next(case for case in CASES if case.name == name)
    done = python("-X", "importtime", "-m", "spmdrl.train", *filled(case.argv, folder))
    lines = done.stderr.splitlines()
    imported = {
        line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")
    }
    message = plain("\n".join(line for line in lines if not line.startswith("import time:")))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "spmdrl.config" in imported
    assert not imported & set(HEAVY)
    for part in filled(case.says, folder):
        assert part in message


def test_nothing_was_moved_or_written(answers, folder):
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {
        "foreign", "run", "damaged", "clone",
    }  # fmt: skip
    assert [p.name for p in (folder / "foreign").iterdir()] == ["thesis.tex"]
    assert [p.name for p in (folder / "run").iterdir()] == ["config.json"]


def test_help_is_answered_without_jax():
    done = python("-X", "importtime", "-m", "spmdrl.train", GOOD, "--help")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "--algo.clip-eps" in done.stdout
    assert not imported & set(HEAVY)

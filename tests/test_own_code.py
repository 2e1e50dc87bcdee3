"""Code of the user's own: known wherever a run has a process, executed only when asked for."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig, own_code, read_file, to_json
from spmdrl.envs.origin import named_code, needs_own_code
from spmdrl.parallel.spawn import mpirun_command
from spmdrl.runtime.consent import Consent, bring_code, trust_words
from spmdrl.runtime.provenance import (
    Code,
    Source,
    changed_files,
    code_from_json,
    find_code,
    read_code,
)
from spmdrl.runtime.rundir import open_run
from tests.children import CARTPOLE, ROOT, python
from tests.own_commands import refuses, spmdrl, succeeds

PROJECT = ROOT / "tests" / "own_project"
PLAIN = "from spmdrl.config import Config\nconfig = Config()\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the user's project, which tests may change."""
    return Path(shutil.copytree(PROJECT, tmp_path_factory.mktemp("own") / "project"))


@pytest.fixture(scope="module")
def elsewhere(project) -> Path:
    """Another folder than the project's, in which everything is started."""
    folder = project.parent / "elsewhere"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def trained(project, elsewhere) -> tuple[Path, str]:
    """A run on one rank, and what the training said."""
    said = succeeds("train", "../project/config.py", "--run-dir", "run", cwd=elsewhere)
    return elsewhere / "run", said


@pytest.fixture(scope="module")
def recorded(trained, elsewhere) -> tuple[Path, str]:
    words = ("run", "--out", "data", "--episodes", 3, "--trust")
    return elsewhere / "data", succeeds("record", *words, cwd=elsewhere)


@pytest.fixture
def mark(tmp_path) -> Path:
    """Where the project's module says that it was imported."""
    return tmp_path / "imported"


def copied(run: Path, to: Path, **env: object) -> Path:
    """The run as somebody else would hand it over, with another environment in its config."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(".lock"))
    config = json.loads((to / "config.json").read_text())
    config["env"] |= env
    (to / "config.json").write_text(json.dumps(config))
    return to


# ---------------------------------------------------------------------------------------------
# Training


def test_a_run_records_where_its_code_came_from(trained, project):
    code = read_code(trained[0])
    assert code is not None
    assert code.config is not None
    assert code.needed

    def hash_of(name: str) -> str:
        return hashlib.sha256((project / name).read_bytes()).hexdigest()

    config = project / "config.py"
    assert (code.config.file, code.config.sha256) == (str(config), hash_of("config.py"))
    expected = Source("myenv", str(project / "myenv.py"), hash_of("myenv.py"))
    assert code.modules == (expected,)
    assert code.folders[0] == str(project)


def test_the_command_that_is_suggested_after_training_can_be_pasted(trained, elsewhere):
    _, said = trained
    command = re.search(r"^evaluate  python -m spmdrl\.evaluate (.*)$", said, re.MULTILINE)
    assert command is not None
    assert "over 3 episodes" in succeeds("evaluate", *command[1].split(), cwd=elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nprocs", "mpirun"])
def test_two_ranks_know_the_environment(start, project, elsewhere, trained, tmp_path, mark):
    words = [project / "config.py", "--run-dir", tmp_path / "run"]
    if start == "nprocs":
        said = succeeds("train", *words, "--nprocs", 2, cwd=elsewhere, OWN_PROJECT_MARK=str(mark))
    else:
        by = tuple(mpirun_command(2))
        said = succeeds("train", *words, cwd=elsewhere, start=by, OWN_PROJECT_MARK=str(mark))
    assert "on 2 rank(s)" in said
    processes = 3 if start == "nprocs" else 2  # with the one that starts the ranks
    assert len(set(mark.read_text().split())) >= processes


def test_a_rank_that_cannot_execute_the_config_file_is_named(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(PLAIN + "import os\nassert os.environ['OMPI_COMM_WORLD_RANK'] == '0'\n")
    start = tuple(mpirun_command(2))
    done = spmdrl("train", config, "--run-dir", "run", cwd=tmp_path, start=start)
    assert done.returncode == 2
    assert "spmdrl: rank 1: config file" in done.stderr
    assert "AssertionError" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_warns_of_changed_code_and_names_the_files(trained, tmp_path):
    copied(trained[0], tmp_path / "run")
    project = Path(shutil.copytree(PROJECT, tmp_path / "project"))
    with (project / "myenv.py").open("a") as file:
        file.write("# another line\n")
    words = [project / "config.py", "--run-dir", "run", "--total-steps", 4 * 16 * 4]
    said = succeeds("train", *words, cwd=tmp_path)
    warning = f"code has changed since this run was last started: {project / 'myenv.py'}\n"
    assert f"warning: {warning}" in said
    assert warning in (tmp_path / "run" / "log.txt").read_text()


def test_the_last_start_of_a_run_is_what_code_is_compared_with(tmp_path):
    config = Config(run_dir=str(tmp_path / "run"))
    starts = [code_of(config="a", env=value) for value in ("b", "b", "c", "c")]
    changed = [open_run(config, code).changed_code for code in starts]
    assert changed == [(), (), ("/p/env.py",), ()]
    assert read_code(tmp_path / "run") == starts[-1]


@pytest.mark.slow
def test_a_module_that_only_the_id_names_is_found_beside_the_config(project, elsewhere, tmp_path):
    config = project / "by_id.py"
    text = (project / "config.py").read_text().replace("import myenv  # noqa: F401\n", "")
    config.write_text(text.replace('"Sides-v0"', '"myenv:Sides-v0"'))
    succeeds("train", config, "--run-dir", tmp_path / "run", cwd=elsewhere)
    code = read_code(tmp_path / "run")
    assert code is not None
    assert [source.name for source in code.modules] == ["myenv"]
    line = refuses("evaluate", tmp_path / "run", cwd=elsewhere)
    assert "the environment 'myenv:Sides-v0' from" in line
    succeeds("evaluate", tmp_path / "run", "--trust", cwd=elsewhere)


# ---------------------------------------------------------------------------------------------
# Playing: nothing is executed unasked


@pytest.mark.parametrize("command", ["evaluate run", "record run --out data-refused"])
def test_nothing_is_imported_without_consent(command, trained, project, elsewhere, mark):
    line = refuses(*command.split(), cwd=elsewhere, OWN_PROJECT_MARK=str(mark))
    name, *words = command.split()
    assert line == (
        f"spmdrl: run uses the environment 'Sides-v0' from '{project / 'config.py'}'; "
        f"to execute that code: python -m spmdrl.{name} {' '.join(words)} --trust"
    )
    assert not mark.exists()
    assert not (elsewhere / "data-refused").exists()


def test_trust_executes_what_the_run_was_trained_with_and_says_so(
    trained, project, elsewhere, mark, tmp_path
):
    video = tmp_path / "a.gif"
    words = ("run", "--trust", "--video", video)
    said = succeeds("evaluate", *words, cwd=elsewhere, OWN_PROJECT_MARK=str(mark))
    assert f"spmdrl: executing '{project / 'config.py'}'\n" in said
    assert "changed" not in said
    assert mark.exists()
    assert video.stat().st_size > 0
    returns = json.loads((elsewhere / "run" / "eval.json").read_text())["returns"]
    assert all(value % 2 == 0 for value in returns), "the wrapper doubles every reward"


def test_a_config_file_of_ones_own_serves_as_well(trained, elsewhere, mark, tmp_path):
    moved = Path(shutil.copytree(PROJECT, tmp_path / "moved"))
    words = ("run", "--config", moved / "config.py")
    succeeds("evaluate", *words, cwd=elsewhere, OWN_PROJECT_MARK=str(mark))
    assert mark.exists()


@pytest.mark.slow
def test_a_recording_carries_the_code_on_to_its_clone(recorded, elsewhere, mark):
    _, said = recorded
    assert "clone     python -m spmdrl.clone data --run-dir runs/clone --trust\n" in said
    words = ("data", "--run-dir", "clone", "--epochs", 1, "--eval-episodes", 2)
    line = refuses("clone", *words, cwd=elsewhere, OWN_PROJECT_MARK=str(mark))
    assert line.endswith("python -m spmdrl.clone data --run-dir clone --epochs 1 "
                         "--eval-episodes 2 --trust")  # fmt: skip
    assert not mark.exists()
    said = succeeds("clone", *words, "--trust", cwd=elsewhere)
    assert "evaluate  python -m spmdrl.evaluate clone --trust\n" in said
    refuses("evaluate", "clone", cwd=elsewhere)
    succeeds("evaluate", "clone", "--trust", "--episodes", 2, cwd=elsewhere)


@pytest.mark.slow
def test_a_script_loads_a_policy_without_the_code_or_asks_for_it(
    trained, project, elsewhere, mark, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text("import sys, spmdrl\nspmdrl.load(sys.argv[1], **eval(sys.argv[2]))\n")
    around = {"OWN_PROJECT_MARK": str(mark), "PYTHONPATH": str(ROOT)}
    assert python(script, trained[0], {}, **around).returncode == 0
    assert not mark.exists(), "spaces.json says it all"
    run = copied(trained[0], tmp_path / "run")
    (run / "spaces.json").unlink()
    refused = python(script, run, {}, **around)
    assert refused.stderr.rstrip().endswith(
        f"from '{project / 'config.py'}'; to execute that code: spmdrl.load('{run}', trust=True)"
    )
    assert not mark.exists()
    assert python(script, run, {"trust": True}, **around).returncode == 0
    assert mark.exists()


@pytest.mark.slow
def test_workers_of_a_recording_all_know_the_environment(recorded, elsewhere):
    words = ("run", "--out", "data2", "--episodes", 3, "--num-envs", 2, "--nprocs", 2)
    said = succeeds("record", *words, "--trust", cwd=elsewhere)
    assert said.count("spmdrl: executing") == 1
    (one, two) = (json.loads((elsewhere / d / "index.json").read_text()) for d in ("data", "data2"))
    assert [e["sha256"] for e in one["episodes"]] == [e["sha256"] for e in two["episodes"]]


def test_a_stranger_cannot_make_us_import_a_module(trained, project, tmp_path, mark):
    """The module lies where `python -m` would find it, and the id names it."""
    stranger = tmp_path / "stranger"
    copied(trained[0], stranger, id="evil:Env-v0")
    (stranger / "evil.py").write_text((PROJECT / "myenv.py").read_text())
    (stranger / "code.json").unlink()
    inside = {"cwd": stranger, "OWN_PROJECT_MARK": str(mark)}
    line = refuses("evaluate", ".", **inside)
    assert line.endswith("to import that code: python -m spmdrl.evaluate . --trust")
    refuses("record", ".", "--out", "data", **inside)
    assert not mark.exists()
    line = refuses("evaluate", ".", "--config", CARTPOLE, **inside)
    assert "uses 'evil:Env-v0', which" in line
    assert not mark.exists()


@pytest.mark.parametrize("env_id", ["gymnax:evil:Env", "evil:gymnax:Env", "gymnax.evil:Env"])
def test_the_name_of_a_library_in_an_id_is_no_way_around_consent(env_id, tmp_path, mark):
    """Each file lies where that id would be imported from."""
    for module in ("gymnax:evil", "evil:gymnax", "evil", "gymnax/evil"):
        file = tmp_path / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text((PROJECT / "myenv.py").read_text())
    config = Config(env=env(env_id, "jax"), run_dir=str(tmp_path / "run"))
    open_run(config, None)
    (tmp_path / "run" / "checkpoints" / "update-00000001").mkdir(parents=True)
    line = refuses("evaluate", "run", cwd=tmp_path, OWN_PROJECT_MARK=str(mark))
    assert f"uses the environment '{env_id}'; to import that code" in line
    assert not mark.exists()


def test_a_stranger_cannot_have_another_file_executed(trained, elsewhere, tmp_path, mark):
    run = copied(trained[0], tmp_path / "run")
    (run / "planted.py").write_text((PROJECT / "myenv.py").read_text())
    code = json.loads((run / "code.json").read_text())
    for file in ("planted.py", str(run / "planted.py")):
        code["config"]["file"] = file
        (run / "code.json").write_text(json.dumps(code))
        refuses("evaluate", run, cwd=run, OWN_PROJECT_MARK=str(mark))
    assert not mark.exists()
    code["config"]["file"] = "planted.py"  # relative: where would that be?
    (run / "code.json").write_text(json.dumps(code))
    line = refuses("evaluate", run, "--trust", cwd=run, OWN_PROJECT_MARK=str(mark))
    assert "'planted.py', which is not there" in line
    assert not mark.exists()


def test_a_config_file_that_is_gone_gets_one_line_with_the_remedy(trained, elsewhere, tmp_path):
    run = copied(trained[0], tmp_path / "run")
    code = json.loads((run / "code.json").read_text())
    code["config"]["file"] = "/nowhere/config.py"
    (run / "code.json").write_text(json.dumps(code))
    for words in ([run], [run, "--trust"]):
        line = refuses("evaluate", *words, cwd=elsewhere)
        assert "from '/nowhere/config.py', which is not there" in line
        assert line.endswith("--config FILE.py")


def test_a_module_that_is_gone_gets_one_line_with_the_remedy(trained, elsewhere, tmp_path):
    run = copied(trained[0], tmp_path / "run", id="not_there:Env-v0")
    (run / "code.json").unlink()
    line = refuses("evaluate", run, "--trust", cwd=elsewhere)
    assert "No module named 'not_there'" in line
    assert line.endswith("--config FILE.py")


@pytest.mark.parametrize("text", ["", "[]", '{"config": 3}', '{"config": {"file": 7}}'])
def test_a_damaged_record_is_none(text, tmp_path):
    (tmp_path / "code.json").write_text(text)
    assert read_code(tmp_path) is None
    assert trust_words(tmp_path) == []


# ---------------------------------------------------------------------------------------------
# Whose code it is


def env(env_id: str, backend: str = "gymnasium", **more) -> EnvConfig:
    return EnvConfig(id=env_id, backend=backend, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (env("CartPole-v1", "envpool"), False),
        (env("evil:CartPole-v1", "envpool"), False),  # unknown there, and never imported
        (env("CartPole-v1"), False),
        (env("Mine-v0"), True),
        (env("ale_py:ALE/Pong-v5"), True),
        (env("gymnasium:CartPole-v1"), True),
        (env("os:system"), True),
        (env("gymnax:CartPole-v1", "jax"), False),
        (env("mine:Env", "jax"), True),
        (env("gymnax:evil:Env", "jax"), True),
        (env("evil:gymnax:Env", "jax"), True),
        (env("gymnax.evil:Env", "jax"), True),
        (env("evil:gymnax:Env", "gymnasium"), True),
    ],
    ids=lambda value: f"{value.backend} {value.id}" if isinstance(value, EnvConfig) else None,
)
def test_which_environments_need_code_of_the_users(config, needed):
    assert needs_own_code(config) is needed


@pytest.mark.parametrize("wrap", ["a:f, b:g", ("a:f", "b:g")])
def test_wrappers_are_code_of_the_users(wrap):
    config = env("CartPole-v1", wrap=wrap)
    assert named_code(config) == ["a:f", "b:g"]
    assert needs_own_code(config)
    with pytest.raises(ConfigError, match="'CartPole-v1' in 'a:f', 'b:g'; to import that code"):
        bring_code(Config(env=config), None, "run", Consent())


def test_an_environment_put_in_the_place_of_a_known_one_needs_its_code(monkeypatch):
    import gymnasium as gym

    spec = replace(gym.registry["CartPole-v1"], entry_point="mine:CartPole")
    monkeypatch.setitem(gym.registry, "CartPole-v1", spec)
    code = replace(find_code(Config(env=env("CartPole-v1"))), config=Source("", CARTPOLE, ""))
    assert code.needed
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="--trust"):  # though Gymnasium has one of that name
        bring_code(Config(env=env("CartPole-v1")), code_from_json(code.to_json()), "x", Consent())


def test_a_known_environment_needs_no_consent():
    assert bring_code(Config(), None, "run", Consent()) is None


# ---------------------------------------------------------------------------------------------
# Executing


def test_a_file_is_executed_once_unless_it_changes(tmp_path):
    config, log = tmp_path / "counted.py", tmp_path / "log"
    log.touch()
    add = (
        f"import pathlib\nlog = pathlib.Path({str(log)!r})\nlog.write_text(log.read_text() + 'x')\n"
    )
    config.write_text(PLAIN + add)
    for _ in range(3):
        read_file(str(config))
    assert log.stat().st_size == 1
    config.write_text(PLAIN + add + "# changed\n")
    read_file(str(config))
    assert log.stat().st_size == 2
    assert own_code.executed()[-1] == str(config)


def test_its_folder_is_searched_last_but_first_for_its_own_imports(tmp_path):
    (tmp_path / "wave.py").write_text("mine = True\n")
    config = tmp_path / "shadows.py"
    config.write_text(f"{PLAIN}import sys\nfirst = sys.path[0]\nsys.path.insert(0, '/added')\n")
    module = own_code.execute(config)
    try:
        assert module.first == str(tmp_path)
        assert sys.path[0] == "/added", "what the file adds itself stays"
        position = sys.path.index(str(tmp_path))
        assert position > max(i for i, p in enumerate(sys.path) if "site-packages" in p)
    finally:
        sys.path.remove("/added")
        sys.path.remove(str(tmp_path))


def test_a_config_file_that_exits_is_refused(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"leaves\.py ended by sys\.exit\(0\)"):
        read_file(str(tmp_path / "leaves.py"))


def code_of(**hashes: str) -> Code:
    sources = tuple(Source(name, f"/p/{name}.py", value) for name, value in hashes.items())
    return Code(sources[0], ("/p",), sources[1:], needed=True)


def test_changed_files_are_those_of_another_hash():
    before = code_of(config="a", env="b", gone="c")
    assert changed_files(before, before) == []
    assert changed_files(before, code_of(config="a", env="x", new="y")) == ["/p/env.py"]
    assert changed_files(before, code_of(config="x", env="b")) == ["/p/config.py"]
    assert code_from_json(json.loads(json.dumps(before.to_json()))) == before


def test_a_run_killed_before_its_config_was_written_can_start_again(tmp_path):
    config = Config(run_dir=str(tmp_path / "run"))
    open_run(config, code_of(config="a"))
    (tmp_path / "run" / "config.json").unlink()
    assert not open_run(config, code_of(config="a")).resumed


# ---------------------------------------------------------------------------------------------
# Commands that train


def test_a_batch_script_is_written_for_an_own_environment(project, elsewhere):
    script = succeeds("slurm", project / "config.py", "--ranks-per-node", 1, cwd=elsewhere)
    assert str(project / "config.py") in script


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_verify_and_tune_train_an_own_environment(project, elsewhere):
    said = succeeds("verify", "../project/config.py", "--updates", 1, cwd=elsewhere)
    assert "jax, 2 x 2" in said
    said = succeeds("tune", "../project/config.py", "--updates", 1, cwd=elsewhere)
    assert "fastest: " in said


def test_an_own_algorithm_is_played_without_its_code(tmp_path):
    """Its class is only named in the config; see tests/test_own_algorithm.py for the whole way."""
    config = read_file(str(ROOT / "tests" / "a2c.py"))
    assert "config_file_a2c:A2c" in to_json(config)
    assert not needs_own_code(config.env)

"""`spmdrl envs`: what is said of an environment, and what of one that breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig, NetConfig
from spmdrl.envs.__main__ import described_config, main, matching, random_play, row
from spmdrl.envs.child import Child
from spmdrl.envs.errors import EnvError
from spmdrl.envs.ids import check_id, likely_backend, listed_ids
from spmdrl.runtime.env_sheet import Played, ask_for_sheet, make_sheet
from tests.children import ROOT
from tests.own_commands import refuses, succeeds

STRANGE = "tests.strange_envs"


def config_of(env_id: str, backend: str = "envpool", **more) -> Config:
    env = EnvConfig(id=env_id, backend=backend, num_envs=2, **more)  # type: ignore[arg-type]
    return Config(env=env)


# ---------------------------------------------------------------------------------------------
# The sheet


def test_an_environment_of_envpool():
    sheet = make_sheet(config_of("CartPole-v1", options={"max_episode_steps": 70}), 0.1)
    assert (sheet.backend, sheet.family) == ("envpool", "classic control")
    assert sheet.observation[0].endswith("(4,), float32)")
    assert sheet.action == ("Discrete(2)",)
    assert (sheet.action_kind, sheet.networks_see) == ("2 choices", "4 numbers -> MLP")
    assert sheet.time_limit == 70
    assert sheet.options == {"max_episode_steps": "70", "reward_threshold": "475.0"}
    played = sheet.played
    assert played.reward == (1.0, 1.0)
    assert played.episodes > 0
    assert 5 < played.length[0] <= played.length[1] <= 70
    assert played.returns == tuple(map(float, played.length))
    assert played.steps_per_second > 0
    assert not played.wrong


def test_atari_names_its_options():
    env = config_of("Pong-v5", options={"repeat_action_probability": 0.25, "stack_num": 2})
    sheet = make_sheet(replace(env, env=replace(env.env, num_envs=1)), 0.0)
    wanted = {"repeat_action_probability": "0.25", "stack_num": "2", "full_action_space": "false"}
    assert wanted.items() <= sheet.options.items()
    assert sheet.networks_see == "image 2x84x84 -> Nature CNN"
    assert "base_path" not in sheet.options


def test_every_leaf_has_a_line_and_keys_change_who_sees_it():
    config = replace(config_of("MiniGrid-Empty-5x5-v0"), net=NetConfig(policy_keys=("image",)))
    sheet = make_sheet(config, 0.0)
    assert [leaf.split()[0] for leaf in sheet.observation] == ["direction", "image", "mission"]
    assert "direction -> one-hot 4 (value only)" in sheet.networks_see
    assert sheet.networks_see.endswith("mission -> left out")


def test_an_environment_of_gymnasium():
    config = config_of("FrozenLake-v1", "gymnasium", workers="inline", options={"map_name": "8x8"})
    sheet = make_sheet(config, 0.0)
    assert (sheet.family, sheet.time_limit) == ("registered, gymnasium", 100)
    assert sheet.observation == ("Discrete(64)",)
    assert sheet.options["map_name"] == '"8x8"'
    assert sheet.options["is_slippery"] == "true"


def test_an_own_environment_and_its_rewards():
    sheet = make_sheet(config_of(f"{STRANGE}:Counts", "gymnasium", workers="inline"), 0.05)
    assert (sheet.family, sheet.time_limit) == ("your own", None)
    assert sheet.options == {"size": "3", "name": '"one two"'}
    assert sheet.played.reward == (1.0, 4.0), "the 0 of a reset is no reward"
    assert (sheet.played.length, sheet.played.returns) == ((4, 4), (10.0, 10.0))


def test_what_is_not_as_declared_is_seen():
    sheet = make_sheet(config_of(f"{STRANGE}:Overflows", "gymnasium", workers="inline"), 0.0)
    assert sheet.played.wrong == "observation is not finite"


def test_an_own_environment_written_in_jax():
    options = {"time_limit": 9}
    sheet = make_sheet(config_of("tests.jax_envs:CartPole", "jax", options=options), 0.2)
    assert (sheet.family, sheet.time_limit) == ("your own", 9)
    assert sheet.options == {"time_limit": "9"}
    assert sheet.played.length[1] == 9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_library_names_its_options_and_its_limit():
    pytest.importorskip("gymnax")
    sheet = make_sheet(config_of("gymnax:CartPole-v1", "jax", options={"gravity": 1.5}), 0.0)
    assert (sheet.family, sheet.time_limit) == ("gymnax", 500)
    assert sheet.options["gravity"] == "1.5"


def test_what_no_network_can_be_made_for_is_refused():
    config = replace(config_of("CartPole-v1"), net=NetConfig(policy_keys=("camera",)))
    with pytest.raises(ConfigError, match="camera"):
        make_sheet(config, 0.0)


# ---------------------------------------------------------------------------------------------
# In a process of its own


def test_a_process_that_dies_or_hangs_is_an_answer_and_the_next_one_is_asked():
    with Child("tests.answering") as child:
        assert child.ask({"say": "yes"}) == {"said": "yes"}
        assert child.ask({"refuse": "no"}) == {"refused": "no"}
        assert child.ask({"raise": "100 %d"})["fault"].endswith("raised ValueError: 100 %d")
        assert child.ask({"exit": 3}) == {"crashed": "exit code 3: last words"}
        assert not child.alive
        assert child.ask({"say": "yes"})["crashed"].startswith("exit code 3"), "it stays dead"
    with Child("tests.answering") as child:
        assert child.ask({"kill": 11})["crashed"].startswith("ended by SIGSEGV")
    with Child("tests.answering") as child:
        assert child.ask({"say": "yes"}) == {"said": "yes"}
        assert child.ask({"sleep": 60}, seconds=0.2) == {"crashed": "no answer for 0 s"}
        assert not child.alive


BREAKING = {
    "JaxDies": "its process gave no sheet: exit code 3",
    "JaxRaises": "the environment raised ValueError: 100 %d broken",
    "Raises": r"environment \d \(seed \d+, worker \d, episode step 1\) raised ValueError: 100 %d",
    "Dies": r"worker \d .* was ended by SIGSEGV in environment \d",
    "Hangs": r"no answer for 5 s: worker 0 .*, hangs in environment 0",
}
LONG = ("Raises", "Dies", "Hangs")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in BREAKING]
)
def test_an_environment_that_breaks_is_a_fault_with_its_name(name):
    backend = "jax" if name.startswith("Jax") else "gymnasium"
    config = config_of(f"{STRANGE}:{name}", backend, timeout_s=5.0)
    with pytest.raises(EnvError, match=BREAKING[name]) as fault:
        ask_for_sheet(config, 0.0)
    assert str(fault.value).startswith(f"env.id {STRANGE}:{name}: ")
    assert "spmdrl/runtime" not in fault.value.details


@pytest.mark.slow
def test_a_config_file_brings_its_environment(tmp_path):
    said = succeeds("envs", ROOT / "tests/own_project/config.py", "--seconds", 0, cwd=tmp_path)
    assert "Sides-v0" in said
    assert f"python -m spmdrl.train {ROOT / 'tests/own_project/config.py'}" in " ".join(
        said.split()
    )


@pytest.mark.slow
def test_a_module_of_the_current_folder_is_found(tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "tests" / "strange_envs.py").read_text())
    said = succeeds("envs", "mine:Counts", "--env.num-envs", 3, "--seconds", 0.1, cwd=tmp_path)
    assert "your own" in said
    assert "with 3 environments; reward 1 to 4" in said
    assert "a new episode" not in said, "what it prints itself"
    line = refuses("envs", "mine:Count", cwd=tmp_path)
    assert "neither registered nor in mine; did you mean Counts?" in line


# ---------------------------------------------------------------------------------------------
# Ids


def test_ids_are_listed_by_an_expression(capsys):
    assert main(["--list", "^walker|:walker"]) == 0
    found = capsys.readouterr().out.split()
    assert {"Walker2d-v4", "WalkerWalk-v1", "brax:walker2d"} <= set(found)
    assert all("walker" in env_id.lower() for env_id in found)
    assert len(matching(".")) == len(listed_ids()) > 1800


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--list", "CartPol-v"], "no id matches 'CartPol-v'; did you mean CartPole-v1?"),
        (["--list", "["], "--list '[' is not a regular expression: unterminated"),
        ([], "name an environment, such as"),
        (["CartPol-v1"], "there is no environment 'CartPol-v1'; did you mean CartPole-v1?"),
        (["CartPole-v1", "--env.backend", "jax"], "an id is LIBRARY:NAME or MODULE:CLASS"),
        (["CartPole-v1", "--env.num-env", "3"], "--env.num-envs"),
        (["CartPole-v1", "--env.num-envs", "0"], "env.num_envs is 0"),
        (["CartPole-v1", "--seconds", "-1"], "seconds is -1.0, but must be at least 0"),
        (["nothere.py"], "config file nothere.py does not exist"),
        (["nothere:Thing", "--env.backend", "jax"], "neither a library nor a module nothere"),
    ],
)
def test_bad_input_gets_one_line(words, answer, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert said.startswith("spmdrl: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        ("Pong-v5", "envpool"),
        ("gymnax:CartPole-v1", "jax"),
        ("ALE/Pong-v5", "gymnasium"),
        ("mine:Thing", "gymnasium"),
        ("mine:gymnax:Thing", "gymnasium"),
    ],
)
def test_an_id_chooses_its_backend(env_id, backend):
    assert likely_backend(env_id) == backend


def test_flags_go_before_what_an_id_chooses():
    config = described_config("CartPole-v1", ["--env.backend", "gymnasium", "--env.num-envs", "3"])
    assert config.env == EnvConfig(id="CartPole-v1", backend="gymnasium", num_envs=3)


def test_an_id_of_a_library_is_answered_with_its_backend():
    with pytest.raises(ConfigError, match=r"write --env\.backend jax for it"):
        check_id(EnvConfig(id="gymnax:CartPole-v1"))


# ---------------------------------------------------------------------------------------------
# In words


def test_play_in_words():
    played = Played(8, 100, 12345.6, (-1.0, 0.25), 3, (9, 9), (-20000.0, 7.5), "")
    assert random_play(played) == (
        "12,346 steps/s with 8 environments; reward -1 to 0.25; 3 episodes of 9 steps, return "
        "-20,000 to 7.5"
    )
    assert random_play(replace(played, episodes=0)).endswith("; no episode ended")


def test_long_values_are_wrapped_below_each_other():
    lines = row("name", "some-words " * 20).splitlines()
    assert lines[0].startswith("name            some-words")
    assert all(line.startswith(" " * 16 + "some-words") for line in lines[1:])
    assert max(map(len, lines)) <= 100

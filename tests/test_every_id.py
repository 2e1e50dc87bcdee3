"""Every id of envpool: read by a rule, or refused with a reason; compiled steps of each family."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spmdrl.config import Config, ConfigError, EnvConfig
from spmdrl.envs.envpool_backend import check_players, pool_reader
from spmdrl.envs.envpool_loading import load_envpool
from spmdrl.envs.ids import envpool_ids
from spmdrl.nets import make_policy
from spmdrl.nets.describe import describe
from tests import compiled_step

# Two or three of each family, besides those of test_envs. Not of ViZDoom, whose game crashes in
# some of its starts; the census (`python -m benchmarks.environments`) tries it.
SAMPLE = [
    "Acrobot-v1", "MountainCarContinuous-v0", "CarRacing-v3", "BipedalWalker-v3", "Taxi-v3",
    "Blackjack-v1", "Breakout-v5", "Hopper-v4", "HalfCheetah-v5", "CheetahRun-v1",
    "HumanoidStand-v1", "PandaPickCube-v1", "MetaWorld/DoorOpen-v3", "AdroitHandDoor-v1",
    "PointMaze_UMaze-v3", "HandReach-v3", "MyoSuite/myoHandReachFixed-v0", "Racetrack-v0",
    "ParkingParked-v0", "BabyAI-GoToRedBall-v0", "MiniGrid-DoorKey-8x8-v0", "Snake-v1",
    "Jumanji/Tetris-v0", "FlatPack-v0", "JobShop-v0", "RubiksCube-v0", "Maze-v0",
    "LevelBasedForaging-v0", "gfootball/academy_empty_goal-v1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_step_of_every_family_has_the_bits_of_a_python_step():
    command = [sys.executable, str(Path(compiled_step.__file__)), *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    equal = [line.removeprefix("equal ") for line in done.stdout.splitlines()]
    assert (equal, done.returncode) == (SAMPLE, 0), done.stderr[-2000:]


def answer(env_id: str) -> str:
    """What becomes of the id, by its declared arrays."""
    try:
        spec = load_envpool(env_id).make_spec(env_id)
    except ImportError:
        return "missing library"
    except Exception:
        return "needs options"
    config = Config(env=EnvConfig(id=env_id))
    try:
        check_players(spec, env_id)
        found = pool_reader(spec, env_id).spec
        make_policy(config, found)
        assert describe(config, found)
        return "sound"
    except ConfigError as error:
        text = str(error)
        return "players" if "players" in text else text.replace(env_id, "ID")


@pytest.mark.slow
def test_every_id_is_read_or_refused_with_a_reason():
    found = Counter(answer(env_id) for env_id in envpool_ids())
    print(found)
    allowed = {"sound", "missing library", "players", "needs options"}
    assert set(found) <= allowed, found
    assert found["sound"] >= 1500, found

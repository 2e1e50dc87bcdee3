"""envpool's families of environments: which ids belong together, and one or two to try."""

from __future__ import annotations

from dataclasses import dataclass

from spmdrl.envs.ids import envpool_families

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    name: str
    module: str  # of envpool
    samples: tuple[str, ...]

    def ids(self) -> list[str]:
        known = sorted(envpool_families().items())
        return [env_id for env_id, module in known if module == self.module]


FAMILIES = (
    Family("classic control", "envpool.classic_control", ("CartPole-v1", "Pendulum-v1")),
    Family("toy text", "envpool.toy_text", ("Blackjack-v1", "Taxi-v3")),
    Family("Box2D", "envpool.box2d", ("LunarLander-v3", "CarRacing-v3")),
    Family("MuJoCo", "envpool.mujoco.gym", ("HalfCheetah-v4", "Ant-v5")),
    Family("dm_control", "envpool.mujoco.dmc", ("WalkerWalk-v1", "CheetahRun-v1")),
    Family("Gymnasium-Robotics", "envpool.mujoco.robotics", ("FetchReach-v4", "FrankaKitchen-v1")),
    Family("MetaWorld", "envpool.mujoco.metaworld", ("MetaWorld/Reach-v3",)),
    Family("Playground", "envpool.mujoco.playground", ("Go1JoystickFlatTerrain-v1",)),
    Family("MyoSuite", "envpool.mujoco.myosuite", ("myoElbowPose1D6MRandom-v0",)),
    Family("Atari", "envpool.atari", ("Pong-v5", "Breakout-v5")),
    Family("MiniGrid", "envpool.minigrid", ("MiniGrid-Empty-5x5-v0",)),
    Family("Highway", "envpool.highway", ("highway-v0", "parking-v0")),
    Family("Jumanji", "envpool.jumanji", ("Game2048-v1", "Sokoban-v0")),
    Family("ViZDoom", "envpool.vizdoom", ("Basic-v1",)),
    Family("football", "envpool.gfootball", ("gfootball/academy_empty_goal-v1",)),
    Family("PGX", "envpool.pgx", ("Play2048-v1", "TicTacToe-v1")),
    Family("Procgen", "envpool.procgen", ("CoinrunEasy-v0",)),
)


def family_of(env_id: str) -> Family | None:
    module = envpool_families().get(env_id)
    return next((family for family in FAMILIES if family.module == module), None)

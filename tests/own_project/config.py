"""A config whose environment is registered by a module beside it; small, for tests."""

import myenv  # noqa: F401

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, EvalConfig, LogConfig, NetConfig

config = Config(
    total_steps=4 * 16 * 3,
    env=EnvConfig(id="Sides-v0", backend="gymnasium", num_envs=4),
    net=NetConfig(hidden=(8,)),
    algo=Ppo(num_steps=16, epochs=1, minibatches=2),
    eval=EvalConfig(episodes=3, num_envs=2),
    log=LogConfig(panel="off"),
)

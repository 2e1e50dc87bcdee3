"""CartPole without its velocities: the agent sees positions only and must remember the last ones.

python -m spmdrl.train configs/cartpole_memory.py
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=600_000,
    env=EnvConfig(id="CartPole-v1", num_envs=16, observe=(0, 2)),
    net=NetConfig(hidden=(64,), activation="tanh", shared=False, core="lstm", core_size=64),
    algo=Ppo(num_steps=128, epochs=8, minibatches=4, gamma=0.99, gae_lambda=0.95),
    optim=OptimConfig(lr=1e-3, lr_schedule="linear", adam_eps=1e-5, max_grad_norm=0.5),
)

"""Craftax-Classic with symbolic observations, simulated and learned in one compiled program.

uv run --extra craftax python -m spmdrl.train configs/craftax_classic.py

Return 6.3 at the end (seed 1), most of an hour on one core.
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=2_000_000,
    env=EnvConfig(backend="jax", id="craftax:Craftax-Classic-Symbolic-v1", num_envs=64),
    net=NetConfig(hidden=(256, 256), activation="tanh", shared=False),
    algo=Ppo(num_steps=64, epochs=4, minibatches=8, gamma=0.99, gae_lambda=0.8, entropy_coef=0.01),
    optim=OptimConfig(lr=2e-4, lr_schedule="linear", adam_eps=1e-5, max_grad_norm=1.0),
)

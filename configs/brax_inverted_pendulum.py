"""Brax's inverted pendulum: a physics engine in the same compiled program as the learner.

uv run --extra brax python -m spmdrl.train configs/brax_inverted_pendulum.py

One core: a minute and a half. Return 991 of 1000 at the end (seed 1).
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=500_000,
    env=EnvConfig(backend="jax", id="brax:inverted_pendulum", num_envs=32, normalize_obs=True),
    net=NetConfig(hidden=(64, 64), activation="tanh", shared=False),
    algo=Ppo(num_steps=64, epochs=8, minibatches=8, gamma=0.99, gae_lambda=0.95),
    optim=OptimConfig(lr=1e-3, lr_schedule="linear", adam_eps=1e-5, max_grad_norm=0.5),
)

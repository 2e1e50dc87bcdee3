"""LunarLander with the hyper-parameters of the SB3 zoo.

python -m spmdrl.train configs/lunarlander.py

One core: 1 minute. Return 264 at the end (seed 1).
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=1_000_000,
    env=EnvConfig(id="LunarLander-v3", num_envs=16),
    net=NetConfig(hidden=(64, 64), activation="tanh", shared=False),
    algo=Ppo(
        num_steps=1024,
        gamma=0.999,
        gae_lambda=0.98,
        epochs=4,
        minibatches=256,  # of 64 rows
        clip_eps=0.2,
        clip_value=False,
        entropy_coef=0.01,
        value_coef=0.5,
    ),
    optim=OptimConfig(lr=3e-4, lr_schedule="constant", adam_eps=1e-5, max_grad_norm=0.5),
)

"""HalfCheetah with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/halfcheetah.py

One core: 2 minutes. Return about 2100 at the end (seeds 1 to 3: 1726, 1799, 2789).
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=1_000_000,
    env=EnvConfig(id="HalfCheetah-v4", num_envs=1, normalize_obs=True, normalize_reward=True),
    net=NetConfig(hidden=(64, 64), activation="tanh", shared=False, log_std_init=0.0),
    algo=Ppo(
        num_steps=2048,
        gamma=0.99,
        gae_lambda=0.95,
        epochs=10,
        minibatches=32,
        clip_eps=0.2,
        clip_value=True,
        entropy_coef=0.0,
        value_coef=0.5,
        normalize_advantage="minibatch",
    ),
    optim=OptimConfig(lr=3e-4, lr_schedule="linear", adam_eps=1e-5, max_grad_norm=0.5),
)

"""Pong with the hyper-parameters of CleanRL's envpool Atari runs.

python -m spmdrl.train configs/pong.py

Ten million steps: about six hours on two cores, at 466 steps/s. Run for a few updates only;
published for these settings: 20.4.
"""

from spmdrl.algos import Ppo
from spmdrl.config import Config, EnvConfig, NetConfig, OptimConfig

config = Config(
    total_steps=10_000_000,
    env=EnvConfig(id="Pong-v5", num_envs=8, options={"episodic_life": True}, reward="sign"),
    net=NetConfig(torso="nature_cnn", shared=True),
    algo=Ppo(
        num_steps=128,
        gamma=0.99,
        gae_lambda=0.95,
        epochs=4,
        minibatches=4,
        clip_eps=0.1,
        clip_value=True,
        entropy_coef=0.01,
        value_coef=0.5,
        normalize_advantage="minibatch",
    ),
    optim=OptimConfig(lr=2.5e-4, lr_schedule="linear", adam_eps=1e-5, max_grad_norm=0.5),
)

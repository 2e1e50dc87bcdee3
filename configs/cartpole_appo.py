"""CartPole with APPO; `--lag 2` lets rollouts come from two updates before.

python -m spmdrl.train configs/cartpole_appo.py
"""

from spmdrl.algos import Appo
from spmdrl.config import Config, EnvConfig, OptimConfig

config = Config(
    total_steps=1_000_000,
    env=EnvConfig(id="CartPole-v1", num_envs=64),
    algo=Appo(num_steps=32, epochs=4, minibatches=4, entropy_coef=0.0, value_coef=0.02),
    optim=OptimConfig(lr=1e-3, lr_schedule="linear", max_grad_norm=0.5),
)

"""CartPole with IMPALA; `--lag 2` lets rollouts come from two updates before.

python -m spmdrl.train configs/cartpole_impala.py
"""

from spmdrl.algos import Impala
from spmdrl.config import Config, EnvConfig, OptimConfig

config = Config(
    total_steps=2_000_000,
    env=EnvConfig(id="CartPole-v1", num_envs=64),
    algo=Impala(num_steps=32, minibatches=4, entropy_coef=0.0, value_coef=0.05),
    optim=OptimConfig(lr=1e-3, lr_schedule="constant", max_grad_norm=40.0),
)

"""Acrobot with CleanRL's `ppo` hyper-parameters.

python -m spmdrl.train configs/acrobot.py
"""

from dataclasses import replace

from cartpole import config as base

config = replace(base, env=replace(base.env, id="Acrobot-v1"))

"""Ant with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/ant.py
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="Ant-v4"))

"""Ant with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/ant.py

One core: 7 minutes. Return 2248 at the end (seed 1).
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="Ant-v4"))

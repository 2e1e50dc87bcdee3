"""Acrobot with CleanRL's `ppo` hyper-parameters.

python -m spmdrl.train configs/acrobot.py

One core: about 20 s. Return -85 at the end (seeds 1 to 3: -86, -86, -84).
"""

from dataclasses import replace

from cartpole import config as base

config = replace(base, env=replace(base.env, id="Acrobot-v1"))

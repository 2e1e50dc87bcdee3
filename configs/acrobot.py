"""Acrobot with CleanRL's `ppo` hyper-parameters.

python -m spmdrl.train configs/acrobot.py

One core: about half a minute. Return -83 at the end (seeds 1 to 3: -84, -83, -83).
"""

from dataclasses import replace

from cartpole import config as base

config = replace(base, env=replace(base.env, id="Acrobot-v1"))

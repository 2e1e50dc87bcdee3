"""Hopper with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/hopper.py

One core: 2 minutes. Return about 2460 at the end (seeds 1 to 3: 2642, 2084, 2639).
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="Hopper-v4"))

"""Breakout with the hyper-parameters of CleanRL's envpool Atari runs.

python -m spmdrl.train configs/breakout.py
"""

from dataclasses import replace

from pong import config as base

config = replace(base, env=replace(base.env, id="Breakout-v5"))

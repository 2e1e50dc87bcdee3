"""Breakout with the hyper-parameters of CleanRL's envpool Atari runs.

python -m spmdrl.train configs/breakout.py

Ten million steps: about as long as Pong's. Run for a few updates only; published for these
settings: 430.
"""

from dataclasses import replace

from pong import config as base

config = replace(base, env=replace(base.env, id="Breakout-v5"))

"""InvertedPendulum with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/inverted_pendulum.py

One core: less than 2 minutes. Return 1000 at the end (seeds 1 to 3: 1000 each).
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="InvertedPendulum-v4"))

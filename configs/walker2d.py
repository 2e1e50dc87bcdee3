"""Walker2d with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/walker2d.py

One core: 4 minutes. Return about 3340 at the end (seeds 1 to 3: 3694, 3367, 2955).
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="Walker2d-v4"))

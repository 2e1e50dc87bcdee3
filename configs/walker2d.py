"""Walker2d with CleanRL's `ppo_continuous_action` hyper-parameters.

python -m spmdrl.train configs/walker2d.py

One core: 3 minutes. Return about 3620 at the end (seeds 1 to 3: 3680, 3647, 3545).
"""

from dataclasses import replace

from halfcheetah import config as base

config = replace(base, env=replace(base.env, id="Walker2d-v4"))

"""spmdrl: reinforcement learning that runs the same on a laptop and on a Slurm cluster.

`spmdrl.load(run_dir)` gives a trained policy, `spmdrl.train(config)` trains: see docs/python.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdrl.library.trained import load as load
    from spmdrl.library.training import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What a script calls, loaded at its first use: commands must not wait for jax."""
    if name == "load":
        return importlib.import_module("spmdrl.library.trained").load
    if name == "train":
        return importlib.import_module("spmdrl.train")  # the module can be called
    raise AttributeError(f"module 'spmdrl' has no attribute {name!r}")

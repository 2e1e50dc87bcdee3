"""spmdrl: reinforcement learning that runs the same on a laptop and on a Slurm cluster."""

__version__ = "0.1.0"

"""Algorithms, one file each; light to import, so that a config can name one before jax loads."""

from spmdrl.algos.appo import Appo
from spmdrl.algos.base import Algorithm, Minibatch, Models, Moment, Outputs
from spmdrl.algos.impala import Impala
from spmdrl.algos.ppo import Ppo
from spmdrl.config.schema import AlgoConfig

ALGORITHMS: tuple[type[AlgoConfig], ...] = (Ppo, Appo, Impala)  # those of this package

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Appo",
    "Impala",
    "Minibatch",
    "Models",
    "Moment",
    "Outputs",
    "Ppo",
]

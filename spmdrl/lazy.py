"""jax, loaded at its first use.

A config names its algorithm, so the files of `algos` are imported before bad input is answered,
which must not take as long as jax takes to load.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Array", "jax", "jnp"]


class LazyModule(ModuleType):
    """Stands for the module of its name, which is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


Array = Any  # in a shape such as Float[Array, "T B"]: any array
if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
else:
    jax, jnp = LazyModule("jax"), LazyModule("jax.numpy")

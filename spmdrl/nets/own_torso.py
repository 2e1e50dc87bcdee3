"""A network of the user's own in the place of a torso: `net.torso = "module:Class"`.

It is a Flax module from rows of numbers to rows of features, tried on shapes alone before anything
is compiled, so that a mistake in it is answered in one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Shaped

from spmdrl.config import ConfigError, NetConfig, own_code
from spmdrl.nets.chunks import in_chunks
from spmdrl.types import ObsPart

__all__ = ["OwnTorso", "find_network", "try_out"]

FIELD = "net.torso"
GIVEN = ("hidden", "activation", "width")  # of the config, where the class has such a field
ROWS = 2  # of the trial
Reader = Callable[[Array], Array]


class OwnTorso(nn.Module):
    """The user's network, which is shown an observation as numbers."""

    make: Callable[[], nn.Module]
    read: Reader
    at_once: int | None = None

    @nn.compact
    def __call__(self, x: Shaped[Array, "N ..."]) -> Any:  # an array, once it was tried out
        return in_chunks(self, OwnTorso.features, x, self.at_once)

    def features(self, x: Array) -> Any:
        return self.make()(self.read(x))


def find_network(net: NetConfig) -> Callable[[], nn.Module]:
    """What makes the user's network, with the fields of the config that it asks for."""
    thing = own_code.find(net.torso, FIELD)
    if not callable(thing):
        raise ConfigError(f"{FIELD} {net.torso!r} is {thing!r}, but must be a class or a function")
    asked = inspect.signature(thing).parameters
    return partial(thing, **{name: getattr(net, name) for name in GIVEN if name in asked})


def try_out(net: NetConfig, torso: OwnTorso, part: ObsPart, env_id: str) -> None:
    """Raise ConfigError unless it turns rows of this part into rows of features."""
    x = jax.ShapeDtypeStruct((ROWS, *part.shape), part.dtype)
    seen = jax.eval_shape(torso.read, x)
    shown = f"{seen.dtype}[N, {', '.join(map(str, seen.shape[1:]))}]"
    try:
        kept = jax.eval_shape(torso.init, jax.random.key(0), x)
        out = jax.eval_shape(torso.apply, kept, x)
    except Exception as error:  # of code that we do not know
        reason = own_code.explain(error)
        raise ConfigError(
            f"{FIELD} {net.torso} failed on {shown}, which {env_id} gives: {reason}"
        ) from error
    if more := sorted(set(kept) - {"params"}):
        raise ConfigError(
            f"{FIELD} {net.torso} keeps {', '.join(more)}, which would not be trained; it may have "
            "parameters only, for example LayerNorm in the place of BatchNorm"
        )
    _check_features(f"{FIELD} {net.torso}", out)


def _check_features(who: str, out: Any) -> None:
    wanted = "but must return one array of numbers [N, features]"
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise ConfigError(f"{who} returns a {type(out).__name__}, {wanted}")
    if len(out.shape) != 2 or out.shape[0] != ROWS or not jnp.issubdtype(out.dtype, jnp.floating):
        sizes = ["N" if n == ROWS and i == 0 else str(n) for i, n in enumerate(out.shape)]
        raise ConfigError(f"{who} returns {out.dtype}[{', '.join(sizes)}], {wanted}")

"""Which rows of a rollout make which minibatch.

Either every minibatch takes some steps of every environment, or it takes whole environments. Both
are drawn by keys that depend on global ids alone, and every device, rank and shard has its part in
every minibatch: no row ever leaves its device, and nothing depends on the topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped, UInt32

from spmdrl.config import Config
from spmdrl.parallel.mesh import AXIS

__all__ = ["Selector", "Sequences", "Steps", "make_selector"]


@dataclass(frozen=True)
class Steps:
    """Every minibatch has the same number of steps of every environment.

    Each environment's steps are permuted by its own key; minibatch m is the m-th slice.
    """

    epochs: int
    minibatches: int
    num_steps: int
    spec: ClassVar[P] = P(None, None, AXIS)  # where the environments stand in `order`

    def order(self, key: Any, env_ids: Int[Array, "B"]) -> Int[Array, "E T B"]:
        """The draw of a whole update."""
        shape = (self.epochs, self.num_steps)
        draw = jax.vmap(lambda g: jax.random.bits(jax.random.fold_in(key, g), shape))
        return permutations(draw(env_ids)).transpose(1, 2, 0)

    def by_minibatch(
        self, order: Int[Array, "E T B"], x: Shaped[Array, "T B ..."]
    ) -> Shaped[Array, "G N ..."]:
        """The rows of each of the update's minibatches."""

        def shuffled(one: Int[Array, "T B"]) -> Shaped[Array, "T B ..."]:
            return jnp.take_along_axis(x, one.reshape(one.shape + (1,) * (x.ndim - 2)), axis=0)

        every = jax.vmap(shuffled)(order)
        return every.reshape(self.epochs * self.minibatches, -1, *x.shape[2:])

    def rows(
        self, order: Int[Array, "E T B"], index: Int[Array, ""]
    ) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
        """`(t, b)` of the minibatch's rows."""
        epoch, minibatch = jnp.divmod(index, self.minibatches)
        size = self.num_steps // self.minibatches
        t = jax.lax.dynamic_slice_in_dim(order[epoch], minibatch * size, size)
        b = jnp.broadcast_to(jnp.arange(t.shape[1]), t.shape)
        return t.reshape(-1), b.reshape(-1)


@dataclass(frozen=True)
class Sequences:
    """Every minibatch has all steps of some environments.

    Consecutive ids form blocks of as many environments as there are minibatches. Each epoch
    permutes every block by the block's own key; minibatch m takes the one at place m. A place
    (device, rank or shard) owns whole blocks.
    """

    epochs: int
    minibatches: int
    spec: ClassVar[P] = P(None, AXIS)

    def order(self, key: Any, env_ids: Int[Array, "B"]) -> Int[Array, "E B"]:
        """The draw of a whole update: which environment of its block stands at each place."""
        blocks = env_ids[:: self.minibatches] // self.minibatches
        shape = (self.epochs, self.minibatches)
        draw = jax.vmap(lambda k: jax.random.bits(jax.random.fold_in(key, k), shape))
        return permutations(draw(blocks)).swapaxes(0, 1).reshape(self.epochs, -1)

    def by_minibatch(
        self, order: Int[Array, "E B"], x: Shaped[Array, "T B ..."]
    ) -> Shaped[Array, "G N ..."]:
        count = self.epochs * self.minibatches
        envs = jax.vmap(lambda index: self.envs(order, index))(jnp.arange(count))
        return jnp.moveaxis(x[:, envs], 1, 0).reshape(count, -1, *x.shape[2:])

    def envs(self, order: Int[Array, "E B"], index: Int[Array, ""]) -> Int[Array, "b"]:
        """Positions of the minibatch's environments among those of this place."""
        epoch, minibatch = jnp.divmod(index, self.minibatches)
        blocks = order[epoch].reshape(-1, self.minibatches)
        start = jnp.arange(blocks.shape[0]) * self.minibatches
        return start + jax.lax.dynamic_index_in_dim(blocks, minibatch, 1, keepdims=False)


def permutations(bits: UInt32[Array, "*rows n"]) -> Int[Array, "*rows n"]:
    """A permutation of 0 to n - 1 for each row of random bits."""
    # The number in the low bits: one array to sort, which XLA does much faster than two.
    # Equal high bits, which are rare, stay in order.
    count = bits.shape[-1]
    low = (count - 1).bit_length()
    numbered = (bits >> low << low) | jnp.arange(count, dtype=jnp.uint32)
    order = jax.lax.sort(numbered, is_stable=False) & ((1 << low) - 1)
    return order.astype(jnp.int32)


Selector = Steps | Sequences


def make_selector(config: Config) -> Selector:
    algo = config.algo
    if config.learns_from == "sequences":
        return Sequences(algo.epochs, algo.minibatches)
    return Steps(algo.epochs, algo.minibatches, algo.num_steps)

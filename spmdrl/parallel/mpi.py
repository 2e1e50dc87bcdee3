"""MPI inside compiled programs; the only importer of mpi4jax.

mpi4jax orders its calls by an effect of the program, and jax sends programs with effects through a
dispatch in Python that costs an update of two ranks 2 to 3 ms. `allreduce_after` and
`allgather_after` are the same calls without the effect: each message carries one number of an
earlier answer, so no call can start before the one it follows has ended. Public names:
`allreduce`, `allgather`, `allreduce_after`, `allgather_after`, `reaches_device`, `within_reach`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from spmdrl.parallel.mesh import host_device

Tree = Any


def reaches_device() -> bool:
    """Whether MPI can be called inside a program on the default device."""
    if jax.default_backend() == "cpu":
        return True
    import mpi4jax

    return bool(mpi4jax.has_cuda_support())


def within_reach(call: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """The call on a copy in the host's memory, where MPI cannot read that of the device."""
    if reaches_device():
        return call
    return lambda tree: call(jax.device_put(tree, host_device()))


def allreduce(flat: jax.Array) -> jax.Array:
    """The sum over the ranks, in the order of the calls; for programs that are not ours."""
    import mpi4jax
    from mpi4py import MPI

    return mpi4jax.allreduce(flat, op=MPI.SUM, comm=_comm())


def allgather(rows: jax.Array) -> jax.Array:
    """The rows `[n, m]` of all ranks, `[ranks * n, m]`, in the order of the calls."""
    import mpi4jax

    return mpi4jax.allgather(rows, comm=_comm()).reshape(-1, rows.shape[1])


def allreduce_after(flat: jax.Array, earlier: Tree) -> jax.Array:
    """The sum over the ranks. `earlier` is the answer of the call before, or None."""
    return _primitive("allreduce").bind(_append(flat, earlier))[:-1]


def allgather_after(rows: jax.Array, earlier: Tree) -> jax.Array:
    """The rows `[n, m]` of all ranks, `[ranks * n, m]`, in order of rank."""
    width = rows.shape[1]
    found = _primitive("allgather").bind(_append(rows, earlier))
    return found.reshape(-1, width + 1)[:, :width]


def _append(x: jax.Array, earlier: Tree) -> jax.Array:
    """One more number along the last axis, taken from the earlier answer."""
    number = jnp.zeros((), x.dtype)
    if earlier is not None:
        number = jax.tree.leaves(earlier)[0].reshape(-1)[0].astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(number, (*x.shape[:-1], 1))], axis=-1)


@functools.cache
def _primitive(name: str) -> Primitive:
    """mpi4jax's call of that name, lowered with a token of its own in place of the program's."""
    from mpi4jax._src.utils import ordered_effect

    lower, ranks = _lowering(name), (_comm().Get_size(),) if name == "allgather" else ()
    primitive = Primitive(f"spmdrl_{name}")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray((*ranks, *x.shape), x.dtype))

    def with_own_token(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
        return lower(ctx.replace(tokens_in=mlir.TokenSet.create([ordered_effect])), x)

    mlir.register_lowering(primitive, with_own_token)
    return primitive


def _lowering(name: str) -> Callable[..., Any]:
    from mpi4jax._src.collective_ops import allgather, allreduce
    from mpi4py import MPI

    if name == "allgather":
        return functools.partial(allgather._mpi_allgather_xla_encode, comm=_comm())
    encode = allreduce._mpi_allreduce_xla_encode
    return functools.partial(encode, op=MPI.SUM, comm=_comm(), transpose=False)


@functools.cache
def _comm() -> Any:
    """A communicator of its own, never shared with mpi4py's calls."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Clone()

"""MPI inside compiled programs; the only importer of mpi4jax.

mpi4jax orders its calls by an effect of the program, and jax sends programs with effects through a
dispatch in Python that costs an update of two ranks 2 to 3 ms. `allreduce_after` and
`allgather_after` are the same calls without the effect: each message carries one number of an
earlier answer, so no call can start before the one it follows has ended. That takes functions that
mpi4jax keeps to itself; a version that lacks them is used by its public ones, effect and all.

Every call takes an mpi4py communicator, by default one of all ranks. It must not be shared with
mpi4py's own calls: see `World.program_comm`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from spmdrl.parallel.mesh import host_device
from spmdrl.parallel.platforms import likes

__all__ = [
    "allgather", "allgather_after", "allreduce", "allreduce_after", "reaches_device",
    "through_host",
]  # fmt: skip

Tree = Any
Comm = Any


def reaches_device() -> bool:
    """Whether MPI can be called inside a program on the default device."""
    if likes(jax.default_backend()).mpi_reads_memory:
        return True
    import mpi4jax

    return bool(mpi4jax.has_cuda_support())


def through_host(call: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """The call on a copy in the host's memory, where MPI cannot read that of the device."""
    if reaches_device():
        return call
    return lambda tree: call(jax.device_put(tree, host_device()))


# ---------------------------------------------------------------------------------------------
# By mpi4jax's public functions, in the order of the calls


def allreduce(flat: jax.Array, comm: Comm = None) -> jax.Array:
    """The sum over the ranks, in the order of the calls; for programs that are not ours."""
    import mpi4jax
    from mpi4py import MPI

    return mpi4jax.allreduce(flat, op=MPI.SUM, comm=comm or _all_ranks())


def allgather(rows: jax.Array, comm: Comm = None) -> jax.Array:
    """The rows `[n, m]` of all ranks, `[ranks * n, m]`, in the order of the calls."""
    import mpi4jax

    return mpi4jax.allgather(rows, comm=comm or _all_ranks()).reshape(-1, rows.shape[1])


@functools.cache
def _all_ranks() -> Comm:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Clone()


# ---------------------------------------------------------------------------------------------
# Without the effect


def allreduce_after(flat: jax.Array, earlier: Tree, comm: Comm = None) -> jax.Array:
    """The sum over the ranks. `earlier` is the answer of the call before, or None."""
    if _lowerings() is None:
        return allreduce(flat, comm)
    total = _primitive("allreduce").bind(_append(flat, earlier), comm=_Key(comm or _all_ranks()))
    return total[:-1]


def allgather_after(rows: jax.Array, earlier: Tree, comm: Comm = None) -> jax.Array:
    """The rows `[n, m]` of all ranks, `[ranks * n, m]`, in order of rank."""
    if _lowerings() is None:
        return allgather(rows, comm)
    width = rows.shape[1]
    found = _primitive("allgather").bind(_append(rows, earlier), comm=_Key(comm or _all_ranks()))
    return found.reshape(-1, width + 1)[:, :width]


def _append(x: jax.Array, earlier: Tree) -> jax.Array:
    """One more number along the last axis, taken from the earlier answer."""
    number = jnp.zeros((), x.dtype)
    if earlier is not None:
        number = jax.tree.leaves(earlier)[0].reshape(-1)[0].astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(number, (*x.shape[:-1], 1))], axis=-1)


class _Key:
    """A communicator as a parameter of a primitive, which must be hashable."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and bool(self.comm == other.comm)

    def __hash__(self) -> int:
        return hash(self.comm.handle)


class _Lowerings(NamedTuple):
    """What is taken from inside mpi4jax."""

    effect: Any
    allreduce: Callable[..., Any]  # (context, array, op, comm, transpose)
    allgather: Callable[..., Any]  # (context, array, comm)


@functools.cache
def _lowerings() -> _Lowerings | None:
    """None where this version of mpi4jax has other insides."""
    try:
        from mpi4jax._src.collective_ops import allgather, allreduce
        from mpi4jax._src.utils import ordered_effect

        reduce, gather = allreduce._mpi_allreduce_xla_encode, allgather._mpi_allgather_xla_encode
        inspect.signature(reduce).bind(None, None, op=None, comm=None, transpose=False)
        inspect.signature(gather).bind(None, None, comm=None)
    except (ImportError, AttributeError, TypeError):
        return None
    return _Lowerings(ordered_effect, reduce, gather)


@functools.cache
def _primitive(name: str) -> Primitive:
    """mpi4jax's call of that name, lowered with a token of its own in place of the program's."""
    from mpi4py import MPI

    lowerings = _lowerings()
    assert lowerings is not None
    reducing = name == "allreduce"
    lower = lowerings.allreduce if reducing else lowerings.allgather
    options = {"op": MPI.SUM, "transpose": False} if reducing else {}

    def shape(x: Any, comm: _Key) -> Any:
        ranks = () if reducing else (comm.comm.Get_size(),)
        return jax.core.ShapedArray((*ranks, *x.shape), x.dtype)

    def with_own_token(context: mlir.LoweringRuleContext, x: Any, comm: _Key) -> Any:
        token = mlir.TokenSet.create([lowerings.effect])
        return lower(context.replace(tokens_in=token), x, comm=comm.comm, **options)

    primitive = Primitive(f"spmdrl_{name}")
    primitive.def_abstract_eval(shape)
    mlir.register_lowering(primitive, with_own_token)
    return primitive

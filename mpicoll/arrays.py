"""Collectives on arrays: arrays in, arrays out, shape and dtype kept.

Any shape (0-d and empty included), any memory order, strided input too; the result is a
new C-ordered array and the input is not changed. ``comm`` may be a wrapped or a plain
mpi4py communicator; without it the world is used. All ranks call with the same dtype and,
where the collective wants it, the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.runtime.operators import AVG, AverageOp
from mpicoll.schedule.partition import split
from mpicoll.selection.choose import OrderWish

Array: TypeAlias = npt.NDArray[Any]
OpLike: TypeAlias = "str | MPI.Op | AverageOp"

_OPS: dict[str, MPI.Op | AverageOp] = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "mean": AVG,
    "all": MPI.LAND,
    "any": MPI.LOR,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}


@cache
def _world() -> Comm:
    return Comm(MPI.COMM_WORLD)


def _comm(comm: MPI.Intracomm | None) -> Comm:
    if comm is None:
        return _world()
    return comm if isinstance(comm, Comm) else Comm(comm)


def _op(op: OpLike) -> MPI.Op | AverageOp:
    if not isinstance(op, str):
        return op
    if op not in _OPS:
        raise ValueError(f"unknown operator {op!r}; known: {', '.join(_OPS)}, or an MPI.Op")
    return _OPS[op]


def _input(x: npt.ArrayLike) -> Array:
    """Return ``x`` as a C-contiguous array of the same shape, copied only if it must be."""
    array = np.asarray(x)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _like(result: Array, x: object) -> Any:
    """Return a scalar for a scalar, as NumPy functions do for 0-d input."""
    return result[()] if not isinstance(x, np.ndarray) and result.ndim == 0 else result


def allreduce(
    x: npt.ArrayLike,
    op: OpLike = "sum",
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
    segment: int | None = None,
    order: OrderWish = None,
) -> Any:
    """Return the reduction of ``x`` over all ranks; the same bits on every rank."""
    source = _input(x)
    result = np.empty_like(source, order="C")
    _comm(comm).Allreduce(
        source, result, _op(op), algorithm=algorithm, segment=segment, order=order
    )
    return _like(result, x)


def reduce(
    x: npt.ArrayLike,
    op: OpLike = "sum",
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
    segment: int | None = None,
    order: OrderWish = None,
) -> Any:
    """Return the reduction of ``x`` over all ranks on the root, None elsewhere."""
    wrapped = _comm(comm)
    source = _input(x)
    result = np.empty_like(source, order="C") if wrapped.rank == root else None
    wrapped.Reduce(
        source, result, _op(op), root, algorithm=algorithm, segment=segment, order=order
    )
    return None if result is None else _like(result, x)


def broadcast(
    x: npt.ArrayLike,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
    segment: int | None = None,
) -> Any:
    """Return the root's ``x`` on all ranks; other ranks pass one of its shape and dtype."""
    wrapped = _comm(comm)
    source = _input(x)
    result = np.array(source, order="C", copy=True)
    wrapped.Bcast(result, root, algorithm=algorithm, segment=segment)
    return _like(result, x)


def allgather(
    x: npt.ArrayLike,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Array:
    """Return the arrays of all ranks stacked: shape ``(size, *x.shape)``."""
    wrapped = _comm(comm)
    source = _input(x)
    result = np.empty((wrapped.size, *source.shape), source.dtype)
    wrapped.Allgather(source, result, algorithm=algorithm)
    return result


def gather(
    x: npt.ArrayLike,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Array | None:
    """Return the arrays of all ranks stacked, ``(size, *x.shape)``, on the root only."""
    wrapped = _comm(comm)
    source = _input(x)
    if wrapped.rank != root:
        wrapped.Gather(source, None, root, algorithm=algorithm)
        return None
    result = np.empty((wrapped.size, *source.shape), source.dtype)
    wrapped.Gather(source, result, root, algorithm=algorithm)
    return result


def scatter(
    x: npt.ArrayLike | None,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Array:
    """Return ``x[rank]`` of the root's ``x``, whose first axis has one entry per rank.

    Other ranks pass None: shape and dtype are sent along.
    """
    wrapped = _comm(comm)
    source, described = None, None
    if wrapped.rank == root:
        # What the root finds decides on all ranks, else the others would wait for it.
        source = _input(np.empty(0) if x is None else x)
        fault = ""
        if x is None:
            fault = "x is None; the root passes the rows of all ranks"
        elif source.ndim == 0 or source.shape[0] != wrapped.size:
            fault = f"x has shape {source.shape}; its first axis must have {wrapped.size} entries"
        described = fault, source.shape[1:], source.dtype
    fault, shape, dtype = wrapped.bcast(described, root=root)
    if fault:
        raise ValueError(f"scatter: root {root}: {fault}")
    result = np.empty(shape, dtype)
    wrapped.Scatter(source, result, root, algorithm=algorithm)
    return result


def reduce_scatter(
    x: npt.ArrayLike,
    op: OpLike = "sum",
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
    segment: int | None = None,
    order: OrderWish = None,
) -> Array:
    """Return this rank's share of the reduction of ``x``, cut along the first axis.

    Rank r gets rows ``r*n/size`` on; if ``size`` does not divide the rows, the first ranks
    get one more.
    """
    wrapped = _comm(comm)
    source = _input(x)
    if source.ndim == 0:
        raise ValueError("reduce_scatter cuts along the first axis; x is 0-d")
    rows = split(source.shape[0], wrapped.size)
    width = int(np.prod(source.shape[1:], dtype=np.int64))
    result = np.empty((rows[wrapped.rank], *source.shape[1:]), source.dtype)
    wrapped.Reduce_scatter(
        source,
        result,
        [count * width for count in rows],
        _op(op),
        algorithm=algorithm,
        segment=segment,
        order=order,
    )
    return result


def alltoall(
    x: npt.ArrayLike,
    splits: Sequence[int] | None = None,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> tuple[Array, list[int]]:
    """Send rows of ``x`` to each rank; return the rows received and how many from whom.

    ``splits[d]`` rows go to rank d, in order; None cuts the rows evenly. The counts that
    the others send are exchanged for you. Received rows are in the order of their senders.
    """
    wrapped = _comm(comm)
    source = _input(x)
    if source.ndim == 0:
        raise ValueError("alltoall sends rows; x is 0-d")
    sends = split(source.shape[0], wrapped.size) if splits is None else tuple(splits)
    if len(sends) != wrapped.size or min(sends) < 0 or sum(sends) != source.shape[0]:
        raise ValueError(
            f"splits {list(sends)}; expected {wrapped.size} counts that add up to "
            f"{source.shape[0]} rows"
        )
    receives = np.empty(wrapped.size, np.int64)
    wrapped.Alltoall(np.array(sends, np.int64), receives)
    width = int(np.prod(source.shape[1:], dtype=np.int64))
    result = np.empty((int(receives.sum()), *source.shape[1:]), source.dtype)
    wrapped.Alltoallv(
        [source, [count * width for count in sends]],
        [result, [int(count) * width for count in receives]],
        algorithm=algorithm,
    )
    return result, receives.tolist()


def barrier(comm: MPI.Intracomm | None = None) -> None:
    """Wait until all ranks have entered."""
    _comm(comm).Barrier()

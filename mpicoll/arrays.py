"""Collectives on arrays: arrays in, arrays out, shape and dtype kept.

Any shape (0-d and empty included), any memory order, strided input too; the result is a
new C-ordered array of the input's library and device, and the input is not changed. Of torch,
tensors that require gradients are taken for their values: the result knows of no graph.
``comm`` may be a wrapped or a plain mpi4py communicator; without it the world is used. All
ranks call with the same dtype and, where the collective wants it, the same shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

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


class _Library(NamedTuple):
    """What is needed of an array library: a C-contiguous array, a copy, and a new array of
    a shape, with dtype and device of another."""

    contiguous: Callable[[Any], Any]
    copy: Callable[[Any], Any]
    empty: Callable[[tuple[int, ...], Any], Any]


def _contiguous(x: Any) -> Array:
    array = np.asarray(x)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


@cache
def _numpy() -> _Library:
    return _Library(
        _contiguous,
        lambda x: np.array(x, order="C", copy=True),
        lambda shape, like: np.empty(shape, like.dtype),
    )


@cache
def _cupy() -> _Library:
    cupy = sys.modules["cupy"]

    def empty(shape: tuple[int, ...], like: Any) -> Any:
        with like.device:
            return cupy.empty(shape, like.dtype)

    return _Library(cupy.ascontiguousarray, lambda x: x.copy(order="C"), empty)


@cache
def _torch() -> _Library:
    torch = sys.modules["torch"]

    def values(x: Any) -> Any:
        """Return a tensor without its graph, its conjugation and change of sign done."""
        return x.detach().resolve_conj().resolve_neg()

    return _Library(
        lambda x: values(x).contiguous(),
        lambda x: values(x).clone(memory_format=torch.contiguous_format),
        lambda shape, like: torch.empty(shape, dtype=like.dtype, device=like.device),
    )


#: By the package that the class of an array is from; whoever has one has loaded it.
_LIBRARIES: dict[str, Callable[[], _Library]] = {"cupy": _cupy, "torch": _torch}


def _library(x: object) -> _Library:
    for one in type(x).__mro__:  # a user's own class of tensors is one of torch's
        library = _LIBRARIES.get(one.__module__.partition(".")[0])
        if library is not None:
            return library()
    return _numpy()


def _input(x: Any) -> Any:
    """Return ``x`` as a C-contiguous array of the same shape, copied only if it must be."""
    return _library(x).contiguous(x)


def _dtype(array: Any) -> np.dtype[Any]:
    """Return the dtype, that of NumPy of the same name where it is torch's."""
    dtype = array.dtype
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).removeprefix("torch."))


def _empty(like: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return a new array of the library, device and dtype of ``like``, and of its shape."""
    return _library(like).empty(tuple(like.shape) if shape is None else shape, like)


def _like(result: Any, x: object) -> Any:
    """Return a scalar for a scalar, as NumPy functions do for 0-d input."""
    scalar = isinstance(result, np.ndarray) and result.ndim == 0 and not isinstance(x, np.ndarray)
    return result[()] if scalar else result


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
    result = _empty(source)
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
    result = _empty(source) if wrapped.rank == root else None
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
    result = _library(source).copy(source)
    wrapped.Bcast(result, root, algorithm=algorithm, segment=segment)
    return _like(result, x)


def allgather(
    x: npt.ArrayLike,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Any:
    """Return the arrays of all ranks stacked: shape ``(size, *x.shape)``."""
    wrapped = _comm(comm)
    source = _input(x)
    result = _empty(source, (wrapped.size, *source.shape))
    wrapped.Allgather(source, result, algorithm=algorithm)
    return result


def gather(
    x: npt.ArrayLike,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Any:
    """Return the arrays of all ranks stacked, ``(size, *x.shape)``, on the root only."""
    wrapped = _comm(comm)
    source = _input(x)
    if wrapped.rank != root:
        wrapped.Gather(source, None, root, algorithm=algorithm)
        return None
    result = _empty(source, (wrapped.size, *source.shape))
    wrapped.Gather(source, result, root, algorithm=algorithm)
    return result


def scatter(
    x: npt.ArrayLike | None,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
) -> Any:
    """Return ``x[rank]`` of the root's ``x``, whose first axis has one entry per rank.

    Other ranks pass None: shape and dtype are sent along, and they get a NumPy array. One
    that wants its rows in another library passes any array of it, of the same dtype.
    """
    wrapped = _comm(comm)
    source, described = None, None
    if wrapped.rank == root:
        source, described = _rows(x, wrapped.size)
    fault, shape, dtype = wrapped.bcast(described, root=root)
    if fault:
        raise ValueError(f"scatter: root {root}: {fault}")
    like = x if source is None else source
    result: Any = np.empty(shape, dtype) if like is None else _empty(like, shape)
    wrapped.Scatter(source, result, root, algorithm=algorithm)
    return result


def _rows(x: Any, size: int) -> tuple[Any, tuple[str, tuple[int, ...], np.dtype[Any] | None]]:
    """Return the root's array, and what it tells the others: a fault, or shape and dtype of
    its rows. What the root finds decides on all ranks, else the others would wait for it."""
    try:
        if x is None:
            raise ValueError("x is None; the root passes the rows of all ranks")
        source = _input(x)
        if source.ndim == 0 or source.shape[0] != size:
            shape = tuple(source.shape)
            raise ValueError(f"x has shape {shape}; its first axis must have {size} entries")
        return source, ("", tuple(source.shape[1:]), _dtype(source))
    except Exception as error:
        return None, (str(error) or type(error).__name__, (), None)


def reduce_scatter(
    x: npt.ArrayLike,
    op: OpLike = "sum",
    comm: MPI.Intracomm | None = None,
    *,
    algorithm: str | None = None,
    segment: int | None = None,
    order: OrderWish = None,
) -> Any:
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
    result = _empty(source, (rows[wrapped.rank], *source.shape[1:]))
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
) -> tuple[Any, list[int]]:
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
    result = _empty(source, (int(receives.sum()), *source.shape[1:]))
    wrapped.Alltoallv(
        [source, [count * width for count in sends]],
        [result, [int(count) * width for count in receives]],
        algorithm=algorithm,
    )
    return result, receives.tolist()


def barrier(comm: MPI.Intracomm | None = None) -> None:
    """Wait until all ranks have entered."""
    _comm(comm).Barrier()

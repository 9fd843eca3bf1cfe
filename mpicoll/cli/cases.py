"""One call of one collective with data whose result is known; shared by bench and validate.

Values are small whole numbers, so that sums are exact in every type and any order:
element i of rank r is ``i % 5 + r % 3``. Loads mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpicoll.cli.memory import HOST, Array, Memory
from mpicoll.cli.mpi import MPI
from mpicoll.schedule.partition import offsets, split

_METHODS = {
    "allgather": "Allgather",
    "allreduce": "Allreduce",
    "alltoall": "Alltoall",
    "barrier": "Barrier",
    "bcast": "Bcast",
    "exscan": "Exscan",
    "gather": "Gather",
    "reduce": "Reduce",
    "reduce_scatter": "Reduce_scatter",
    "scan": "Scan",
    "scatter": "Scatter",
}
#: Methods for blocks of different lengths.
_UNEVEN = {
    "allgather": "Allgatherv",
    "alltoall": "Alltoallv",
    "gather": "Gatherv",
    "reduce_scatter": "Reduce_scatter",
    "scatter": "Scatterv",
}


def bus_factor(collective: str, size: int) -> float:
    """Return what busbw multiplies algbw with, as nccl-tests defines it."""
    if collective == "allreduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if collective in _UNEVEN else 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is called: ``counts`` are the blocks of all ranks, or the vector's length."""

    collective: str
    counts: tuple[int, ...]
    dtype: np.dtype[Any]
    root: int = 0
    uneven: bool = False
    op: str = "sum"

    @property
    def nbytes(self) -> int:
        """Bytes of the vector, or of all blocks together."""
        return sum(self.counts) * self.dtype.itemsize


def even(collective: str, size: int, nbytes: int, dtype: np.dtype[Any]) -> Shape:
    """Return the shape nearest to ``nbytes`` whose blocks are equal, of one item at least."""
    count = max(1, nbytes // dtype.itemsize)
    if collective in _UNEVEN:
        return Shape(collective, (max(1, count // size),) * size, dtype)
    return Shape(collective, (count,), dtype)


def odd(collective: str, size: int, count: int, dtype: np.dtype[Any]) -> Shape | None:
    """Return a shape whose blocks differ, or None where the collective has no such form."""
    if collective not in _UNEVEN:
        return None
    counts = tuple(number * (1 + rank % 3) for rank, number in enumerate(split(count, size)))
    return Shape(collective, counts, dtype, uneven=True)


class Case:
    """Buffers of this rank for one shape, the calls on them and what must come out."""

    def __init__(self, comm: MPI.Intracomm, shape: Shape, memory: Memory = HOST) -> None:
        self.shape = shape
        self.memory = memory
        self._rank, self._size = comm.rank, comm.size
        send, result, self.expected = self._buffers()
        self._send, self._result = memory.put(send), memory.put(result)

    @property
    def result(self) -> Array:
        """What the last call left, on the host."""
        return self.memory.fetch(self._result)

    def invoke(self, comm: MPI.Intracomm, **keywords: Any) -> None:
        """Call the collective of ``comm``; ``keywords`` such as algorithm are ours."""
        self.bound(comm, **keywords)()

    def bound(self, comm: MPI.Intracomm, **keywords: Any) -> Callable[[], None]:
        """Return that call with its arguments bound, for timing."""
        method = (_UNEVEN if self.shape.uneven else _METHODS)[self.shape.collective]
        return partial(getattr(comm, method), *self.arguments, **keywords)

    def poison(self) -> None:
        """Fill the result with what no call leaves; the root's data of a bcast stays."""
        if self.shape.collective == "bcast" and self._rank == self.shape.root:
            return
        self.memory.poison(self._result)

    def wrong(self) -> str:
        """Return what is wrong with the result on this rank, or an empty string."""
        if self.expected is None:
            return ""
        result = self.result
        bad = np.flatnonzero(result != self.expected)
        if bad.size == 0:
            return ""
        at = int(bad[0])
        return (
            f"rank {self._rank}: element {at} is {result[at]}, expected "
            f"{self.expected[at]}; {bad.size} of {result.size} differ"
        )

    @property
    def arguments(self) -> list[Any]:
        """The arguments of mpi4py's method."""
        shape, send, result = self.shape, self._send, self._result
        root = self._rank == shape.root
        if shape.collective == "barrier":
            return []
        if shape.collective == "bcast":
            return [result, shape.root]
        if shape.collective == "reduce":
            return [send, result if root else None, _op(shape), shape.root]
        if shape.collective in ("allreduce", "scan", "exscan"):
            return [send, result, _op(shape)]
        if shape.collective == "reduce_scatter":
            return [send, result, list(shape.counts), _op(shape)]
        if shape.collective == "gather":
            return [send, self._blocks(result) if root else None, shape.root]
        if shape.collective == "scatter":
            return [self._blocks(send) if root else None, result, shape.root]
        if shape.collective == "allgather":
            return [send, self._blocks(result)]
        receives = [shape.counts[self._rank]] * self._size
        return [self._blocks(send), [result, receives] if shape.uneven else result]

    def _blocks(self, array: Any) -> Any:
        return [array, list(self.shape.counts)] if self.shape.uneven else array

    def _buffers(self) -> tuple[Array, Array, Array | None]:
        shape, rank, size = self.shape, self._rank, self._size
        counts, total = shape.counts, sum(shape.counts)
        nothing = np.empty(0, shape.dtype)
        if shape.collective == "barrier":
            return nothing, nothing, None
        own = counts[rank] if len(counts) > 1 or shape.collective in _UNEVEN else total
        low = offsets(counts)[rank] if shape.collective in _UNEVEN else 0
        vector = self._values(rank, 0, total)
        if shape.collective == "bcast":
            expected = self._values(shape.root, 0, total)
            return nothing, expected.copy(), expected
        if shape.collective in ("allreduce", "reduce", "scan", "exscan"):
            ranks = {"scan": range(rank + 1), "exscan": range(rank)}.get(
                shape.collective, range(size)
            )
            idle = (shape.collective == "reduce" and rank != shape.root) or not ranks
            return vector, np.empty_like(vector), None if idle else self._reduced(ranks, 0, total)
        if shape.collective == "reduce_scatter":
            return vector, np.empty(own, shape.dtype), self._reduced(range(size), low, own)
        if shape.collective == "scatter":
            expected = self._values(shape.root, low, own)
            return vector, np.empty(own, shape.dtype), expected
        if shape.collective == "alltoall":
            expected = np.concatenate([self._values(peer, low, own) for peer in range(size)])
            return vector, np.empty_like(expected), expected
        expected = np.concatenate([self._values(r, 0, n) for r, n in enumerate(counts)])
        idle = shape.collective == "gather" and rank != shape.root
        return self._values(rank, 0, own), np.empty_like(expected), None if idle else expected

    def _values(self, rank: int, start: int, count: int) -> Array:
        values = np.arange(start, start + count) % 5 + rank % 3
        return values.astype(self.shape.dtype)

    def _reduced(self, ranks: Sequence[int], start: int, count: int) -> Array:
        base = np.arange(start, start + count) % 5
        if self.shape.op == "max":
            total = base + max(rank % 3 for rank in ranks)
        else:
            total = base * len(ranks) + sum(rank % 3 for rank in ranks)
        return total.astype(self.shape.dtype)


def _op(shape: Shape) -> MPI.Op:
    return MPI.MAX if shape.op == "max" else MPI.SUM

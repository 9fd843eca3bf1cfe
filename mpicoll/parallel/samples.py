"""Samples cut over ranks: every one on exactly one rank, however uneven the numbers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.objects import broadcast_object
from mpicoll.schedule.partition import offsets, split

Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]


class EpochSampler:
    """Says which samples each rank takes, for data that all ranks can read.

    Every epoch shuffles the ``count`` samples by (seed, epoch) and cuts them over the ranks:
    each sample on one rank, none twice and none left out, in shares that differ by one at
    most. Nothing is sent but for the constructor, which is collective and raises ValueError on
    every rank if arguments (or versions of NumPy, whose shuffle this is) differ or are wrong.
    """

    def __init__(
        self,
        count: int,
        comm: MPI.Intracomm | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Agree on count and seed."""
        self.comm: Comm = wrapped(comm)
        problem = _not_a_number("count", count) or _not_a_number("seed", seed)
        entries = [f"count={count}", f"seed={seed}", f"shuffle={bool(shuffle)}"]
        agree(self.comm, "EpochSampler", [*entries, f"NumPy {np.__version__}"], problem=problem)
        self.count, self.seed, self.shuffle = int(count), int(seed), bool(shuffle)

    def indices(self, epoch: int = 0) -> Indices:
        """Return the samples of this rank, of shape (n,), in the order of the epoch."""
        return _share(self._order(epoch), self.comm)

    def batches(self, epoch: int, batch: int) -> Iterator[Indices]:
        """Yield this rank's share of each batch of ``batch`` samples over all ranks.

        Every rank gets the same number of batches, so that collectives per batch match: a
        share may be empty. The last batch has what is left. Which samples form a batch
        does not depend on the number of ranks. Raises ValueError for a batch below 1.
        """
        if batch < 1:
            raise ValueError(
                f"batches on rank {self.comm.rank}: batch {batch}; expected 1 or more"
            )
        order = self._order(epoch)
        for low in range(0, self.count, batch):
            yield _share(order[low : low + batch], self.comm)

    def _order(self, epoch: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)


def scatter_dataset(
    arrays: Sequence[Array] | None,
    comm: MPI.Intracomm | None = None,
    *,
    root: int = 0,
    seed: int | None = None,
) -> list[Array]:
    """Cut the root's samples over the ranks; return this rank's rows of each array.

    ``arrays`` are samples, labels, …: arrays that share the first axis, on the root; what other
    ranks pass is ignored. ``seed`` shuffles the rows before, alike in all arrays; None keeps
    their order. Each row goes to one rank, in shares that differ by one at most and may be
    empty. Collective: one broadcast of the shapes, then a scatter per array; the root holds
    one shuffled array more at a time. Raises ValueError on every rank if the root's arguments are
    wrong.
    """
    given = wrapped(comm)
    plan: tuple[str | None, int, list[tuple[tuple[int, ...], np.dtype[Any]]]] = (None, 0, [])
    order: Indices | None = None
    if given.rank == root:
        problem = _unfit(arrays, seed)
        if problem is None and arrays is not None:
            count = len(arrays[0])
            plan = None, count, [(one.shape[1:], one.dtype) for one in arrays]
            if seed is not None:
                order = np.random.default_rng(seed).permutation(count)
        else:
            plan = problem, 0, []
    problem, count, forms = broadcast_object(plan, given, root)
    if problem is not None:
        raise ValueError(f"scatter_dataset on rank {given.rank}: rank {root} passed {problem}")
    counts = split(count, given.size)
    result = []
    for at, (shape, dtype) in enumerate(forms):
        source = None
        if given.rank == root and arrays is not None:
            rows = arrays[at] if order is None else arrays[at][order]
            source = np.ascontiguousarray(rows)
        result.append(_scatter(given, source, counts, shape, dtype, root))
    return result


def _scatter(
    comm: Comm,
    source: Array | None,
    counts: Sequence[int],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
) -> Array:
    """Scatter rows as bytes, which takes types that MPI has none for."""
    mine = np.empty((counts[comm.rank], *shape), dtype)
    width = prod(shape) * dtype.itemsize
    send = None
    if source is not None:
        send = [source.reshape(-1).view(np.uint8), [count * width for count in counts], MPI.BYTE]
    comm.Scatterv(send, [mine.reshape(-1).view(np.uint8), MPI.BYTE], root)
    return mine


def _share(order: Indices, comm: Comm) -> Indices:
    bounds = offsets(split(len(order), comm.size))
    return order[bounds[comm.rank] : bounds[comm.rank + 1]]


def _not_a_number(name: str, value: object) -> str | None:
    if isinstance(value, int | np.integer) and value >= 0:
        return None
    return f"{name}={value!r}; expected an integer, 0 or more"


def _unfit(arrays: object, seed: object) -> str | None:
    """Say what is wrong with the root's arguments; the other ranks have to hear of it."""
    if not isinstance(arrays, Sequence) or not arrays:
        return f"arrays of type {type(arrays).__name__}; expected a list of one array or more"
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            return f"an array of type {type(array).__name__} without rows; expected NumPy arrays"
        if array.dtype.hasobject:
            return f"an array of dtype {array.dtype}; objects are not scattered"
        if len(array) != len(arrays[0]):
            return f"{len(arrays[0])} rows in one array and {len(array)} in another"
    return None if seed is None else _not_a_number("seed", seed)

"""Samples cut over ranks: every one on exactly one rank, however uneven the numbers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.library import (
    EXPECTED,
    Array,
    dense,
    gather,
    is_array,
    library,
    scattered,
)
from mpicoll.parallel.objects import broadcast_object
from mpicoll.schedule.partition import offsets, split

Indices: TypeAlias = npt.NDArray[np.int64]

#: What the ranks have to know of an array: the shape of a row, the dtype, the library's name.
_Form: TypeAlias = tuple[tuple[int, ...], np.dtype[Any], str]


class EpochSampler:
    """Says which samples each rank takes, for data that all ranks can read.

    Every epoch shuffles the ``count`` samples by (seed, epoch) and cuts them over the ranks:
    each sample on one rank, none twice and none left out, in shares that differ by one at
    most. Indices are NumPy's, also for data on a device. Nothing is sent but for the
    constructor, which is collective and raises ValueError on every rank if arguments (or
    versions of NumPy, whose shuffle this is) differ or are wrong.
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
    one shuffled array more at a time.

    What is NumPy's on the root is NumPy's on all ranks. What is CuPy's, of one device, is
    CuPy's on the current device of each rank, which imports it; before anything is sent, the
    ranks hear by one more allgather whether all could.

    Raises ValueError on every rank if the root's arguments are wrong, or a rank can not hold
    arrays of a device.
    """
    given = wrapped(comm)
    plan: tuple[str | None, int, list[_Form]] = (None, 0, [])
    order: Indices | None = None
    if given.rank == root:
        problem = _unfit(arrays, seed)
        if problem is None and arrays is not None:
            count = len(arrays[0])
            forms = [(one.shape[1:], one.dtype, library(one).__name__) for one in arrays]
            plan = None, count, forms
            if seed is not None:
                order = np.random.default_rng(seed).permutation(count)
        else:
            plan = problem, 0, []
    problem, count, forms = broadcast_object(plan, given, root)
    if problem is not None:
        raise ValueError(f"scatter_dataset on rank {given.rank}: rank {root} passed {problem}")
    counts = split(count, given.size)
    result = _made(given, counts[given.rank], forms, root)
    for at, mine in enumerate(result):
        source = None
        if given.rank == root and arrays is not None:
            source = dense(arrays[at] if order is None else gather(arrays[at], order))
        _scatter(given, source, counts, mine, root)
    return result


def _made(comm: Comm, rows: int, forms: Sequence[_Form], root: int) -> list[Array]:
    """Return arrays for this rank's rows; on every rank an error if one has no such device."""
    foreign = {name for *_, name in forms} - {np.__name__}
    problem, made = None, []
    try:
        made = [import_module(name).empty((rows, *shape), dtype) for shape, dtype, name in forms]
    except Exception as error:  # no library, no driver, no device, no memory
        if not foreign:
            raise
        problem = f"{type(error).__name__}: {error}"
    problems = comm.allgather(problem) if foreign else []
    for rank, words in enumerate(problems):
        if words is not None:
            raise ValueError(
                f"scatter_dataset on rank {comm.rank}: rank {rank} can not hold arrays of "
                f"{' and '.join(sorted(foreign))}, which rank {root} passed ({words}); pass NumPy "
                "arrays, or give every rank a device"
            )
    return made


def _scatter(
    comm: Comm, source: Array | None, counts: Sequence[int], mine: Array, root: int
) -> None:
    """Scatter rows as bytes, which takes types that MPI has none for."""
    width = prod(mine.shape[1:]) * mine.dtype.itemsize
    send = None
    if source is not None:
        send = [source.reshape(-1).view(np.uint8), [count * width for count in counts], MPI.BYTE]
    comm.Scatterv(send, [mine.reshape(-1).view(np.uint8), MPI.BYTE], root)


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
        if not is_array(array) or array.ndim == 0:
            return f"an array of type {type(array).__name__} without rows; expected {EXPECTED}"
        if array.dtype.hasobject:
            return f"an array of dtype {array.dtype}; objects are not scattered"
        if len(array) != len(arrays[0]):
            return f"{len(arrays[0])} rows in one array and {len(array)} in another"
    if devices := scattered(arrays):
        return f"arrays on {devices}; expected those of one device"
    return None if seed is None else _not_a_number("seed", seed)

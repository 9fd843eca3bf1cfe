"""The five comparisons of `mpicoll bench --study`. Loads mpi4py.

Each makes its contenders, for ours and for the MPI's own, and the sentence that says what
came out; what the sentence says is read from the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from mpicoll.cli.bench_ranks import mapping, slow_rank
from mpicoll.cli.bench_rivals import afterwards
from mpicoll.cli.bench_study import (
    DOUBLE,
    Comparison,
    Entry,
    Figure,
    Lines,
    Maker,
    called_on,
    times_as_long,
)
from mpicoll.cli.cases import Case, even
from mpicoll.cli.common import human_bytes, three
from mpicoll.cli.memory import Array
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender
from mpicoll.comm import Comm
from mpicoll.schedule.partition import offsets, split

MANY, SMALL = 32, 8 << 10  #: calls, and bytes of one
COLUMN, COLUMNS = 32 << 10, 8  #: items of a column, and columns of the matrix
SKEWED = 512 << 10  #: bytes that each rank sends in all


def _both(who: Sequence[str], lines: Lines, label: str) -> str:
    """Return what a line says for ours, and for the MPI's own."""
    return ", ".join(f"with {one} {times_as_long(lines[f'{one}, {label}'])}" for one in who)


# -- many small against one large ----------------------------------------------------------


def many_small(comm: Comm, who: Sequence[str], stack: ExitStack) -> Comparison:
    """One allreduce of a long vector against many of its parts."""
    large = Case(comm, even("allreduce", comm.size, MANY * SMALL, DOUBLE))
    small = Case(comm, even("allreduce", comm.size, SMALL, DOUBLE))
    entries = []
    for one in who:
        whole = large.bound(called_on(comm, one))
        part = small.bound(called_on(comm, one))
        base = f"{one}, one large"
        entries += [
            Entry(Contender(base, whole, large.poison, large.wrong), base),
            Entry(
                Contender(f"{one}, many small", partial(_repeat, part), small.poison, small.wrong),
                base,
            ),
        ]

    def conclude(lines: Lines) -> str:
        slow = any(lines[f"{one}, many small"]["verdict"] == "slower" for one in who)
        advice = "put small arrays into one" if slow else "no cost of many calls can be seen"
        return (
            f"{MANY} calls of {human_bytes(SMALL)} take, compared with one of "
            f"{human_bytes(MANY * SMALL)}, {_both(who, lines, 'many small')}: {advice}."
        )

    what = f"allreduce: one of {human_bytes(MANY * SMALL)}, or {MANY} of {human_bytes(SMALL)}."
    return Comparison("Many small against one large", what, entries, conclude)


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(MANY):
        call()


# -- strided against contiguous ------------------------------------------------------------


def strided(comm: Comm, who: Sequence[str], stack: ExitStack) -> Comparison:
    """The bcast of a vector against that of a column of a matrix, a derived datatype."""
    column = MPI.DOUBLE.Create_vector(COLUMN, 1, COLUMNS).Commit()
    afterwards(stack, column.Free)
    matrix, vector = np.zeros((COLUMN, COLUMNS)), np.zeros(COLUMN)
    entries = []
    for one in who:
        base = f"{one}, contiguous"
        bcast = called_on(comm, one).Bcast
        dense, spread = partial(bcast, [vector, MPI.DOUBLE]), partial(bcast, [matrix, 1, column])
        entries += [
            Entry(_broadcast(base, comm.rank, dense, vector), base),
            Entry(_broadcast(f"{one}, strided", comm.rank, spread, matrix[:, 0]), base),
        ]

    def conclude(lines: Lines) -> str:
        slow = any(lines[f"{one}, strided"]["verdict"] == "slower" for one in who)
        advice = "keep dense what is often sent" if slow else "no cost of the gaps can be seen"
        words = _both(who, lines, "strided")
        return f"A column takes, compared with the same data dense, {words}: {advice}."

    what = (
        f"bcast of {human_bytes(8 * COLUMN)}: a vector, or one of {COLUMNS} columns of a matrix "
        "(a derived datatype, every item packed and unpacked)."
    )
    return Comparison("Strided against contiguous", what, entries, conclude)


def _broadcast(name: str, rank: int, call: Callable[[], object], data: Array) -> Contender:
    """Return a bcast from rank 0 into ``data``, whose items are then 0, 1, 2 …"""
    expected = np.arange(data.size, dtype=data.dtype)

    def poison() -> None:
        data[...] = expected if rank == 0 else -1.0

    def wrong() -> str:
        bad = np.flatnonzero(data != expected)
        if bad.size == 0:
            return ""
        return f"rank {rank}: element {bad[0]} is {data[bad[0]]}, expected {expected[bad[0]]}"

    return Contender(name, call, poison, wrong)


# -- skewed all-to-all ---------------------------------------------------------------------


def counts_of(size: int, total: int, hot: bool) -> list[int]:
    """Return how many items a rank sends to each: equal parts, or half of all to rank 0."""
    if not hot or size == 1:
        return list(split(total, size))
    first = total // 2
    return [first, *split(total - first, size - 1)]


def skewed(comm: Comm, who: Sequence[str], stack: ExitStack) -> Comparison:
    """An alltoallv with equal parts against one in which half of all goes to rank 0."""
    items = SKEWED // 8
    entries = []
    fullest = {}
    for one in who if comm.size > 2 else ():
        base = f"{one}, even"
        for label, hot in ((base, False), (f"{one}, skewed", True)):
            counts = counts_of(comm.size, items, hot)
            call = called_on(comm, one).Alltoallv
            entries.append(Entry(_exchange(label, call, comm.rank, counts), base))
            fullest[label] = float(8 * comm.size * max(counts))

    def conclude(lines: Lines) -> str:
        if not lines:
            return "Half of the data is an equal part for two ranks; start at least three."
        more = fullest[f"{who[0]}, skewed"] / fullest[f"{who[0]}, even"]
        return (
            f"With half of all data for rank 0, which then receives {three(more)} times as much, "
            f"the exchange takes, compared with equal parts, {_both(who, lines, 'skewed')}."
        )

    what = (
        f"alltoallv, {human_bytes(SKEWED)} sent by each rank: equal parts, or half of all to "
        "rank 0 and equal parts to the others."
    )
    figure = Figure("fullest rank receives", lambda rounds: fullest, human_bytes)
    return Comparison("Skewed all-to-all", what, entries, conclude, figure)


def _exchange(name: str, call: Callable[..., object], rank: int, counts: list[int]) -> Contender:
    """Return an alltoallv in which every rank sends ``counts``: its rank, over and over."""
    size, own = len(counts), counts[rank]
    sent = np.full(sum(counts), rank, np.float64)
    result = np.zeros(size * own)
    expected = np.repeat(np.arange(size, dtype=np.float64), own)
    receives = [own] * size
    bound = partial(
        call,
        [sent, counts, list(offsets(counts))[:size], MPI.DOUBLE],
        [result, receives, list(offsets(receives))[:size], MPI.DOUBLE],
    )

    def wrong() -> str:
        bad = np.flatnonzero(result != expected)
        if bad.size == 0:
            return ""
        return f"rank {rank}: element {bad[0]} is {result[bad[0]]}, expected {expected[bad[0]]}"

    return Contender(name, bound, lambda: result.fill(-1.0), wrong)


#: In the order in which they are shown.
COMPARISONS: dict[str, Maker] = {
    "small": many_small,
    "strided": strided,
    "mapping": mapping,
    "slow": slow_rank,
    "skewed": skewed,
}

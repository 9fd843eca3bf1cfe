"""What each collective promises, as data: who holds what before and after.

A value is the element ``index`` of the input vectors of some ranks, reduced in a
certain order; data movement is the case of one rank. A contract gives, per rank, the
size of its input and output, the values it starts with and those it must end with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpicoll.errors import ScheduleError
from mpicoll.schedule.ir import INPUT, OUTPUT, Call, Span
from mpicoll.schedule.partition import blocks, offsets


class Held(NamedTuple):
    """Elements of ``span`` are the values ``first``, ``first + 1``, … of ``ranks``."""

    span: Span
    ranks: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class View:
    """One rank's side of a contract.

    ``alias`` is set for the in-place form: the index in OUTPUT where INPUT begins, or
    with a negative sign minus one, the index in INPUT where OUTPUT begins.
    """

    input: int
    output: int
    before: tuple[Held, ...]
    after: tuple[Held, ...]
    alias: int | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """The sides of all ranks, and whether all ranks must hear of all others."""

    collective: str
    views: tuple[View, ...]
    reduces: bool = False
    synchronises: bool = False


def _everyone(calls: Sequence[Call]) -> tuple[int, ...]:
    return tuple(range(len(calls)))


def _whole(count: int) -> Span:
    return Span(OUTPUT, 0, count)


def _own(call: Call, count: int) -> tuple[Held, ...]:
    return (Held(Span(INPUT, 0, count), (call.rank,), 0),)


def _bcast(call: Call, calls: Sequence[Call]) -> View:
    held = (Held(_whole(call.count), (call.root,), 0),)
    return View(0, call.count, held if call.rank == call.root else (), held)


def _reduce(call: Call, calls: Sequence[Call]) -> View:
    if call.rank != call.root:
        return View(call.count, 0, _own(call, call.count), ())
    after = (Held(_whole(call.count), _everyone(calls), 0),)
    return View(call.count, call.count, _own(call, call.count), after, alias=0)


def _allreduce(call: Call, calls: Sequence[Call]) -> View:
    after = (Held(_whole(call.count), _everyone(calls), 0),)
    return View(call.count, call.count, _own(call, call.count), after, alias=0)


def _reduce_scatter(call: Call, calls: Sequence[Call]) -> View:
    start = offsets(call.counts)[call.rank]
    count = call.counts[call.rank]
    after = (Held(_whole(count), _everyone(calls), start),)
    return View(call.count, count, _own(call, call.count), after)


@lru_cache(maxsize=2)  # the same for all ranks of a call
def _all_blocks(counts: tuple[int, ...]) -> tuple[Held, ...]:
    return tuple(Held(span, (peer,), 0) for peer, span in enumerate(blocks(OUTPUT, counts)))


def _allgather(call: Call, calls: Sequence[Call]) -> View:
    count = call.counts[call.rank]
    alias = offsets(call.counts)[call.rank]
    return View(count, call.count, _own(call, count), _all_blocks(call.counts), alias)


def _gather(call: Call, calls: Sequence[Call]) -> View:
    count = call.counts[call.rank]
    if call.rank != call.root:
        return View(count, 0, _own(call, count), ())
    alias = offsets(call.counts)[call.rank]
    return View(count, call.count, _own(call, count), _all_blocks(call.counts), alias)


def _scatter(call: Call, calls: Sequence[Call]) -> View:
    start = offsets(calls[call.root].counts)[call.rank]
    count = call.counts[call.rank]
    after = (Held(_whole(count), (call.root,), start),)
    if call.rank != call.root:
        return View(0, count, (), after)
    return View(call.count, count, _own(call, call.count), after, alias=-1 - start)


@lru_cache(maxsize=256)  # every rank looks at the counts of all others
def _starts(counts: tuple[int, ...]) -> tuple[int, ...]:
    return offsets(counts)


def _alltoall(call: Call, calls: Sequence[Call]) -> View:
    after = tuple(
        Held(span, (peer,), _starts(calls[peer].counts)[call.rank])
        for peer, span in enumerate(blocks(OUTPUT, call.recv_counts))
    )
    return View(call.count, sum(call.recv_counts), _own(call, call.count), after)


def _barrier(call: Call, calls: Sequence[Call]) -> View:
    return View(1, 0, _own(call, 1), ())


def _scan(call: Call, calls: Sequence[Call]) -> View:
    after = (Held(_whole(call.count), tuple(range(call.rank + 1)), 0),)
    return View(call.count, call.count, _own(call, call.count), after, alias=0)


def _exscan(call: Call, calls: Sequence[Call]) -> View:
    # Rank 0 has nothing to its left; the standard leaves its buffer undefined and we
    # leave it untouched, so the schedule has no output there.
    if call.rank == 0:
        return View(call.count, 0, _own(call, call.count), ())
    after = (Held(_whole(call.count), tuple(range(call.rank)), 0),)
    return View(call.count, call.count, _own(call, call.count), after, alias=0)


_VIEWS: dict[str, Callable[[Call, Sequence[Call]], View]] = {
    "allgather": _allgather,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "bcast": _bcast,
    "exscan": _exscan,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "scatter": _scatter,
}

COLLECTIVES = tuple(_VIEWS)
REDUCTIONS = frozenset({"allreduce", "exscan", "reduce", "reduce_scatter", "scan"})
ROOTED = frozenset({"bcast", "gather", "reduce", "scatter"})


def contract(collective: str, calls: Sequence[Call]) -> Contract:
    """Return the contract of ``collective`` for the calls of all ranks, in rank order."""
    if collective not in _VIEWS:
        raise ScheduleError(f"no collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    for rank, call in enumerate(calls):
        if (call.rank, call.size) != (rank, len(calls)):
            raise ScheduleError(
                f"call {rank} of {len(calls)} is of rank {call.rank} of {call.size}"
            )
    view = _VIEWS[collective]
    return Contract(
        collective,
        tuple(view(call, calls) for call in calls),
        reduces=collective in REDUCTIONS,
        synchronises=collective == "barrier",
    )

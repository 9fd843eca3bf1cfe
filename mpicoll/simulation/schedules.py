"""The schedules of an algorithm at any size: built, or known from a few by symmetry."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.algorithms.alltoall import transit
from mpicoll.errors import MpicollError, ScheduleError
from mpicoll.schedule.ir import Call, Reduce, Schedule
from mpicoll.simulation import lockstep
from mpicoll.simulation.program import Line, Program, joined, line, lines
from mpicoll.simulation.symmetry import (
    ALL,
    APART,
    ROW,
    TOGETHER,
    Division,
    Lines,
    expanded,
    kinds,
)

BLOCKED = frozenset({"allgather", "gather", "reduce_scatter", "scatter"})
MANY = 4096  #: ranks from which on a row of them is counted on from a shorter one
MESSAGES = 1 << 22  #: messages of all ranks in a full replay, at most
ENOUGH = 3  #: ranks whose messages tell how many there are
SPANS = 1 << 25  #: spans of one rank's schedule, at most

#: "lockstep": one period of ranks stands for all; "merged": so too, once messages of a step to
#: one peer are taken as one; "sampled": either, and of many steps that differ in their distances
#: some stand for those around them; "rows": a row of ranks, counted on from shorter ones;
#: "classes": a few ranks of each class were built, "all": every rank, and every message replayed.
How: TypeAlias = Literal["lockstep", "merged", "sampled", "rows", "classes", "all"]


class LeftOutError(MpicollError):
    """A replay would take more time or memory than it was allowed."""


class Cut(NamedTuple):
    """How vectors are divided: ``pieces`` of a block, or of the whole vector."""

    pieces: int
    blocks: bool


@lru_cache(maxsize=256)
def _cuts_blocks(algorithm: Algorithm) -> bool:
    """Whether a segmented algorithm cuts the blocks of ranks, and not the whole vector."""
    one, other = (algorithm.build(_call(algorithm, 1, 8, 1, segment)) for segment in (0, 1))
    return one == other


def cut_of(algorithm: Algorithm, nbytes: int, segment: int, size: int) -> Cut:
    """Return how an algorithm divides vectors of ``nbytes`` on ``size`` ranks."""
    if not algorithm.segmented or segment <= 0:
        return Cut(1, True)
    if algorithm.collective in BLOCKED or _cuts_blocks(algorithm):
        return Cut(max(1, -(-nbytes // (size * segment))), True)
    return Cut(max(1, -(-nbytes // segment)), False)


def _call(algorithm: Algorithm, rank: int, size: int, share: int, segment: int) -> Call:
    """Return a call with ``share`` units a rank."""
    collective = algorithm.collective
    if collective == "alltoall":
        blocks = _shares(size, share)
        call = Call(rank, size, blocks, recv_counts=blocks)
        return transit(call, lambda _, __: share) if algorithm.knows == "transit" else call
    if collective == "barrier":
        return Call(rank, size, (1,))
    counts = _shares(size, share) if collective in BLOCKED else (size * share,)
    return Call(rank, size, counts, segment=segment)


@lru_cache(maxsize=4)
def _shares(size: int, share: int) -> tuple[int, ...]:
    return (share,) * size


def all_lines(
    algorithm: Algorithm, nbytes: int, segment: int, ranks: int
) -> tuple[list[Line], float]:
    """Return the lines of all ranks for one size, and the bytes of a unit."""
    schedules = Schedules(algorithm, ranks, cut_of(algorithm, nbytes, segment, ranks))
    return schedules.every(), nbytes / schedules.units


class Schedules:
    """The schedules of all ranks, in units of which a vector has as few as it can."""

    def __init__(self, algorithm: Algorithm, size: int, cut: Cut) -> None:
        self._algorithm, self._size, self._cut = algorithm, size, cut
        self._seen: dict[int, tuple[Line, Line]] = {}
        self.pieces = cut.pieces
        self._seconds = np.inf  # the shortest time in which one was built
        self.units = 1 if algorithm.collective == "barrier" else size * cut.pieces

    def _build(self, rank: int) -> Schedule:
        segment = 0
        if self._cut.pieces > 1:
            segment = 1 if self._cut.blocks else self._size
        start = time.perf_counter()
        call = _call(self._algorithm, rank, self._size, self._cut.pieces, segment)
        made = self._algorithm.build(call)
        self._seconds = min(self._seconds, time.perf_counter() - start)
        return made

    def _look(self, rank: int, merged: bool) -> Line:
        if rank not in self._seen:
            with _no_collection():
                self._seen[rank] = lines(self._build(rank))
        return self._seen[rank][merged]

    def program(
        self, patience: float, how: How | None
    ) -> tuple[How, lockstep.March | Program | Schedules]:
        """Return the schedules for a replay, in lockstep where they march."""
        if how == "all":
            return "all", joined(self.every())
        self._refuse_large()
        exact, merged = (partial(self._look, merged=merged) for merged in (False, True))
        if how in (None, "lockstep") and (found := self._march(exact)):
            return "lockstep", found
        # On few ranks, merging makes a difference and saves little.
        large = how is None and self._size > ALL
        if (how == "merged" or large) and (found := self._march(merged)):
            return "merged", found
        if (how == "rows" or (large and self._size > MANY)) and self._is_row(exact):
            return "rows", self
        if how in (None, "classes") and (classes := self.classes(APART)):
            return "classes", classes
        self._seen.clear()
        if how is not None:
            raise LeftOutError(f"its schedules can not be replayed as {how!r}")
        return "all", joined(list(self._patiently(patience)))

    def shorter(self, size: int) -> Schedules:
        """Return the schedules of fewer or more ranks, whose vectors have as many pieces."""
        return Schedules(self._algorithm, size, self._cut)

    def _is_row(self, lines: Lines) -> bool:
        """Whether every rank but a few at the ends does the same with its two neighbours."""
        found = kinds(lines, self._size, (ROW,))
        return found is not None and all(
            (kind.shifted & np.isin(kind.shifts, (1, self._size - 1))).all() for kind in found
        )

    def every(self) -> list[Line]:
        """Build the schedules of all ranks."""
        with _no_collection():
            return [line(self._build(rank)) for rank in range(self._size)]

    def _march(self, lines: Lines) -> lockstep.March | None:
        found = kinds(lines, self._size, TOGETHER)
        if found is None:
            return None
        try:
            return lockstep.march(found, self._size)
        except ScheduleError:
            return None  # the ranks looked at do not stand for all

    def classes(self, divisions: Sequence[Division]) -> Program | None:
        """Return all schedules, known from a few of each class, or None where they do not."""
        lines = partial(self._look, merged=False)
        if self._size > ALL:  # before many long schedules are built
            lines(self._size // 2 + 1)
            if len(self._seen) < ENOUGH:
                lines(1)
            some = [seen.messages for seen, _ in self._seen.values()]
            self._refuse(self._size * min(some))
        found = kinds(lines, self._size, divisions)
        if found is None:
            return None
        self._refuse(sum(kind.members.size * kind.line.messages for kind in found))
        try:
            return joined(expanded(found, self._size))
        except ScheduleError:
            return None

    def _patiently(self, patience: float) -> Iterator[Line]:
        needed = self._size * self._seconds
        if needed > patience:
            raise LeftOutError(
                f"no symmetry found, and all schedules would take about {needed:.0f} s to build"
            )
        messages = 0
        for rank in range(self._size):
            with _no_collection():
                made = line(self._build(rank))
            messages += made.messages
            if rank in (self._size // 64, self._size - 1):
                self._refuse(messages * self._size // (rank + 1))
            yield made

    def _refuse(self, messages: int) -> None:
        """Refuse to replay too many; each is counted at both its ends."""
        if messages > 2 * MESSAGES:
            raise LeftOutError(
                f"no symmetry found that saves replaying its {messages // 2:.2g} messages"
            )

    def _refuse_large(self) -> None:
        """Refuse schedules of which one alone does not fit; seen from how they grow."""
        if self._size <= 1024:
            return
        small, large = (
            _spans(self._algorithm.build(_call(self._algorithm, 1, size, 1, 0)))
            for size in (256, 512)
        )
        spans = large * (self._size / 512) ** np.log2(max(1.0, large / small))
        if spans > SPANS:
            raise LeftOutError(f"the schedule of one rank has about {spans:.2g} spans")


def _spans(schedule: Schedule) -> int:
    return 1 + sum(
        len(step.sends)
        + len(step.recvs)
        + sum(len(item.operands) if isinstance(item, Reduce) else 1 for item in step.local)
        for step in schedule.steps
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking the millions of spans that are being made."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()

"""The time of an algorithm at any size: its schedules built, their symmetry used, replayed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.algorithms.alltoall import transit
from mpicoll.errors import MpicollError, ScheduleError
from mpicoll.schedule.ir import Call, Reduce, Schedule
from mpicoll.simulation import lockstep
from mpicoll.simulation import replay as full
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import TICK, Integers, Machine, Reals
from mpicoll.simulation.program import Line, Program, joined, line
from mpicoll.simulation.symmetry import ALL, APART, TOGETHER, Lines, expanded, kinds

BLOCKED = frozenset({"allgather", "gather", "reduce_scatter", "scatter"})
MESSAGES = 1 << 22  #: messages of all ranks in a full replay, at most
SPANS = 1 << 25  #: spans of one rank's schedule, at most
LARGE = 1 << 22  #: messages times sizes that a full replay takes at once

#: "lockstep": one period of ranks stands for all; "merged": so too, once messages of a step to
#: one peer are taken as one; "classes": a rank of each class was built, and every message
#: replayed; "all": every rank was built, and every message replayed.
How: TypeAlias = Literal["lockstep", "merged", "classes", "all"]


class LeftOutError(MpicollError):
    """A replay would take more time or memory than it was allowed."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds until the last rank is done, one per size asked for, and how they came about."""

    seconds: tuple[float, ...]
    how: tuple[How, ...]


class Cut(NamedTuple):
    """How vectors are divided: ``pieces`` of a block, or of the whole vector."""

    pieces: int
    blocks: bool


class Prepared:
    """An algorithm's schedules for some sizes, ready to be replayed on any machine.

    Sizes are bytes of the vector, or of all blocks together. They are cut into equal shares,
    fractions of a byte too: what each of 16 ranks has of 8 bytes is half a byte. ``segment`` is
    the most bytes of a pipelined piece, 0 for whole blocks. Raises LeftOutError where symmetry
    does not help and building all schedules would take longer than ``patience`` seconds.
    ``how`` insists on a way; but for "merged", the ticks are the same.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sizes: Sequence[int],
        segment: int,
        ranks: int,
        patience: float = 30.0,
        how: How | None = None,
    ) -> None:
        self._sizes = tuple(sizes)
        self._parts: list[_Part] = []
        cuts = {nbytes: _cut(algorithm, nbytes, segment, ranks) for nbytes in sizes}
        for cut in sorted(set(cuts.values())):
            group = [nbytes for nbytes in cuts if cuts[nbytes] == cut]
            schedules = _Schedules(algorithm, ranks, cut)
            way, program = schedules.program(patience, how)
            scales = np.array([nbytes / schedules.units for nbytes in group])
            self._parts.append(_Part(group, way, program, scales))

    def run(self, fabric: Fabric, machine: Machine) -> Prediction:
        """Replay them."""
        seconds: dict[int, float] = {}
        ways: dict[int, How] = {}
        for part in self._parts:
            ends = _replayed(part.program, fabric, machine, part.scales)
            for nbytes, last in zip(part.sizes, ends.tolist(), strict=True):
                seconds[nbytes] = last * TICK
                ways[nbytes] = part.how
        return Prediction(
            tuple(seconds[nbytes] for nbytes in self._sizes),
            tuple(ways[nbytes] for nbytes in self._sizes),
        )


class _Part(NamedTuple):
    """Sizes that are replayed together, and how."""

    sizes: list[int]
    how: How
    program: lockstep.March | Program
    scales: Reals


def predict(
    algorithm: Algorithm,
    sizes: Sequence[int],
    segment: int,
    fabric: Fabric,
    machine: Machine,
    patience: float = 30.0,
    how: How | None = None,
) -> Prediction:
    """Return the predicted times; see `Prepared`."""
    return Prepared(algorithm, sizes, segment, fabric.size, patience, how).run(fabric, machine)


def _replayed(
    program: lockstep.March | Program, fabric: Fabric, machine: Machine, scales: Reals
) -> Integers:
    """Return the ticks until the last rank is done, one per size."""
    if isinstance(program, lockstep.March):
        return lockstep.replay(program, fabric, machine, scales).max(axis=1)
    at_once = max(1, LARGE // max(1, program.source.size))
    parts = [scales[low : low + at_once] for low in range(0, scales.size, at_once)]
    ends = [full.replay(program, fabric, machine, part).max(axis=1) for part in parts]
    return np.concatenate(ends)


@lru_cache(maxsize=256)
def _cuts_blocks(algorithm: Algorithm) -> bool:
    """Whether a segmented algorithm cuts the blocks of ranks, and not the whole vector."""
    one, other = (
        algorithm.build(_call(algorithm, 1, 8, 1, segment)) for segment in (0, 1)
    )
    return one == other


def _cut(algorithm: Algorithm, nbytes: int, segment: int, size: int) -> Cut:
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
    schedules = _Schedules(algorithm, ranks, _cut(algorithm, nbytes, segment, ranks))
    return schedules.every(), nbytes / schedules.units


class _Schedules:
    """The schedules of all ranks, in units of which a vector has as few as it can."""

    def __init__(self, algorithm: Algorithm, size: int, cut: Cut) -> None:
        self._algorithm, self._size, self._cut = algorithm, size, cut
        self._seen: dict[int, tuple[Line, Line]] = {}
        self._seconds = np.inf  # the shortest time in which one was built
        self.units = 1 if algorithm.collective == "barrier" else size * cut.pieces

    def _build(self, rank: int) -> Schedule:
        segment = 0
        if self._cut.pieces > 1:
            segment = 1 if self._cut.blocks else self._size
        start = time.perf_counter()
        with _no_collection():
            call = _call(self._algorithm, rank, self._size, self._cut.pieces, segment)
            made = self._algorithm.build(call)
        self._seconds = min(self._seconds, time.perf_counter() - start)
        return made

    def _look(self, rank: int, merged: bool) -> Line:
        if rank not in self._seen:
            schedule = self._build(rank)
            self._seen[rank] = line(schedule), line(schedule, merged=True)
        return self._seen[rank][merged]

    def program(self, patience: float, how: How | None) -> tuple[How, lockstep.March | Program]:
        """Return the schedules for a replay, in lockstep where they march."""
        if how == "all":
            return "all", joined(self.every())
        self._refuse_large()
        exact, merged = (partial(self._look, merged=merged) for merged in (False, True))
        if how in (None, "lockstep") and (found := self._march(exact)):
            return "lockstep", found
        # On few ranks, merging makes a difference and saves little.
        if how == "merged" or (how is None and self._size > ALL):
            if found := self._march(merged):
                return "merged", found
        if how in (None, "classes") and (classes := self._classes(exact)):
            return "classes", classes
        self._seen.clear()
        if how is not None:
            raise LeftOutError(f"its schedules can not be replayed as {how!r}")
        return "all", joined(list(self._patiently(patience)))

    def every(self) -> list[Line]:
        """Build the schedules of all ranks."""
        return [line(self._build(rank)) for rank in range(self._size)]

    def _march(self, lines: Lines) -> lockstep.March | None:
        found = kinds(lines, self._size, TOGETHER)
        if found is None:
            return None
        try:
            return lockstep.march(found, self._size)
        except ScheduleError:
            return None  # the ranks looked at do not stand for all

    def _classes(self, lines: Lines) -> Program | None:
        found = kinds(lines, self._size, APART)
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

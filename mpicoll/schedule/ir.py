"""The form of a schedule: what one rank sends, receives, reduces and copies.

A schedule is data. Spans name elements of one of three buffers and never memory;
what an element is (one byte for data movement, one item for a reduction) is decided
by whoever runs the schedule.

Step semantics, which the checker and every executor follow:

1. post the receives, then the sends, each in the order written;
2. do the local work in the order written, while the messages are in flight;
3. wait for all messages of the step.

So local work of a step reads and writes only what earlier steps delivered. Messages
between two ranks match in the order in which they are posted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from mpicoll.errors import ScheduleError


class Buffer(Enum):
    """The three buffers a span may name."""

    INPUT = "input"  #: the caller's send buffer; never written
    OUTPUT = "output"  #: the caller's receive buffer; in place it may BE the input
    WORK = "work"  #: scratch, ``Schedule.work`` elements, undefined at the start

    # Members are singletons; the identity hash is several times faster than Enum's.
    __hash__ = object.__hash__


INPUT, OUTPUT, WORK = Buffer.INPUT, Buffer.OUTPUT, Buffer.WORK


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start`` to ``stop`` (exclusive) of one buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buffer.value}[{self.start}:{self.stop}]"


class Send(NamedTuple):
    """Send the elements of ``span`` to rank ``peer``."""

    peer: int
    span: Span


class Recv(NamedTuple):
    """Receive exactly ``span.count`` elements from rank ``peer``."""

    peer: int
    span: Span


class Copy(NamedTuple):
    """Set ``target`` to ``source``; both have the same count."""

    target: Span
    source: Span


class Reduce(NamedTuple):
    """Set ``target`` to ``operands[0] op operands[1] op ...``, folded from the left.

    Operand order is kept, so operators that do not commute stay right. A fold of more
    than two operands may be accumulated in a wider type and rounded once. ``target``
    may be the same span as one of two operands, else it overlaps none.
    """

    target: Span
    operands: tuple[Span, ...]


Local: TypeAlias = Copy | Reduce


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are in flight together, and the local work done meanwhile."""

    recvs: tuple[Recv, ...] = ()
    sends: tuple[Send, ...] = ()
    local: tuple[Local, ...] = ()
    phase: str = ""  #: label for pictures and traces, such as "reduce-scatter"

    @property
    def communicates(self) -> bool:
        """Whether the step has a message."""
        return bool(self.recvs or self.sends)


@dataclass(frozen=True, slots=True)
class Call:
    """What a builder may know: one rank's view of one collective call.

    ``counts`` depends on the collective (see `mpicoll.schedule.contracts`): one entry,
    the whole vector, for bcast, reduce, allreduce, scan and exscan; one entry per rank,
    its block, for gather, scatter, allgather and reduce_scatter; for alltoall one entry
    per rank, the block sent to it, with ``recv_counts`` the blocks received.
    ``segment`` is the most elements a pipelined piece may have; 0 means no cutting.
    ``radix`` is used by alltoall's Bruck, ``transit`` by its two-phase form.
    """

    rank: int
    size: int
    counts: tuple[int, ...] = ()
    root: int = 0
    segment: int = 0
    recv_counts: tuple[int, ...] = ()
    radix: int = 2
    transit: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """The length of the whole vector, or of all blocks together."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part of a collective: its steps and the scratch they need."""

    steps: tuple[Step, ...] = ()
    work: int = 0


class Builder:
    """Collects steps in order; drops empty messages, empty copies and empty steps.

    Both ends of a message know its count, so both drop the same empty ones.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._work = 0

    def work(self, count: int) -> int:
        """Reserve ``count`` scratch elements and return the index of the first."""
        start = self._work
        self._work += count
        return start

    def step(
        self,
        *,
        recvs: Iterable[Recv] = (),
        sends: Iterable[Send] = (),
        local: Iterable[Local] = (),
        phase: str = "",
    ) -> None:
        """Append a step."""
        step = Step(
            tuple([recv for recv in recvs if recv.span.count]),
            tuple([send for send in sends if send.span.count]),
            tuple([item for item in local if item.target.count]),
            phase,
        )
        if step.communicates or step.local:
            self._steps.append(step)

    def build(self) -> Schedule:
        """Return the finished schedule."""
        if self._work < 0:
            raise ScheduleError(f"scratch of {self._work} elements")
        return Schedule(tuple(self._steps), self._work)

"""When and where the messages of a schedule fly: the layout of a space-time diagram."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mpicoll.errors import ScheduleError
from mpicoll.schedule.ir import Reduce, Schedule, Step


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message: who sends at which time, who has it at which time, how many elements."""

    source: int
    target: int
    sent: int
    arrived: int
    count: int
    phase: str
    span: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Local work of a rank at a time: a reduction, or a copy."""

    rank: int
    time: int
    reduces: bool
    count: int


@dataclass(frozen=True, slots=True)
class Diagram:
    """All messages and all local work; ``time`` is the number of the last row."""

    size: int
    time: int
    arrows: tuple[Arrow, ...]
    marks: tuple[Mark, ...]

    @property
    def phases(self) -> tuple[str, ...]:
        """The labels of the messages, in the order in which they first fly."""
        ordered = sorted(self.arrows, key=lambda arrow: arrow.sent)
        return tuple(dict.fromkeys(arrow.phase for arrow in ordered))


def diagram(schedules: Sequence[Schedule]) -> Diagram:
    """Lay out the schedules of all ranks, where every message takes one unit of time.

    A step ends one unit after it has begun, and no earlier than one unit after the
    senders of its messages have begun theirs; local work takes no time.
    """
    size = len(schedules)
    starts: list[list[int]] = [[] for _ in schedules]
    clocks = [0] * size
    flying: dict[tuple[int, int], deque[tuple[int, Step, int]]] = {}
    posted = [0] * size  # steps whose sends are under way
    done = [0] * size
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while done[rank] < len(schedule.steps):
                number = done[rank]
                step = schedule.steps[number]
                if posted[rank] == number:
                    starts[rank].append(clocks[rank])
                    posted[rank] += 1
                    moved = True
                    for index, send in enumerate(step.sends):
                        channel = flying.setdefault((rank, send.peer), deque())
                        channel.append((clocks[rank], step, index))
                ready = _arrivals(rank, step, flying)
                if ready is None:
                    break
                if step.communicates:
                    clocks[rank] = max(clocks[rank], *(time for time, _, _ in ready), 0) + 1
                done[rank] += 1
                moved = True
    if any(done[rank] < len(schedule.steps) for rank, schedule in enumerate(schedules)):
        raise ScheduleError("the schedules deadlock, there is no diagram of them")
    return Diagram(size, max(clocks, default=0), *_drawn(schedules, starts, clocks))


def _arrivals(
    rank: int, step: Step, flying: dict[tuple[int, int], deque[tuple[int, Step, int]]]
) -> list[tuple[int, Step, int]] | None:
    """Take the messages that the step receives, or none of them if one is not yet sent."""
    wanted: dict[int, int] = {}
    for recv in step.recvs:
        wanted[recv.peer] = wanted.get(recv.peer, 0) + 1
    if any(len(flying.get((peer, rank), ())) < number for peer, number in wanted.items()):
        return None
    return [flying[recv.peer, rank].popleft() for recv in step.recvs]


def _drawn(
    schedules: Sequence[Schedule], starts: list[list[int]], clocks: list[int]
) -> tuple[tuple[Arrow, ...], tuple[Mark, ...]]:
    """Return arrows and marks of steps whose times are known."""
    arrivals: dict[tuple[int, int], deque[int]] = {}
    marks = []
    for rank, schedule in enumerate(schedules):
        ends = [*starts[rank], clocks[rank]][1:]
        for step, start, end in zip(schedule.steps, starts[rank], ends, strict=True):
            for recv in step.recvs:
                arrivals.setdefault((recv.peer, rank), deque()).append(end)
            for item in step.local:
                reduces = isinstance(item, Reduce)
                marks.append(Mark(rank, start, reduces, item.target.count))
    arrows = []
    for rank, schedule in enumerate(schedules):
        for step, start in zip(schedule.steps, starts[rank], strict=True):
            for send in step.sends:
                arrived = arrivals[rank, send.peer].popleft()
                arrows.append(
                    Arrow(
                        rank,
                        send.peer,
                        start,
                        arrived,
                        send.span.count,
                        step.phase,
                        str(send.span),
                    )
                )
    return tuple(arrows), tuple(marks)

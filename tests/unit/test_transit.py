"""The first phase of two-phase Bruck brings the counts that the second is built from."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import pytest

from mpicoll.algorithms.alltoall import transit, transit_from, transit_schedule
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Buffer, Call, Copy, Schedule, Span


class Memory:
    """The three buffers of a rank as lists of ints; -1 is undefined."""

    def __init__(self, schedule: Schedule, values: list[int]) -> None:
        spans = [recv.span for step in schedule.steps for recv in step.recvs]
        output = max((span.stop for span in spans if span.buffer is OUTPUT), default=0)
        self.buffers: dict[Buffer, list[int]] = {
            INPUT: values,
            OUTPUT: [-1] * output,
            WORK: [-1] * schedule.work,
        }

    def read(self, span: Span) -> list[int]:
        return self.buffers[span.buffer][span.start : span.stop]

    def write(self, span: Span, values: list[int]) -> None:
        assert len(values) == span.count
        self.buffers[span.buffer][span.start : span.stop] = values


class Exchange:
    """Runs the schedules of all ranks in turns, sends buffered."""

    def __init__(self, schedules: Sequence[Schedule], inputs: Sequence[list[int]]) -> None:
        self.memories = list(map(Memory, schedules, inputs))
        self.wires: dict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
        ranks = [self.steps(rank, schedule) for rank, schedule in enumerate(schedules)]
        for _ in range(1000):
            ranks = [rank for rank in ranks if next(rank, None) is not None]
        assert not ranks, "deadlock"
        assert not any(self.wires.values())

    def steps(self, rank: int, schedule: Schedule) -> Iterator[int]:
        """Run one rank, yielding where it has to wait."""
        memory = self.memories[rank]
        for number, step in enumerate(schedule.steps):
            for send in step.sends:
                self.wires[rank, send.peer].append(memory.read(send.span))
            for item in step.local:
                assert isinstance(item, Copy)
                memory.write(item.target, memory.read(item.source))
            for recv in step.recvs:
                while not self.wires[recv.peer, rank]:
                    yield number
                memory.write(recv.span, self.wires[recv.peer, rank].popleft())


@pytest.mark.parametrize("size", range(1, 18))
def test_first_phase_brings_the_transit(size: int) -> None:
    rng = random.Random(size)
    table = [[rng.randrange(10**6) for _ in range(size)] for _ in range(size)]
    schedules = [transit_schedule(rank, size) for rank in range(size)]
    for rank, memory in enumerate(Exchange(schedules, table).memories):
        expected = transit(Call(rank, size), lambda source, target: table[source][target])
        output = memory.buffers[OUTPUT]
        assert -1 not in output
        assert transit_from(size, output) == expected.transit
        assert len(output) == sum(map(len, expected.transit))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 17])
def test_transit_has_the_counts_that_arrive_for_good(size: int) -> None:
    for rank in range(size):
        call = transit(Call(rank, size), lambda source, target: 100 * source + target)
        own = {100 * source + rank for source in range(size) if source != rank}
        assert own <= {count for counts in call.transit for count in counts}

"""Traces with known answers: what ranks did in true time, written by clocks that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll.algorithms import Algorithm
from mpicoll.cli import plans
from mpicoll.runtime.clocks import Sample
from mpicoll.runtime.record import Record, StageTime
from mpicoll.runtime.trace import Tracer

RUN = "one run"
NS = 1e-9


class Skew(NamedTuple):
    """A clock that shows ``offset + rate * t`` at true time ``t``."""

    offset: float = 1000.0
    rate: float = 1.0

    def __call__(self, t: float) -> float:
        return self.offset + self.rate * t


class Recorder:
    """Writes the file of one rank; times are given as true ones."""

    def __init__(
        self, folder: Path, rank: int, size: int, skew: Skew | None = None, run: str = RUN
    ) -> None:
        self.skew = Skew() if skew is None else skew
        self.tracer = Tracer(str(folder), rank, size, clock=lambda: 0.0, token="")
        self.joined("world", range(size), rank)
        self.tracer.sample(Sample(rank, run, self.skew(0.0), 0.0, 0.0))
        self.sequence = 0

    def joined(self, identity: str, ranks: Sequence[int], rank: int) -> None:
        self.tracer.join(identity, identity, rank, list(ranks))

    def compared(self, t: float, reference: int, other: Skew, error: float = 0.0) -> None:
        """Write an exact comparison of the clocks at true time ``t``."""
        here = self.skew(t)
        self.tracer.sample(Sample(reference, RUN, here, here - other(t), error))

    def called(self, start: float, end: float, *stages: Sequence[Any], **fields: Any) -> Record:
        """Write a call; a stage is (posted, worked, done, sources, targets)."""
        self.sequence += 1
        usual: dict[str, Any] = {"communicator": "world", "sequence": self.sequence}
        usual |= {"collective": "allreduce", "algorithm": "ring"}
        record = Record(**(usual | fields))
        record.start, record.end = self.skew(start), self.skew(end)
        record.stages = times_of = []
        for step, (posted, worked, done, sources, targets) in enumerate(stages, start=1):
            times = (self.skew(posted), self.skew(worked), self.skew(done))
            times_of.append(StageTime(step, *times, tuple(sources), tuple(targets), 8, 8))
        self.tracer.add(record)
        return record

    def region(self, name: str, start: float, end: float) -> None:
        self.tracer.interval(name, self.skew(start), self.skew(end))

    def waited(self, record: Record, start: float, end: float) -> None:
        self.tracer.waited(record, self.skew(start), self.skew(end))


def recorders(folder: Path, skews: Sequence[Skew], end: float = 100.0) -> list[Recorder]:
    """Return a recorder per rank, whose clocks are compared with rank 0's at 0 and ``end``."""
    found = [Recorder(folder, n, len(skews), skew) for n, skew in enumerate(skews)]
    for one in found:
        for t in (0.0, end):
            one.compared(t, 0, skews[0])
    return found


def close(recorders: Sequence[Recorder]) -> None:
    for one in recorders:
        one.tracer.close()


class Times(NamedTuple):
    """A simulated rank: start, end, and (posted, worked, done, sources, targets) by step."""

    start: float
    end: float
    stages: list[tuple[float, float, float, tuple[int, ...], tuple[int, ...]]]


def simulate(
    algorithm: Algorithm, starts: Sequence[float], work: Any, latency: Any
) -> list[Times]:
    """Run the schedules of an algorithm in a world where sends end at once.

    A step is posted when the one before is done; ``work()`` is the time until its local work
    is done, ``latency()`` that of a message.
    """
    size = len(starts)
    schedules = plans.build(algorithm, size, 3 * size)
    at, number = list(starts), [0] * size
    found: list[list[Any]] = [[] for _ in range(size)]
    posted: list[bool] = [False] * size
    flying: dict[tuple[int, int], list[float]] = {}
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            if number[rank] == len(schedule.steps):
                continue
            step = schedule.steps[number[rank]]
            sources = [op.peer for op in step.recvs]
            targets = [op.peer for op in step.sends]
            if not posted[rank]:
                posted[rank] = moved = True
                for peer in targets:
                    flying.setdefault((rank, peer), []).append(at[rank] + latency())
            wanted = {peer: sources.count(peer) for peer in sources}
            if any(len(flying.get((p, rank), [])) < n for p, n in wanted.items()):
                continue
            arrived = [flying[peer, rank].pop(0) for peer in sources]
            worked = at[rank] + work()
            done = max([worked, *arrived])
            found[rank].append((at[rank], worked, done, tuple(sources), tuple(targets)))
            at[rank], posted[rank], moved = done, False, True
            number[rank] += 1
    assert all(n == len(schedule.steps) for n, schedule in zip(number, schedules, strict=True))
    return [Times(starts[rank], at[rank], found[rank]) for rank in range(size)]

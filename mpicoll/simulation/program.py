"""Schedules as columns of numbers, which a replay can take many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpicoll.errors import ScheduleError
from mpicoll.schedule.ir import Recv, Reduce, Schedule, Send, Step
from mpicoll.simulation.machine import Integers


def _column(values: Sequence[object]) -> Integers:
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's schedule: K steps with messages, and the local work around them.

    ``sends`` and ``recvs`` are how many messages each step has, (K,), and peers and units
    those of all steps, one after the other. Work is (reduced, copied, operations): ``during``
    a step, (K, 3), and ``after`` it, (K + 1, 3), of which the first is before the first step.
    """

    sends: Integers
    recvs: Integers
    send_peers: Integers
    send_units: Integers
    recv_peers: Integers
    recv_units: Integers
    during: Integers
    after: Integers

    @property
    def messages(self) -> int:
        """How many messages the rank sends and receives."""
        return self.send_peers.size + self.recv_peers.size


def _work(step: Step) -> tuple[int, int, int, int]:
    """Return what is reduced and copied, the operations, and those once they are merged."""
    reduced = copied = 0
    for item in step.local:
        if isinstance(item, Reduce):
            reduced += item.target.count * (len(item.operands) - 1)
        else:
            copied += item.target.count
    return reduced, copied, len(step.local), bool(reduced) + bool(copied)


class _Messages:
    """The sends, or the receives, of all steps, and whether two of a step have one peer."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.peers: list[int] = []
        self.units: list[int] = []
        self.twice = False

    def add(self, ops: Sequence[Send | Recv]) -> None:
        """Add those of a step."""
        self.counts.append(len(ops))
        for peer, span in ops:
            self.peers.append(peer)
            self.units.append(span.stop - span.start)
        if len(ops) > 1 and not self.twice:
            self.twice = len({op.peer for op in ops}) < len(ops)

    def add_merged(self, ops: Sequence[Send | Recv]) -> None:
        """Add those of a step, the ones to or from a peer as one."""
        totals: dict[int, int] = {}
        for peer, span in ops:
            totals[peer] = totals.get(peer, 0) + span.stop - span.start
        self.counts.append(len(totals))
        self.peers += totals.keys()
        self.units += totals.values()

    def columns(self) -> tuple[Integers, Integers, Integers]:
        """Return counts, peers and units."""
        return _column(self.counts), _column(self.peers), _column(self.units)


def lines(schedule: Schedule) -> tuple[Line, Line]:
    """Return a schedule as columns, and once more merged.

    Steps without a message join the one before. Merged are the messages of one step to one
    peer, and its reductions, and its copies: a range of blocks that wraps round the last rank
    is two on some ranks only.
    """
    sends, recvs = _Messages(), _Messages()
    during: list[tuple[int, int, int, int]] = []
    after = [(0, 0, 0, 0)]
    nothing = after[0]
    for step in schedule.steps:
        work = _work(step) if step.local else nothing
        if step.sends or step.recvs:
            sends.add(step.sends)
            recvs.add(step.recvs)
            during.append(work)
            after.append(nothing)
        else:
            one, other = after[-1], work
            after[-1] = one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]
    inner, outer = _column(during).reshape(-1, 4), _column(after)
    columns = _columns(sends, recvs)
    exact = Line(*columns, inner[:, :3], outer[:, :3])
    if sends.twice or recvs.twice:
        sends, recvs = _Messages(), _Messages()
        for step in schedule.steps:
            if step.communicates:
                sends.add_merged(step.sends)
                recvs.add_merged(step.recvs)
        columns = _columns(sends, recvs)
    return exact, Line(*columns, inner[:, [0, 1, 3]], outer[:, [0, 1, 3]])


def _columns(
    sends: _Messages, recvs: _Messages
) -> tuple[Integers, Integers, Integers, Integers, Integers, Integers]:
    (out, targets, there), (come, sources, here) = sends.columns(), recvs.columns()
    return out, come, targets, there, sources, here


def line(schedule: Schedule) -> Line:
    """Return a schedule as columns; steps without a message join the one before."""
    return lines(schedule)[0]


@dataclass(frozen=True, slots=True)
class Program:
    """The schedules of all ranks, one after the other.

    Steps ``first[r]`` to ``first[r + 1] - 1`` are those of rank r. The sends of step k are
    ``send_first[k]`` to ``send_first[k + 1] - 1``, its receives likewise. ``match`` has the
    receive of every send, and ``matched`` the send of every receive.
    """

    first: Integers
    send_first: Integers
    recv_first: Integers
    source: Integers
    target: Integers
    units: Integers
    match: Integers
    matched: Integers
    before: Integers
    during: Integers
    after: Integers

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.first.size - 1


def _offsets(counts: Integers) -> Integers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def joined(lines: Sequence[Line]) -> Program:
    """Return the program of all ranks from their lines."""
    steps = _column([one.sends.size for one in lines])
    ranks = np.arange(len(lines))
    sources = np.repeat(ranks, [one.send_peers.size for one in lines])
    targets = np.concatenate([one.send_peers for one in lines])
    owners = np.repeat(ranks, [one.recv_peers.size for one in lines])
    origins = np.concatenate([one.recv_peers for one in lines])
    units = np.concatenate([one.send_units for one in lines])
    expected = np.concatenate([one.recv_units for one in lines])
    match = _matches(len(lines), (sources, targets), (origins, owners))
    if (units != expected[match]).any():
        raise ScheduleError("a send and its receive differ in their number of elements")
    matched = np.empty_like(match)
    matched[match] = np.arange(match.size)
    return Program(
        first=_offsets(steps),
        send_first=_offsets(np.concatenate([one.sends for one in lines])),
        recv_first=_offsets(np.concatenate([one.recvs for one in lines])),
        source=sources,
        target=targets,
        units=units,
        match=match,
        matched=matched,
        before=np.stack([one.after[0] for one in lines]),
        during=np.concatenate([one.during for one in lines]),
        after=np.concatenate([one.after[1:] for one in lines]),
    )


def _matches(
    size: int, sent: tuple[Integers, Integers], received: tuple[Integers, Integers]
) -> Integers:
    """Return the receive of every send: those of two ranks match in the order posted."""
    left = np.argsort(sent[0] * size + sent[1], kind="stable")
    right = np.argsort(received[0] * size + received[1], kind="stable")
    if left.size != right.size or any(
        (one[left] != other[right]).any() for one, other in zip(sent, received, strict=True)
    ):
        raise ScheduleError("a send has no receive, or a receive no send")
    match = np.empty_like(left)
    match[left] = right
    return match

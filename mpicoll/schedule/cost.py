"""Steps, messages and bytes of a schedule, counted, and the time they should take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpicoll.schedule.ir import Reduce, Schedule


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank does: counts are elements, steps are those with a message."""

    steps: int
    messages_sent: int
    messages_received: int
    sent: int
    received: int
    reduced: int
    copied: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The parameters of the linear model, in seconds.

    ``alpha`` per message of the busier direction, ``beta`` per byte on the wire, ``gamma``
    per byte reduced.
    """

    alpha: float
    beta: float
    gamma: float


def cost(schedule: Schedule) -> Cost:
    """Count what ``schedule`` does on its rank."""
    sends = [send.span.count for step in schedule.steps for send in step.sends]
    recvs = [recv.span.count for step in schedule.steps for recv in step.recvs]
    reduced = copied = 0
    for step in schedule.steps:
        for item in step.local:
            if isinstance(item, Reduce):
                reduced += item.target.count * (len(item.operands) - 1)
            else:
                copied += item.target.count
    return Cost(
        steps=sum(step.communicates for step in schedule.steps),
        messages_sent=len(sends),
        messages_received=len(recvs),
        sent=sum(sends),
        received=sum(recvs),
        reduced=reduced,
        copied=copied,
    )


def predicted_seconds(schedules: Sequence[Schedule], item_bytes: int, machine: Machine) -> float:
    """Return the time of the slowest rank when every rank's steps follow one another.

    A step costs ``alpha`` per message and ``beta`` per byte of the busier direction; a
    reduction costs ``gamma`` per byte. Waiting for slower peers and contention are not modelled.
    """
    slowest = 0.0
    for schedule in schedules:
        seconds = 0.0
        for step in schedule.steps:
            sent = sum(send.span.count for send in step.sends)
            received = sum(recv.span.count for recv in step.recvs)
            seconds += machine.alpha * max(len(step.sends), len(step.recvs))
            seconds += machine.beta * item_bytes * max(sent, received)
        seconds += machine.gamma * item_bytes * cost(schedule).reduced
        slowest = max(slowest, seconds)
    return slowest

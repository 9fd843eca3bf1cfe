"""The form of a schedule: frozen, hashable, and without empty ops when built."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from mpicoll.errors import ScheduleError
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Buffer,
    Builder,
    Call,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)


def example() -> Schedule:
    """Return a schedule with every kind of op, made anew."""
    out, work = Span(OUTPUT, 0, 4), Span(WORK, 0, 4)
    return Schedule(
        (
            Step(local=(Copy(out, Span(INPUT, 0, 4)),), phase="copy"),
            Step((Recv(1, work),), (Send(1, out),), phase="exchange"),
            Step(local=(Reduce(out, (work, out)),)),
        ),
        work=4,
    )


STEP = example().steps[1]
PARTS = {
    "span": (STEP.sends[0].span, "start"),
    "send": (STEP.sends[0], "peer"),
    "recv": (STEP.recvs[0], "span"),
    "copy": (example().steps[0].local[0], "target"),
    "reduce": (example().steps[2].local[0], "operands"),
    "step": (STEP, "sends"),
    "call": (Call(0, 2, (3,)), "rank"),
    "schedule": (example(), "work"),
}


@pytest.mark.parametrize("part", PARTS)
def test_frozen(part: str) -> None:
    value: Any
    value, field = PARTS[part]
    with pytest.raises((FrozenInstanceError, AttributeError)):
        setattr(value, field, getattr(value, field))
    assert not hasattr(value, "__dict__")  # slots


@pytest.mark.parametrize("part", PARTS)
def test_equal_parts_hash_alike(part: str) -> None:
    value, _ = PARTS[part]
    other = copy.deepcopy(value)
    assert other == value
    assert len({value, other}) == 1


def test_schedules_travel() -> None:
    assert pickle.loads(pickle.dumps(example())) == example()
    assert pickle.loads(pickle.dumps(WORK)) is WORK


def test_buffers() -> None:
    assert len({*Buffer, INPUT, OUTPUT, WORK}) == 3


def test_span() -> None:
    span = Span(OUTPUT, 3, 7)
    assert span.count == 4
    assert str(span) == "output[3:7]"
    assert span != Span(INPUT, 3, 7)


def test_step_communicates() -> None:
    assert Step(recvs=STEP.recvs).communicates
    assert Step(sends=STEP.sends).communicates
    assert not example().steps[0].communicates


def test_call_counts() -> None:
    assert Call(0, 3, (1, 2, 3)).count == 6
    assert Call(0, 3).count == 0


def test_builder_keeps_order_and_phases() -> None:
    builder = Builder()
    assert builder.work(4) == 0
    for step in example().steps:
        builder.step(recvs=step.recvs, sends=step.sends, local=step.local, phase=step.phase)
    assert builder.build() == example()


def test_builder_takes_iterators() -> None:
    builder = Builder()
    builder.step(sends=(Send(peer, Span(INPUT, 0, 1)) for peer in (1, 2)))
    assert [send.peer for send in builder.build().steps[0].sends] == [1, 2]


def test_builder_reserves_scratch() -> None:
    builder = Builder()
    assert [builder.work(count) for count in (3, 0, 5)] == [0, 3, 3]
    assert builder.build() == Schedule(work=8)


def test_builder_drops_what_is_empty() -> None:
    none, one = Span(OUTPUT, 2, 2), Span(INPUT, 0, 1)
    builder = Builder()
    builder.step()
    builder.step(
        recvs=[Recv(1, none)],
        sends=[Send(1, none)],
        local=[Copy(none, none), Reduce(none, (none, none))],
        phase="empty",
    )
    builder.step(recvs=[Recv(1, none)], sends=[Send(1, none), Send(2, one)])
    assert builder.build() == Schedule((Step(sends=(Send(2, one),)),))


def test_builder_refuses_negative_scratch() -> None:
    builder = Builder()
    builder.work(-1)
    with pytest.raises(ScheduleError, match="scratch of -1 elements"):
        builder.build()

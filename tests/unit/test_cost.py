"""Steps, messages and elements are counted, and time follows from them."""

from __future__ import annotations

import proofs
import pytest

from mpicoll.algorithms import Algorithm, every
from mpicoll.schedule.cost import Cost, Machine, cost, predicted_seconds
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)

ALGORITHMS = every()
IDS = [f"{item.collective}-{item.name}" for item in ALGORITHMS]

OUT, IN, WORKED = Span(OUTPUT, 0, 10), Span(INPUT, 0, 10), Span(WORK, 0, 10)
BUSY = Schedule(
    (
        Step(local=(Copy(OUT, IN),)),
        Step(
            recvs=(Recv(1, Span(WORK, 0, 4)), Recv(2, Span(WORK, 4, 10))),
            sends=(Send(1, Span(OUTPUT, 0, 3)),),
        ),
        Step(local=(Reduce(OUT, (OUT, WORKED)), Reduce(OUT, (IN, WORKED, IN, WORKED)))),
        Step(sends=(Send(2, OUT), Send(1, OUT)), local=(Copy(WORKED, IN),)),
        Step(recvs=(Recv(2, WORKED),)),
    ),
    work=10,
)


def test_counting() -> None:
    assert cost(BUSY) == Cost(
        steps=3,  # those with a message
        messages_sent=3,
        messages_received=3,
        sent=23,
        received=20,
        reduced=40,  # a fold of n operands is n - 1 operations per element
        copied=20,
    )


def test_nothing_costs_nothing() -> None:
    assert cost(Schedule()) == Cost(0, 0, 0, 0, 0, 0, 0)
    assert predicted_seconds([], 8, Machine(1, 1, 1)) == 0
    assert predicted_seconds([Schedule()], 8, Machine(1, 1, 1)) == 0


@pytest.mark.parametrize(
    ("machine", "seconds"),
    [
        (Machine(alpha=1, beta=0, gamma=0), 2 + 2 + 1),  # messages of the busier direction
        (Machine(alpha=0, beta=1, gamma=0), 8 * (10 + 20 + 10)),  # and its bytes
        (Machine(alpha=0, beta=0, gamma=1), 8 * 40),
        (Machine(alpha=1e-6, beta=1e-9, gamma=1e-10), 5e-6 + 320e-9 + 320e-10),
    ],
)
def test_prediction(machine: Machine, seconds: float) -> None:
    assert predicted_seconds([BUSY], 8, machine) == pytest.approx(seconds)
    assert predicted_seconds([Schedule(), BUSY, Schedule()], 8, machine) == pytest.approx(seconds)


def test_prediction_is_of_the_slowest_rank() -> None:
    long = Schedule((Step(sends=(Send(1, OUT),)),))
    many = Schedule((Step(sends=(Send(1, Span(OUTPUT, 0, 1)),)),) * 3)
    assert predicted_seconds([long, many], 1, Machine(1, 0, 0)) == 3
    assert predicted_seconds([long, many], 1, Machine(0, 1, 0)) == 10


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_what_is_sent_is_received(algorithm: Algorithm) -> None:
    for size in (1, 2, 3, 5, 8):
        for group in proofs.calls(algorithm, size):
            costs = [cost(schedule) for schedule in proofs.build(algorithm, group)]
            assert sum(item.sent for item in costs) == sum(item.received for item in costs)
            sent = sum(item.messages_sent for item in costs)
            assert sent == sum(item.messages_received for item in costs)
            assert size > 1 or sent == 0

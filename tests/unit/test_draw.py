"""Pictures show every op of every rank, and schedules survive JSON."""

from __future__ import annotations

import json
from typing import Any

import proofs
import pytest

from mpicoll.algorithms import Algorithm, every
from mpicoll.errors import ScheduleError
from mpicoll.schedule.cost import cost
from mpicoll.schedule.draw import as_json, from_json, text
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Copy, Recv, Reduce, Schedule, Send, Span, Step

ALGORITHMS = every()
IDS = [f"{item.collective}-{item.name}" for item in ALGORITHMS]


def pair(rank: int) -> Schedule:
    """Return one side of an allreduce of two ranks that exchanges halves."""
    halves = Span(OUTPUT, 0, 4), Span(OUTPUT, 4, 8)
    mine, other = halves[rank], halves[1 - rank]
    inbox = Span(WORK, 0, 4)
    operands = (mine, inbox) if rank == 0 else (inbox, mine)
    return Schedule(
        (
            Step(local=(Copy(Span(OUTPUT, 0, 8), Span(INPUT, 0, 8)),)),
            Step((Recv(1 - rank, inbox),), (Send(1 - rank, other),), phase="reduce-scatter"),
            Step(local=(Reduce(mine, operands),), phase="reduce-scatter"),
            Step((Recv(1 - rank, other),), (Send(1 - rank, mine),), phase="allgather"),
        ),
        work=4,
    )


PICTURE = """\
allreduce halves, 2 ranks
→ sends to, ← receives from, = local work while the step's messages are in flight;
last: steps with a message, messages and elements sent

    step │ rank 0                          │ rank 1
─────────┼─────────────────────────────────┼────────────────────────────────
       0 │ out[0:8] = in[0:8]              │ out[0:8] = in[0:8]
reduce-scatter
       1 │ →1 out[4:8]  ←1 work[0:4]       │ →0 out[0:4]  ←0 work[0:4]
       2 │ out[0:4] = out[0:4] op work[0:4]│ out[4:8] = work[0:4] op out[4:8]
allgather
       3 │ →1 out[0:4]  ←1 out[4:8]        │ →0 out[4:8]  ←0 out[0:4]
─────────┼─────────────────────────────────┼────────────────────────────────
   steps │ 2                               │ 2
messages │ 2                               │ 2
elements │ 8                               │ 8
"""


def squeezed(picture: str) -> list[str]:
    """Return the lines with the padding taken out, which depends on the widest cell."""
    lines = [" ".join(line.replace("│", " │ ").split()) for line in picture.splitlines()]
    return ["─" if line.startswith("─") else line for line in lines]


def test_picture() -> None:
    assert squeezed(text("allreduce", "halves", [pair(0), pair(1)])) == squeezed(PICTURE)


def test_columns_are_aligned() -> None:
    lines = text("allreduce", "halves", [pair(0), pair(1)]).splitlines()
    bars = {
        tuple(i for i, letter in enumerate(line) if letter in "│┼")
        for line in lines
        if "│" in line or "┼" in line
    }
    assert len(bars) == 1
    assert all(line == line.rstrip() for line in lines)


def test_ranks_of_different_phases_and_lengths() -> None:
    waits = Schedule((Step((Recv(0, Span(OUTPUT, 0, 8)),), phase="unfold"),))
    picture = text("allreduce", "folded", [pair(0), pair(1), waits])
    row = next(line for line in picture.splitlines() if line.strip().startswith("0 │"))
    assert row.split("│")[3].strip() == "(unfold)"
    assert "←0 out[0:8]" in picture
    assert picture.splitlines()[-3].split("│")[3].strip() == "1"


def test_long_folds_are_broken() -> None:
    operands = tuple(Span(WORK, 100 * i, 100 * i + 100) for i in range(8))
    fold = Schedule((Step(local=(Reduce(Span(OUTPUT, 0, 100), operands),)),), 800)
    picture = text("reduce", "direct", [fold] * 2)
    assert all(len(line) < 100 for line in picture.splitlines())
    assert picture.count("op work[700:800]") == 2


def test_nothing_to_do() -> None:
    assert "steps │ 0" in text("barrier", "none", [Schedule()])
    assert text("barrier", "none", [Schedule()]).startswith("barrier none, 1 rank\n")
    assert text("barrier", "none", []).startswith("barrier none, 0 ranks\n")


def test_many_ranks_one_after_another() -> None:
    picture = text("allreduce", "halves", [pair(0), pair(1)] * 5)
    assert picture.count("\nrank ") == 10
    assert "\n     reduce-scatter\n   1 →1 out[4:8]  ←1 work[0:4]\n" in picture
    assert picture.count("   = 2 steps, 2 messages, 8 elements sent") == 10


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
@pytest.mark.parametrize("size", [1, 2, 5, 8, 9])
def test_every_op_is_shown(algorithm: Algorithm, size: int) -> None:
    for group in proofs.calls(algorithm, size):
        schedules = proofs.build(algorithm, group)
        costs = [cost(schedule) for schedule in schedules]
        picture = text(algorithm.collective, algorithm.name, schedules)
        body = picture.split("\n", 3)[3]  # without the legend
        assert body.count("→") == sum(item.messages_sent for item in costs)
        assert body.count("←") == sum(item.messages_received for item in costs)
        items = [item for s in schedules for step in s.steps for item in step.local]
        equals = body.count("=") - (size if size > 8 else 0)
        assert equals == len(items)
        folds = [len(item.operands) - 1 for item in items if isinstance(item, Reduce)]
        assert body.count(" op ") == sum(folds)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_json_round_trip(algorithm: Algorithm) -> None:
    for size in (1, 2, 5, 8):
        for group in proofs.calls(algorithm, size):
            schedules = proofs.build(algorithm, group)
            assert from_json(json.loads(json.dumps(as_json(schedules)))) == schedules


def test_json_form() -> None:
    data = as_json([pair(0)])
    assert data["version"] == 1
    (schedule,) = data["schedules"]
    assert schedule["work"] == 4
    assert schedule["steps"][1] == {
        "phase": "reduce-scatter",
        "recvs": [{"peer": 1, "span": ["work", 0, 4]}],
        "sends": [{"peer": 1, "span": ["output", 4, 8]}],
        "local": [],
    }
    assert schedule["steps"][2]["local"] == [
        {
            "kind": "reduce",
            "target": ["output", 0, 4],
            "operands": [["output", 0, 4], ["work", 0, 4]],
        }
    ]


def broken(change: str) -> dict[str, Any]:
    """Return the JSON of a schedule with one thing wrong."""
    data = as_json([pair(0)])
    step = data["schedules"][0]["steps"][1]
    if change == "no steps":
        del data["schedules"][0]["steps"]
    elif change == "buffer":
        step["recvs"][0]["span"][0] = "disk"
    elif change == "short span":
        step["recvs"][0]["span"].pop()
    elif change == "kind":
        step["local"].append({"kind": "sort", "target": ["work", 0, 4]})
    elif change == "number":
        step["sends"][0]["peer"] = "right"
    elif change == "list":
        data["schedules"] = 3
    return data


@pytest.mark.parametrize("change", ["no steps", "buffer", "short span", "kind", "number", "list"])
def test_json_of_another_form(change: str) -> None:
    with pytest.raises(ScheduleError, match="not the form that as_json writes"):
        from_json(broken(change))


def test_json_of_another_version() -> None:
    with pytest.raises(ScheduleError, match="schedules of version 7, expected 1"):
        from_json({"version": 7, "schedules": []})

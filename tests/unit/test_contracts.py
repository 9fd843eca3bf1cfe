"""Contracts say what MPI says: they are read with numbers and held to plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from mpicoll.errors import ScheduleError
from mpicoll.schedule.contracts import COLLECTIVES, REDUCTIONS, ROOTED, Contract, Held, contract
from mpicoll.schedule.ir import INPUT, OUTPUT, Buffer, Call

Vectors: TypeAlias = list[list[int]]
SIZES = (1, 2, 3, 4, 5, 8)


def total(vectors: Vectors) -> list[int]:
    return [sum(column) for column in zip(*vectors, strict=True)]


def chunk(vector: list[int], counts: tuple[int, ...], block: int) -> list[int]:
    """Return one block of a vector that is cut by ``counts``."""
    start = sum(counts[:block])
    return vector[start : start + counts[block]]


# What rank ``call.rank`` has in the end, given the send buffers of all ranks; None where
# the standard promises nothing.
MEANING: dict[str, Callable[[Call, list[Call], Vectors], list[int] | None]] = {
    "allgather": lambda call, calls, inputs: [x for vector in inputs for x in vector],
    "allreduce": lambda call, calls, inputs: total(inputs),
    "alltoall": lambda call, calls, inputs: [
        x for peer in calls for x in chunk(inputs[peer.rank], peer.counts, call.rank)
    ],
    "barrier": lambda call, calls, inputs: None,
    "bcast": lambda call, calls, inputs: inputs[call.root],
    "exscan": lambda call, calls, inputs: total(inputs[: call.rank]) if call.rank else None,
    "gather": lambda call, calls, inputs: (
        [x for vector in inputs for x in vector] if call.rank == call.root else None
    ),
    "reduce": lambda call, calls, inputs: total(inputs) if call.rank == call.root else None,
    "reduce_scatter": lambda call, calls, inputs: chunk(total(inputs), call.counts, call.rank),
    "scan": lambda call, calls, inputs: total(inputs[: call.rank + 1]),
    "scatter": lambda call, calls, inputs: chunk(inputs[call.root], call.counts, call.rank),
}
BLOCKED = ("allgather", "gather", "reduce_scatter", "scatter")


def groups(collective: str) -> Iterator[list[Call]]:
    """Yield the calls of all ranks: all roots, even, uneven and empty blocks."""
    rng = random.Random(collective)
    for size in SIZES:
        for root in range(size) if collective in ROOTED else (0,):
            if collective == "alltoall":
                table = [[rng.randrange(4) for _ in range(size)] for _ in range(size)]
                columns = list(zip(*table, strict=True))
                yield [
                    Call(rank, size, tuple(table[rank]), recv_counts=columns[rank])
                    for rank in range(size)
                ]
            elif collective in BLOCKED:
                for counts in ((3,) * size, (0,) * size, tuple(rng.choices(range(4), k=size))):
                    yield [Call(rank, size, counts, root) for rank in range(size)]
            else:
                for count in (1,) if collective == "barrier" else (0, 1, 7):
                    yield [Call(rank, size, (count,), root) for rank in range(size)]


def vectors(promise: Contract, calls: list[Call]) -> Vectors:
    """Return distinct numbers as the send buffers of all ranks; bcast sends its output."""
    rng = random.Random(1)
    lengths = [
        call.count if promise.collective == "bcast" else view.input
        for call, view in zip(calls, promise.views, strict=True)
    ]
    return [[rng.randrange(10**9) for _ in range(length)] for length in lengths]


def memory(held: tuple[Held, ...], inputs: Vectors) -> dict[tuple[Buffer, int], int]:
    """Return the numbers that ``held`` promises, by place."""
    numbers = {}
    for span, ranks, first in held:
        for i in range(span.count):
            place = span.buffer, span.start + i
            assert place not in numbers
            numbers[place] = sum(inputs[rank][first + i] for rank in ranks)
    return numbers


def at(buffer: Buffer, numbers: list[int]) -> dict[tuple[Buffer, int], int]:
    return {(buffer, i): number for i, number in enumerate(numbers)}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_contract_is_what_mpi_says(collective: str) -> None:
    for calls in groups(collective):
        promise = contract(collective, calls)
        inputs = vectors(promise, calls)
        assert len(promise.views) == len(calls)
        for call, view in zip(calls, promise.views, strict=True):
            wanted = MEANING[collective](call, calls, inputs)
            assert memory(view.after, inputs) == at(OUTPUT, wanted or [])
            assert collective == "bcast" or view.output == len(wanted or [])
            before = memory(view.before, inputs)
            if collective == "bcast":
                sends = inputs[call.rank] if call.rank == call.root else []
                assert before == at(OUTPUT, sends)
                assert (view.input, view.output) == (0, call.count)
            else:
                assert before == at(INPUT, inputs[call.rank])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_place_of_the_input_in_place(collective: str) -> None:
    """In place the input lies where its values belong, or at the start of a reduction."""
    for calls in groups(collective):
        promise = contract(collective, calls)
        inputs = vectors(promise, calls)
        for call, view in zip(calls, promise.views, strict=True):
            wanted = MEANING[collective](call, calls, inputs)
            inside = collective not in ("alltoall", "barrier", "bcast", "reduce_scatter")
            if collective in ROOTED:
                inside = inside and call.rank == call.root
            elif collective == "exscan":
                inside = call.rank > 0
            assert (view.alias is not None) == inside
            if view.alias is None:
                continue
            assert wanted is not None
            if view.alias < 0:  # the output lies in the input
                start = -1 - view.alias
                assert inputs[call.rank][start : start + view.output] == wanted
            elif collective in REDUCTIONS:
                assert view.alias == 0
                assert view.input == view.output
            else:
                assert wanted[view.alias : view.alias + view.input] == inputs[call.rank]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_kind(collective: str) -> None:
    promise = contract(collective, [Call(0, 1, (1,), recv_counts=(1,))])
    assert promise.collective == collective
    assert promise.reduces == (collective in REDUCTIONS)
    assert promise.synchronises == (collective == "barrier")


def read(collective: str, inputs: Vectors, counts: tuple[int, ...], rank: int) -> list[int]:
    size = len(inputs)
    calls = [Call(r, size, counts, recv_counts=counts) for r in range(size)]
    return list(memory(contract(collective, calls).views[rank].after, inputs).values())


def test_golden_values() -> None:
    """The values that the first issue names."""
    assert read("reduce", [[1], [2], [3], [4]], (1,), 0) == [10]
    pairs = [[r + 1, 10 * (r + 1)] for r in range(4)]
    assert [read("allreduce", pairs, (2,), rank) for rank in range(4)] == [[10, 100]] * 4
    fours = [[10 * r + i for i in range(4)] for r in range(4)]
    scattered = [read("reduce_scatter", fours, (1,) * 4, rank) for rank in range(4)]
    assert scattered == [[60], [64], [68], [72]]
    assert read("alltoall", fours, (1,) * 4, 2) == [2, 12, 22, 32]


def test_unknown_collective() -> None:
    with pytest.raises(ScheduleError, match=r"no collective 'alltoallw'; known: allgather, .*"):
        contract("alltoallw", [])


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([Call(1, 2), Call(0, 2)], "call 0 of 2 is of rank 1 of 2"),
        ([Call(0, 2), Call(0, 2)], "call 1 of 2 is of rank 0 of 2"),
        ([Call(0, 1), Call(1, 2)], "call 0 of 2 is of rank 0 of 1"),
        ([Call(0, 2)], "call 0 of 1 is of rank 0 of 2"),
    ],
)
def test_calls_of_the_wrong_ranks(calls: list[Call], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        contract("barrier", calls)

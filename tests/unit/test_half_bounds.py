"""The error of 16-bit sums at 64 ranks, by replay of the schedules, without MPI."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mpicoll import kernels
from mpicoll.algorithms import Algorithm, every, find
from mpicoll.schedule.contracts import REDUCTIONS, contract
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Call, Copy, Schedule, Span, Step
from mpicoll.schedule.partition import split

RANKS = 64
COUNT = 203  # blocks of 3 and 4 elements
SINGLE = 2.0**-24  # the unit roundoff of float32

Array = npt.NDArray[Any]

TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SEQUENTIAL = [
    algorithm
    for algorithm in every()
    if algorithm.collective in REDUCTIONS and algorithm.order == "sequential"
]
#: Per type: unit roundoff, least subnormal, and what rounds to infinity.
LIMITS = {
    TYPES[0]: (2.0**-11, 2.0**-24, 65520.0),
    TYPES[1]: (2.0**-8, 2.0**-133, 2.0**128 - 2.0**119),
}


class Rank:
    """One rank of a replay: its memory, and where it is in its schedule."""

    def __init__(self, schedule: Schedule, given: Array, outputs: int) -> None:
        self.steps = deque(schedule.steps)
        self.memory = {
            INPUT: given,
            OUTPUT: np.full(outputs, np.nan, given.dtype),
            WORK: np.full(schedule.work, np.nan, given.dtype),
        }

    def at(self, span: Span) -> Array:
        return self.memory[span.buffer][span.start : span.stop]

    def begin(self, step: Step, half: kernels.Half) -> Iterator[tuple[int, Array]]:
        """Yield the messages that a step sends, then do its local work."""
        for peer, span in step.sends:
            yield peer, self.at(span).copy()
        for item in step.local:
            target = self.at(item.target)
            if isinstance(item, Copy):
                target[:] = self.at(item.source)
            else:
                operands = [self.at(span).view(np.uint8) for span in item.operands]
                half.reduce("SUM", target.view(np.uint8), operands)


def replay(
    algorithm: Algorithm, calls: Sequence[Call], given: Array, half: kernels.Half
) -> list[Array]:
    """Run the schedules of all ranks on rows of ``given``; return their outputs."""
    views = contract(algorithm.collective, calls).views
    ranks = [
        Rank(algorithm.build(call), row, view.output)
        for call, row, view in zip(calls, given, views, strict=True)
    ]
    mail: dict[tuple[int, int], deque[Array]] = defaultdict(deque)
    waiting: set[int] = set()
    while any(rank.steps for rank in ranks):
        moved = False
        for number, rank in enumerate(ranks):
            if not rank.steps:
                continue
            step = rank.steps[0]
            if number not in waiting:
                waiting.add(number)
                for peer, message in rank.begin(step, half):
                    mail[number, peer].append(message)
            expected = [peer for peer, _ in step.recvs]
            if all(len(mail[peer, number]) >= expected.count(peer) for peer in expected):
                for peer, span in step.recvs:
                    rank.at(span)[:] = mail[peer, number].popleft()
                rank.steps.popleft()
                waiting.remove(number)
                moved = True
        assert moved, "deadlock"
    return [rank.memory[OUTPUT] for rank in ranks]


def group(algorithm: Algorithm) -> list[Call]:
    counts = split(COUNT, RANKS) if algorithm.collective == "reduce_scatter" else (COUNT,)
    return [Call(rank, RANKS, counts) for rank in range(RANKS)]


def cases(dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return inputs of all ranks, one row each."""
    _, least, overflow = LIMITS[dtype]
    rng = np.random.default_rng(64)
    normal = rng.standard_normal((RANKS, COUNT))
    cancelling = rng.standard_normal((RANKS, COUNT)) * 100
    cancelling[RANKS // 2 :] = -cancelling[: RANKS // 2] * (1 + 2.0**-6)
    ratio = rng.uniform(-12, 12, (RANKS, COUNT))
    large = rng.uniform(-1, 1, (RANKS, COUNT)) * overflow / 40
    return {
        "alike": np.abs(normal) + 1,
        "normal": normal,
        "cancelling": cancelling,
        "of many sizes": normal * np.exp2(ratio),
        "subnormal": normal * 20 * least,
        "large": large,
        "overflowing": np.abs(large) * 2.5,
    }


def check(result: Array, terms: Array, dtype: np.dtype[Any]) -> None:
    """Hold the sums of columns of ``terms`` to the bound of docs/explanation/half-precision.md."""
    unit, least, overflow = LIMITS[dtype]
    additions = len(terms) - 1
    growth = additions * SINGLE / (1 - additions * SINGLE)
    wide = terms.astype(np.float64)
    for got, column in zip(result.astype(np.float64), wide.T, strict=True):
        exact, size = math.fsum(column), math.fsum(np.abs(column))
        if math.isinf(got):
            assert math.copysign(1, got) * exact + growth * size >= overflow
        else:
            bound = unit * abs(exact) + (1 + unit) * growth * size + least / 2
            assert abs(got - exact) <= bound, (got, exact, bound)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", cases(TYPES[0]))
@pytest.mark.parametrize("algorithm", SEQUENTIAL, ids=lambda one: f"{one.collective}-{one.name}")
def test_sequential_algorithms_keep_the_bound(
    algorithm: Algorithm, case: str, dtype: np.dtype[Any]
) -> None:
    half = kernels.half(dtype)
    assert half is not None
    given = cases(dtype)[case].astype(dtype)
    calls = group(algorithm)
    outputs = replay(algorithm, calls, given, half)
    for output, view in zip(outputs, contract(algorithm.collective, calls).views, strict=True):
        for span, ranks, first in view.after:
            terms = given[list(ranks), first : first + span.count]
            check(output[span.start : span.stop], terms, dtype)


HOPPING = [
    algorithm
    for algorithm in every()
    if algorithm.collective in ("allreduce", "reduce_scatter") and algorithm.order != "sequential"
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("algorithm", HOPPING, ids=lambda one: f"{one.collective}-{one.name}")
def test_rounding_at_each_hop_keeps_the_bound_that_is_stated(
    algorithm: Algorithm, dtype: np.dtype[Any]
) -> None:
    """What `accumulate="native"` costs: (P - 1) u of the sum of magnitudes, and underflow.

    In any order (C.-P. Jeannerod and S. M. Rump, "Improved error bounds for inner products
    in floating-point arithmetic", 2013).
    """
    half = kernels.half(dtype)
    assert half is not None
    unit, least, _ = LIMITS[dtype]
    for case in ("alike", "cancelling", "of many sizes", "subnormal"):
        given = cases(dtype)[case].astype(dtype)
        calls = group(algorithm)
        outputs = replay(algorithm, calls, given, half)
        for output, view in zip(outputs, contract(algorithm.collective, calls).views, strict=True):
            for span, ranks, first in view.after:
                terms = given[list(ranks), first : first + span.count].astype(np.float64)
                bound = (RANKS - 1) * (unit * np.abs(terms).sum(0) + least / 2)
                exact = np.array([math.fsum(column) for column in terms.T])
                got = output[span.start : span.stop].astype(np.float64)
                assert (np.abs(got - exact) <= bound).all(), case


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_ways_to_the_same_bits(dtype: np.dtype[Any]) -> None:
    given = cases(dtype)["normal"].astype(dtype)
    found = set()
    for name in ("gather", "direct"):
        algorithm = find("allreduce", name)
        for level in kernels.levels():
            half = kernels._half_at(dtype, level)
            assert half is not None
            outputs = replay(algorithm, group(algorithm), given, half)
            found |= {output.tobytes() for output in outputs}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rounding_at_each_hop_does_not_keep_it(dtype: np.dtype[Any]) -> None:
    ring, half = find("allreduce", "ring"), kernels.half(dtype)
    assert half is not None
    given = cases(dtype)["alike"].astype(dtype)
    output = replay(ring, group(ring), given, half)[0]
    with pytest.raises(AssertionError):
        check(output, given, dtype)

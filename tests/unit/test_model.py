"""The cost model: closed formulas are held to counting, and the choice to the formulas."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mpicoll.algorithms import Algorithm, every, find
from mpicoll.cli import plans
from mpicoll.schedule.ir import Reduce, Schedule, Step
from mpicoll.selection.model import (
    CROWDED,
    DEFAULT,
    KIB,
    SEGMENTS,
    Corrections,
    Rates,
    best,
    best_segment,
    counts,
    rounded,
    seconds,
)
from mpicoll.selection.profiles import _PROFILES, profile

ALGORITHMS = [pytest.param(one, id=f"{one.collective}-{one.name}") for one in every()]
CUT = [
    pytest.param(one, segments, id=f"{one.collective}-{one.name}-{segments}")
    for one in every()
    for segments in ((1, 2, 4) if one.segmented else (1,))
]
SIZES = (2, 3, 4, 5, 7, 8, 13, 16, 33)

#: How far a formula may be from counting, by what is counted. Steps are exact but for the
#: circulant broadcast, where the first rounds are idle on some ranks; messages are those of
#: the mean rank, whose range wraps round the end or not; bytes and local work are rounded
#: up where ranks beyond a power of two join in.
SLACK = {"steps": 0.15, "messages": 0.35, "bytes": 0.25, "local": 0.55, "deep": 0.0, "far": 0.25}


def _items(step: Step) -> int:
    sent = sum(send.span.count for send in step.sends)
    return max(sent, sum(recv.span.count for recv in step.recvs))


def _local(step: Step) -> int:
    return sum(
        item.target.count * (len(item.operands) - 1 if isinstance(item, Reduce) else 1)
        for item in step.local
    )


def longest(schedules: Sequence[Schedule], weight: Callable[[Step], int]) -> int:
    """Return the heaviest chain of steps that wait for one another.

    A step ends its weight after it began, and begins when the step before has ended and
    those that send to it have begun.
    """
    place, now = [0] * len(schedules), [0] * len(schedules)
    posted = [-1] * len(schedules)
    flying: dict[tuple[int, int], deque[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while place[rank] < len(schedule.steps):
                step = schedule.steps[place[rank]]
                if posted[rank] < place[rank]:
                    for send in step.sends:
                        flying.setdefault((rank, send.peer), deque()).append(now[rank])
                    posted[rank], moved = place[rank], True
                needed = Counter(recv.peer for recv in step.recvs)
                if any(len(flying.get((peer, rank), ())) < n for peer, n in needed.items()):
                    break
                begun = [flying[recv.peer, rank].popleft() for recv in step.recvs]
                now[rank] = max(now[rank], *begun, 0) + weight(step)
                place[rank], moved = place[rank] + 1, True
    assert all(at == len(one.steps) for at, one in zip(place, schedules, strict=True))
    return max(now)


def test_every_algorithm_has_a_formula() -> None:
    assert set(_PROFILES) == {(one.collective, one.name) for one in every()}


@pytest.mark.parametrize(("algorithm", "segments"), CUT)
def test_formulas_are_what_is_counted(algorithm: Algorithm, segments: int) -> None:
    for size in SIZES:
        # Divides evenly into blocks and segments.
        count = 1 if algorithm.collective == "barrier" else 16 * size * size
        cut = count // size if algorithm.collective in ("allreduce", "reduce_scatter") else count
        schedules = plans.build(algorithm, size, count, segment=-(-cut // segments))
        steps = [step for schedule in schedules for step in schedule.steps]
        counted = {
            "steps": sum(step.communicates for step in steps),
            "messages": sum(len(step.sends) for step in steps),
            "bytes": sum(send.span.count for step in steps for send in step.sends) / count,
            "local": sum(map(_local, steps)) / count,
            "deep": longest(schedules, lambda step: step.communicates),
            "far": longest(schedules, _items) / count,
        }
        deep, wide = counts(algorithm.collective, algorithm.name, size, segments)
        told = dict(zip(counted, (*wide, deep.steps, deep.sent), strict=True))
        for what, value in counted.items():
            where = f"P = {size}, S = {segments}, {what}"
            assert math.isclose(told[what], value, rel_tol=SLACK[what], abs_tol=1e-9), where


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_formulas_at_any_scale(algorithm: Algorithm) -> None:
    """They hold no loop over ranks: a hundred thousand take no longer than ten."""
    for size in (1000, 65536, 100_000):
        terms = profile(algorithm.collective, algorithm.name, size, 7)
        assert len(terms) < 10 * size.bit_length()
        assert seconds(algorithm, size, 1 << 20, 0, DEFAULT) > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_time_grows_with_bytes_rates_and_load(algorithm: Algorithm) -> None:
    for size in (2, 3, 8, 100):
        times = [seconds(algorithm, size, nbytes, 0, DEFAULT) for nbytes in (0, 1000, 10**6)]
        assert times == sorted(times)
        double = Rates(*(2 * one for one in (12e-6, 6e-6, 0.12e-9, 0.12e-9)))
        assert seconds(algorithm, size, 1000, 0, double) == pytest.approx(2 * times[1])
        assert seconds(algorithm, size, 1000, 0, Rates(load=4)) > times[1]


@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
def test_time_is_that_of_the_formula(load: float) -> None:
    """Binomial broadcast on 4 ranks: 2 steps deep; 3 edges, each with two ends."""
    rates = Rates(step=1, message=10, byte=100, local=1000, load=load)
    crowd = max(1.0, load)
    deep = 2 * (1 + 10 + 100 * 5)
    wide = (6 + 3 * (10 + 100 * 5)) * crowd / 4
    time = seconds(find("bcast", "binomial"), 4, 5, 0, rates)
    assert time == pytest.approx(math.hypot(deep, wide), rel=1e-12)


def test_few_steps_win_where_latency_is_dear_and_few_bytes_where_bandwidth_is() -> None:
    both = [find("allreduce", "recursive_doubling"), find("allreduce", "ring")]
    latency = Rates(step=1, message=1, byte=1e-15, local=1e-15)
    bandwidth = Rates(step=1e-15, message=1e-15, byte=1, local=1e-15)
    assert best(both, 8, 1000, latency)[0].name == "recursive_doubling"
    assert best(both, 8, 1000, bandwidth)[0].name == "ring"
    assert best(both[::-1], 8, 1000, latency)[0].name == "recursive_doubling"


def test_first_of_equals_wins() -> None:
    both = [find("bcast", "binomial"), find("bcast", "circulant")]
    assert best(both, 2, 8, DEFAULT)[0].name == "binomial"
    assert best(both[::-1], 2, 8, DEFAULT)[0].name == "circulant"
    with pytest.raises(ValueError, match="no candidates"):
        best([], 2, 8, DEFAULT)


def test_segments() -> None:
    chain = find("bcast", "chain")
    assert best_segment(chain, 8, 1000, DEFAULT) == 0  # nothing to cut
    assert best_segment(find("bcast", "binomial"), 8, 1 << 24, DEFAULT) == 0
    assert best_segment(chain, 1, 1 << 24, DEFAULT) == 0
    long = best_segment(chain, 8, 1 << 24, DEFAULT)
    assert long in SEGMENTS
    assert long > 0
    cheap = Rates(step=1e-9, message=1e-9)
    assert best_segment(chain, 8, 1 << 24, cheap) < long or long == SEGMENTS[1]


def test_corrections_go_between_sizes_by_their_logarithms() -> None:
    curves = {
        ("bcast", "chain"): {
            0: ((7, 1.0), (1023, 4.0), ((1 << 20) - 1, 2.0)),
            1 << 12: ((1 << 20, 0.5),),
            1 << 16: ((1 << 20, 0.25),),
        },
        ("reduce", "chain"): {0: ((8, 3.0),)},
        ("scan", "linear"): {1 << 12: ((8, 3.0),)},
    }
    corrections = Corrections(curves, 8)

    def factor(collective: str, name: str, cut: int, nbytes: int) -> float:
        return corrections.factor(collective, name, 8, cut, nbytes)

    sizes = (0, 7, 1023, (1 << 15) - 1, (1 << 20) - 1, 1 << 30)
    found = [factor("bcast", "chain", 0, nbytes) for nbytes in sizes]
    assert found == [1, 1, 4, 3, 2, 2]
    assert all(1 < factor("bcast", "chain", 0, nbytes) < 4 for nbytes in range(8, 1023))
    cuts = {1: 0.5, 1 << 12: 0.5, 1 << 13: 0.5, 1 << 15: 0.25, 1 << 16: 0.25, 1 << 30: 0.25}
    for cut, expected in cuts.items():
        assert factor("bcast", "chain", cut, 8) == factor("bcast", "chain", cut, 1 << 30)
        assert factor("bcast", "chain", cut, 8) == expected
    assert factor("bcast", "binomial", 0, 8) == factor("scan", "linear", 0, 8) == 1
    assert factor("reduce", "chain", 1 << 12, 8) == 3  # unknown for cut blocks
    # Of other numbers of ranks nothing is known.
    sizes_of = {size: corrections.factor("reduce", "chain", size, 0, 8) for size in range(2, 18)}
    assert sizes_of == {size: 3 if 5 <= size <= 8 else 1 for size in range(2, 18)}


def test_corrections_change_times_and_choices() -> None:
    both = [find("bcast", "binomial"), find("bcast", "chain")]
    rates = Rates(load=2.0)
    assert best(both, 8, 1 << 24, rates) == (both[1], 1024 * KIB)
    plain = seconds(both[1], 8, 1 << 24, 256 * KIB, rates)
    slow = replace(
        rates, corrections=Corrections({("bcast", "chain"): {256 * KIB: ((8, 5.0),)}}, 8)
    )
    assert seconds(both[1], 8, 1 << 24, 256 * KIB, slow) == pytest.approx(5 * plain)
    assert seconds(both[1], 8, 1 << 24, 0, slow) == seconds(both[1], 8, 1 << 24, 0, rates)
    assert best(both, 8, 1 << 24, slow) == (both[0], 0)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, 0), (1, 1), (3, 3), (5, 4), (7, 6), (100, 96), (1023, 768), (1 << 40, 1 << 40)],
)
def test_rounded(nbytes: int, expected: int) -> None:
    assert rounded(nbytes) == expected


def test_crowded_cores_make_waiting_dear() -> None:
    assert CROWDED.step > DEFAULT.step
    assert CROWDED.message > DEFAULT.message

"""The cases in which every algorithm is proven and counted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from mpicoll.algorithms import Algorithm
from mpicoll.errors import ScheduleError
from mpicoll.schedule.check import prove
from mpicoll.schedule.contracts import REDUCTIONS, ROOTED, Contract, contract
from mpicoll.schedule.ir import Call, Schedule
from mpicoll.schedule.partition import split

SIZES = (*range(1, 34), 48, 64, 65, 127, 128)
ODD_LARGE = 100_003
BLOCKED = frozenset({"allgather", "gather", "reduce_scatter", "scatter"})


def roots(algorithm: Algorithm, size: int) -> tuple[int, ...]:
    """Return all roots for small groups, else the first, the last and the middle one."""
    if algorithm.collective not in ROOTED:
        return (0,)
    return tuple(range(size)) if size <= 17 else (0, size - 1, size // 2)


def counts(size: int) -> tuple[int, ...]:
    """Return the vector lengths to prove."""
    return tuple(sorted({0, 1, size - 1, size, size + 1, ODD_LARGE}))


def vectors(size: int) -> Iterator[tuple[int, ...]]:
    """Yield uneven block counts: random with zeros, one rank has all, first has none."""
    rng = random.Random(size)
    yield tuple(rng.choice((0, 1, 2, 7, 1000)) for _ in range(size))
    yield tuple(99 if rank == size // 2 else 0 for rank in range(size))
    yield tuple(rank for rank in range(size))


def matrices(size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield count matrices of uneven all-to-alls; row r is what rank r sends."""
    rng = random.Random(size)
    yield [tuple(rng.choice((0, 0, 1, 3, 500)) for _ in range(size)) for _ in range(size)]
    yield [tuple(5 if peer == 0 else 0 for peer in range(size)) for _ in range(size)]


def calls(algorithm: Algorithm, size: int) -> Iterator[list[Call]]:
    """Yield the calls of all ranks, case by case."""
    collective = algorithm.collective
    if collective == "barrier":
        yield [Call(rank, size, (1,)) for rank in range(size)]
        return
    if collective == "alltoall":
        yield from _alltoall(algorithm, size)
        return
    if collective not in BLOCKED:
        shapes = [(count,) for count in counts(size)]
    elif algorithm.uniform:
        shapes = [(count,) * size for count in (0, 1, 3, 1001)]
    else:
        shapes = [split(count, size) for count in counts(size)]
        shapes += [(3,) * size, *vectors(size)]
    for root in roots(algorithm, size):
        for shape in shapes:
            for segment in segments(algorithm, size, shape):
                yield [Call(rank, size, shape, root, segment) for rank in range(size)]


def segments(algorithm: Algorithm, size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return segments that cut the longest block into 1, 2, 3 and, in small groups, 8 pieces.

    Groups of more than 33 cut only the long vectors: the time of a proof is that of its
    messages.
    """
    if not algorithm.segmented:
        return (0,)
    longest = max(shape) if algorithm.collective in BLOCKED else sum(shape)
    if algorithm.collective == "allreduce":
        longest = -(-longest // size)
    if size > 33:
        pieces: tuple[int, ...] = (3,) if sum(shape) >= ODD_LARGE else ()
    else:
        pieces = (2, 3, 8) if size <= 9 else (2, 3)
    return tuple(sorted({0, *(-(-longest // number) for number in pieces)}))


def _alltoall(algorithm: Algorithm, size: int) -> Iterator[list[Call]]:
    tables = [[(count,) * size] * size for count in (0, 1, 3, 1001)]
    if not algorithm.uniform:
        tables += list(matrices(size))
    for radix in (2, 3, 4, size) if algorithm.name.startswith("bruck") else (2,):
        for table in tables:
            yield alltoall_calls(algorithm, table, radix)


def alltoall_calls(
    algorithm: Algorithm, table: Sequence[tuple[int, ...]], radix: int = 2
) -> list[Call]:
    """Return the calls of all ranks for a matrix of counts."""
    size = len(table)
    columns = list(zip(*table, strict=True))
    made = []
    for rank in range(size):
        call = Call(rank, size, table[rank], recv_counts=columns[rank], radix=max(2, radix))
        if algorithm.knows == "transit":
            from mpicoll.algorithms.alltoall import transit

            call = transit(call, lambda source, target: table[source][target])
        made.append(call)
    return made


def build(algorithm: Algorithm, group: Sequence[Call]) -> list[Schedule]:
    """Return the schedules of all ranks."""
    return [algorithm.build(call) for call in group]


def prove_all(algorithm: Algorithm, size: int) -> int:
    """Prove every case of one algorithm at one size; return how many there were.

    Segments longer than what they cut give the program that there is without them. Where
    the programs of all ranks and their contract are equal in every part to those of a
    case before, its proof is theirs.
    """
    cases = 0
    promised: Contract | None = None
    proven: list[list[Schedule]] = []
    for group in calls(algorithm, size):
        promise = contract(algorithm.collective, group)
        schedules = build(algorithm, group)
        if promise != promised:
            promised, proven = promise, []
        known = schedules in proven
        proven.append(schedules)
        for in_place in (False, True):
            if in_place and all(view.alias is None for view in promise.views):
                continue
            cases += 1
            if known:
                continue
            try:
                prove(
                    promise,
                    schedules,
                    order=algorithm.order if algorithm.collective in REDUCTIONS else "any",
                    in_place=in_place,
                )
            except ScheduleError as error:
                raise AssertionError(
                    f"{algorithm.collective} {algorithm.name}, {size} ranks, "
                    f"{group[0]}, in_place={in_place}: {error}"
                ) from error
    return cases

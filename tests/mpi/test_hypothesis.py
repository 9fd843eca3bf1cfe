"""Random shapes, counts, displacements and groups; all ranks draw the same.

Hypothesis is derandomised: a test draws the same examples on every rank and in every run.
Ranks agree on a verdict within the test, so that they shrink a failure together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicoll
from mpicoll.algorithms import find, names

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
POISON = -99

alike = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=list(HealthCheck),
)
counts = st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE)
gaps = st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE)
tables = st.lists(counts, min_size=SIZE, max_size=SIZE)
orders = st.permutations(range(SIZE))


def agree(problem: str) -> None:
    """Fail on all ranks if one has a problem."""
    problems = [one for one in MPI.COMM_WORLD.allgather(problem) if one]
    assert not problems, problems


def placed(lengths: list[int], holes: list[int], order: list[int]) -> tuple[list[int], int]:
    """Return displacements of blocks that lie in ``order`` with holes, and the length of all."""
    displs, at = [0] * len(lengths), 0
    for block in order:
        at += holes[block]
        displs[block] = at
        at += lengths[block]
    return displs, at + 2


def differing(result: Any, expected: Any) -> str:
    if np.array_equal(result, expected):
        return ""
    return f"rank {RANK}: {result.tolist()}, expected {expected.tolist()}"


def value(source: int, target: int, count: int) -> Any:
    return np.arange(count) + 1000 * source + 100 * target


@alike
@given(lengths=counts, holes=gaps, order=orders, name=st.sampled_from(names("allgather")))
def test_allgatherv(lengths: list[int], holes: list[int], order: list[int], name: str) -> None:
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    displs, total = placed(lengths, holes, order)
    result, expected = np.full(total, POISON), np.full(total, POISON)
    for rank, (count, displ) in enumerate(zip(lengths, displs, strict=True)):
        expected[displ : displ + count] = value(rank, 0, count)
    comm.Allgatherv(
        value(RANK, 0, lengths[RANK]), [result, lengths, displs, MPI.LONG], algorithm=name
    )
    agree(differing(result, expected))


@alike
@given(
    table=tables,
    holes=gaps,
    order=orders,
    name=st.sampled_from([one for one in names("alltoall") if not find("alltoall", one).uniform]),
)
def test_alltoallv(table: list[list[int]], holes: list[int], order: list[int], name: str) -> None:
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    sends, receives = table[RANK], [row[RANK] for row in table]
    sdispls, length = placed(sends, holes, order)
    source = np.full(length, POISON)
    for peer, (count, displ) in enumerate(zip(sends, sdispls, strict=True)):
        source[displ : displ + count] = value(RANK, peer, count)
    rdispls, length = placed(receives, holes[::-1], order[::-1])
    result, expected = np.full(length, POISON), np.full(length, POISON)
    for peer, (count, displ) in enumerate(zip(receives, rdispls, strict=True)):
        expected[displ : displ + count] = value(peer, RANK, count)
    comm.Alltoallv(
        [source, sends, sdispls, MPI.LONG], [result, receives, rdispls, MPI.LONG], algorithm=name
    )
    agree(differing(result, expected))


@alike
@given(lengths=counts, holes=gaps, order=orders, root=st.integers(0, SIZE - 1), data=st.data())
def test_gatherv_and_scatterv(
    lengths: list[int], holes: list[int], order: list[int], root: int, data: st.DataObject
) -> None:
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    name = data.draw(st.sampled_from(names("gather")))
    displs, total = placed(lengths, holes, order)
    whole = np.full(total, POISON)
    for rank, (count, displ) in enumerate(zip(lengths, displs, strict=True)):
        whole[displ : displ + count] = value(rank, 0, count)
    mine, gathered = value(RANK, 0, lengths[RANK]), np.full(total, POISON)
    spec = [gathered, lengths, displs, MPI.LONG] if root == RANK else None
    comm.Gatherv(mine, spec, root, algorithm=name)
    problem = differing(gathered, whole) if root == RANK else ""
    part = np.full(lengths[RANK], POISON)
    spec = [whole, lengths, displs, MPI.LONG] if root == RANK else None
    comm.Scatterv(spec, part, root, algorithm=name)
    agree(problem or differing(part, mine))


@alike
@given(
    lengths=counts,
    name=st.sampled_from(names("reduce_scatter")),
    in_place=st.booleans(),
    segment=st.integers(0, 40),
)
def test_reduce_scatter(lengths: list[int], name: str, in_place: bool, segment: int) -> None:
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    x = np.arange(sum(lengths)) * (RANK + 1)
    start = sum(lengths[:RANK])
    expected = np.arange(start, start + lengths[RANK]) * (SIZE * (SIZE + 1) // 2)
    result = x.copy() if in_place else np.full(lengths[RANK], POISON)
    source = MPI.IN_PLACE if in_place else x
    comm.Reduce_scatter(source, result, lengths, algorithm=name, segment=segment)
    agree(differing(result[: lengths[RANK]], expected))


@alike
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    colours=st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE),
    keys=orders,
    data=st.data(),
)
def test_groups(
    shape: list[int], colours: list[int], keys: list[int], data: st.DataObject
) -> None:
    world = mpicoll.Comm(MPI.COMM_WORLD)
    name = data.draw(st.sampled_from(names("allreduce")))
    part = world.Split(colours[RANK], keys[RANK])
    x = (np.arange(int(np.prod(shape))) * (RANK + 1)).reshape(shape)
    result = np.full_like(x, POISON)
    part.Allreduce(x, result, algorithm=name)
    weight = sum(rank + 1 for rank in range(SIZE) if colours[rank] == colours[RANK])
    expected = np.arange(x.size).reshape(shape) * weight
    whole = world.allreduce(part.size == colours.count(colours[RANK]), MPI.LAND)
    part.Free()
    agree("" if np.array_equal(result, expected) and whole else f"rank {RANK}: {result}")

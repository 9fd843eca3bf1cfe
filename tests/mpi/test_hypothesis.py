"""Random shapes, counts, displacements and groups, drawn by Hypothesis on rank 0.

Rank 0 draws, the others get each example from it, and all agree on its verdict before
rank 0 fails: so ranks never differ in what they run, also while Hypothesis shrinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from cases import attempt, levels, meets
from exchange import METHODS, Case
from harness import Ranks
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.algorithms import find, names

SIZE = MPI.COMM_WORLD.size
POISON = -99

Example: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[..., str]

counts = st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE)
gaps = st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE)
tables = st.lists(counts, min_size=SIZE, max_size=SIZE)
orders = st.permutations(range(SIZE))


def drawn(examples: int = 25, **strategies: Any) -> Callable[[Check], Callable[..., None]]:
    """Make a test of a check, which says what is wrong with an example or nothing."""

    def decorate(check: Check) -> Callable[..., None]:
        def test(world: Comm, ranks: Ranks, full: bool) -> None:
            def verdict(example: Example) -> list[str]:
                try:
                    wrong = check(world, **example)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                said = wrong and f"rank {world.rank}: {wrong}"
                return [one for one in ranks.comm.allgather(said) if one]

            @seed(ranks.seed)
            @settings(
                max_examples=examples * (40 if full else 1),
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.fixed_dictionaries(strategies))
            def draw(example: Example) -> None:
                ranks.comm.bcast(example)
                wrong = verdict(example)
                assert not wrong, "\n".join(wrong)

            if world.rank == 0:
                try:
                    draw()
                finally:
                    ranks.comm.bcast(None)
            else:
                while (example := ranks.comm.bcast(None)) is not None:
                    verdict(example)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


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
    return f"{result.tolist()}, expected {expected.tolist()}"


def value(source: int, target: int, count: int) -> Any:
    return np.arange(count) + 1000 * source + 100 * target


@drawn(lengths=counts, holes=gaps, order=orders, name=st.sampled_from(names("allgather")))
def test_allgatherv(
    comm: Comm, lengths: list[int], holes: list[int], order: list[int], name: str
) -> str:
    displs, total = placed(lengths, holes, order)
    result, expected = np.full(total, POISON), np.full(total, POISON)
    for rank, (count, displ) in enumerate(zip(lengths, displs, strict=True)):
        expected[displ : displ + count] = value(rank, 0, count)
    own = value(comm.rank, 0, lengths[comm.rank])
    comm.Allgatherv(own, [result, lengths, displs, MPI.LONG], algorithm=name)
    return differing(result, expected)


@drawn(
    table=tables,
    holes=gaps,
    order=orders,
    name=st.sampled_from([one for one in names("alltoall") if not find("alltoall", one).uniform]),
)
def test_alltoallv(
    comm: Comm, table: list[list[int]], holes: list[int], order: list[int], name: str
) -> str:
    rank = comm.rank
    sends, receives = table[rank], [row[rank] for row in table]
    sdispls, length = placed(sends, holes, order)
    source = np.full(length, POISON)
    for peer, (count, displ) in enumerate(zip(sends, sdispls, strict=True)):
        source[displ : displ + count] = value(rank, peer, count)
    rdispls, length = placed(receives, holes[::-1], order[::-1])
    result, expected = np.full(length, POISON), np.full(length, POISON)
    for peer, (count, displ) in enumerate(zip(receives, rdispls, strict=True)):
        expected[displ : displ + count] = value(peer, rank, count)
    comm.Alltoallv(
        [source, sends, sdispls, MPI.LONG], [result, receives, rdispls, MPI.LONG], algorithm=name
    )
    return differing(result, expected)


@drawn(
    lengths=counts,
    holes=gaps,
    order=orders,
    root=st.integers(0, SIZE - 1),
    name=st.sampled_from(names("gather")),
)
def test_gatherv_and_scatterv(
    comm: Comm, lengths: list[int], holes: list[int], order: list[int], root: int, name: str
) -> str:
    displs, total = placed(lengths, holes, order)
    whole = np.full(total, POISON)
    for rank, (count, displ) in enumerate(zip(lengths, displs, strict=True)):
        whole[displ : displ + count] = value(rank, 0, count)
    mine, gathered = value(comm.rank, 0, lengths[comm.rank]), np.full(total, POISON)
    is_root = comm.rank == root
    spec = [gathered, lengths, displs, MPI.LONG] if is_root else None
    comm.Gatherv(mine, spec, root, algorithm=name)
    problem = differing(gathered, whole) if is_root else ""
    part = np.full(lengths[comm.rank], POISON)
    spec = [whole, lengths, displs, MPI.LONG] if is_root else None
    comm.Scatterv(spec, part, root, algorithm=name)
    return problem or differing(part, mine)


@drawn(
    lengths=counts,
    name=st.sampled_from(names("reduce_scatter")),
    in_place=st.booleans(),
    segment=st.integers(0, 40),
)
def test_reduce_scatter(
    comm: Comm, lengths: list[int], name: str, in_place: bool, segment: int
) -> str:
    rank, size = comm.rank, comm.size
    x = np.arange(sum(lengths)) * (rank + 1)
    start = sum(lengths[:rank])
    expected = np.arange(start, start + lengths[rank]) * (size * (size + 1) // 2)
    result = x.copy() if in_place else np.full(lengths[rank], POISON)
    source = MPI.IN_PLACE if in_place else x
    comm.Reduce_scatter(source, result, lengths, algorithm=name, segment=segment)
    return differing(result[: lengths[rank]], expected)


@drawn(
    shape=st.lists(st.integers(0, 4), max_size=4),
    colours=st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE),
    keys=orders,
    name=st.sampled_from(names("allreduce")),
    fortran=st.booleans(),
)
def test_groups(
    world: Comm,
    shape: list[int],
    colours: list[int],
    keys: list[int],
    name: str,
    fortran: bool,
) -> str:
    part = world.Split(colours[world.rank], keys[world.rank])
    flat = np.arange(int(np.prod(shape))) * (world.rank + 1)
    x = flat.reshape(shape, order="F" if fortran else "C")
    result = np.full_like(x, POISON)
    part.Allreduce(x, result, algorithm=name)
    size = part.size
    part.Free()
    members = [rank for rank in range(SIZE) if colours[rank] == colours[world.rank]]
    expected = x // (world.rank + 1) * sum(rank + 1 for rank in members)
    return differing(result, expected) if size == len(members) else f"group of {size}"


@st.composite
def any_case(draw: st.DrawFn, method: str) -> Case:
    """Draw a case of the matrix: any levels that meet, and any count."""
    factors, fit = levels(method, SIZE), meets(method)
    factors["count"] = range(40)
    chosen: dict[str, Any] = {}
    for name, values in factors.items():
        left = [
            level
            for level in values
            if all(fit(one, taken, name, level) for one, taken in chosen.items())
        ]
        chosen[name] = draw(st.sampled_from(left or [None]))
    return Case(method=method, number=draw(st.integers(0, 2**32)), **chosen)


def _whole(case: Case) -> bool:
    return None not in (case.kind, case.operator, case.send, case.recv, case.count)


@pytest.mark.parametrize("method", METHODS)
def test_any_case(method: str, world: Comm, ranks: Ranks, full: bool) -> None:
    """Combinations that the cover of the matrix leaves out, on the world and on halves of it
    in reversed order."""
    half = world.Split(world.rank % 2, -world.rank)

    @drawn(12, case=any_case(method).filter(_whole), halves=st.booleans())
    def check(_: Comm, case: Case, halves: bool) -> str:
        comm = half if halves else world
        return attempt(replace(case, root=case.root % comm.size), comm, ranks.seed)[0]

    try:
        check(world, ranks, full)
    finally:
        half.Free()

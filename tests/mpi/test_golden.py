"""Values anyone can check by hand, and the bytes and messages that the formulas promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Comm
from mpicoll.algorithms import Algorithm, every, find, names
from mpicoll.runtime.stats import Counts

#: Elements of float64 per block: divides into whatever an algorithm cuts it to.
BLOCK = 96
ITEM = 8


@pytest.fixture
def four(world: Comm) -> Iterator[Comm | None]:
    """The first four ranks, or as many as there are; None on the others."""
    part = world.Create(world.group.Incl(range(min(4, world.size))))
    yield None if part == MPI.COMM_NULL else part
    if part != MPI.COMM_NULL:
        part.Free()


def _of(collective: str) -> list[str | None]:
    return [None, *names(collective)]


@pytest.mark.parametrize("algorithm", _of("reduce"))
def test_reduce(four: Comm | None, algorithm: str | None) -> None:
    """1 + 2 + 3 + 4 is 10."""
    if four is None:
        return
    rank, size = four.rank, four.size
    total = mpicoll.reduce(rank + 1, comm=four, algorithm=algorithm)
    assert total == (size * (size + 1) // 2 if rank == 0 else None)
    assert size < 4 or rank or total == 10


@pytest.mark.parametrize("algorithm", _of("allreduce"))
def test_allreduce(four: Comm | None, algorithm: str | None) -> None:
    """[r + 1, 10 (r + 1)] on 4 ranks give [10, 100]."""
    if four is None:
        return
    rank, size = four.rank, four.size
    x = np.array([rank + 1, 10 * (rank + 1)])
    total = mpicoll.allreduce(x, comm=four, algorithm=algorithm).tolist()
    assert total == [size * (size + 1) // 2, 5 * size * (size + 1)]
    assert size < 4 or total == [10, 100]


@pytest.mark.parametrize("algorithm", _of("reduce_scatter"))
@pytest.mark.parametrize("method", ["Reduce_scatter", "Reduce_scatter_block"])
def test_reduce_scatter(four: Comm | None, method: str, algorithm: str | None) -> None:
    """[10 r, 10 r + 1, …] on 4 ranks give 60, 64, 68, 72."""
    if four is None:
        return
    rank, size = four.rank, four.size
    own = np.zeros(1, int)
    getattr(four, method)(10 * rank + np.arange(size), own, algorithm=algorithm)
    assert own[0] == 5 * size * (size - 1) + size * rank
    assert size < 4 or own[0] == [60, 64, 68, 72][rank]


@pytest.mark.parametrize("algorithm", _of("alltoall"))
def test_alltoall(four: Comm | None, algorithm: str | None) -> None:
    """[10 r + d] on 4 ranks give rank 2 [2, 12, 22, 32]."""
    if four is None:
        return
    rank, size = four.rank, four.size
    received = np.zeros(size, int)
    four.Alltoall(10 * rank + np.arange(size), received, algorithm=algorithm)
    assert received.tolist() == [10 * peer + rank for peer in range(size)]
    assert size < 4 or rank != 2 or received.tolist() == [2, 12, 22, 32]


# -- what the counters show -------------------------------------------------------------


def counted(world: Comm, algorithm: Algorithm, block: int = BLOCK) -> tuple[int, Counts]:
    """Run an algorithm once on even blocks; return N, which its formula means, and counts."""
    comm, many = world.Dup(), block * world.size
    vector, whole, part = np.ones(many), np.empty(many), np.empty(block)
    arguments: dict[str, tuple[Any, ...]] = {
        "allgather": (part, whole),
        "alltoall": (vector, whole),
        "barrier": (),
        "bcast": (vector,),
        "gather": (part, whole),
        "reduce_scatter": (vector, part),
        "scatter": (vector, part),
    }
    method = {"reduce_scatter": "Reduce_scatter_block"}.get(
        algorithm.collective, algorithm.collective.capitalize()
    )
    sides = arguments.get(algorithm.collective, (vector, whole))
    keywords = {"segment": 0} if sides else {}
    getattr(comm, method)(*sides, algorithm=algorithm.name, **keywords)
    counts = comm.stats[algorithm.collective, algorithm.name]
    comm.Free()
    assert counts.calls == 1
    return vector.nbytes, counts


@pytest.mark.parametrize("algorithm", every(), ids=lambda one: f"{one.collective}-{one.name}")
def test_counted_bytes_are_those_of_the_formula(world: Comm, algorithm: Algorithm) -> None:
    """The busiest rank sends what the docstring says; what is sent is received."""
    nbytes, counts = counted(world, algorithm)
    native = MPI.COMM_WORLD
    formula = algorithm.evaluate("Sent", P=world.size, N=nbytes) if world.size > 1 else 0
    assert native.allreduce(counts.bytes_sent, MPI.MAX) == pytest.approx(formula, rel=1e-12)
    assert native.allreduce(counts.bytes_sent) == native.allreduce(counts.bytes_received)
    assert native.allreduce(counts.messages_sent) == native.allreduce(counts.messages_received)


# Per rank, for N bytes of local input.
PROMISED: dict[str, Callable[[int, int], float]] = {
    "allreduce": lambda size, nbytes: 2 * (size - 1) * nbytes / size,
    "allgather": lambda size, nbytes: (size - 1) * nbytes,
    "reduce_scatter": lambda size, nbytes: (size - 1) * nbytes / size,
    "alltoall": lambda size, nbytes: (size - 1) * nbytes / size,
}
FRUGAL = [
    (collective, name)
    for collective in PROMISED
    for name in ("ring", "circulant", "direct", "pairwise", "linear")
    if name in names(collective)
]


@pytest.mark.parametrize(("collective", "name"), FRUGAL)
@pytest.mark.parametrize("block", [BLOCK, 1])
def test_every_rank_sends_no_more_than_it_must(
    world: Comm, collective: str, name: str, block: int
) -> None:
    nbytes, counts = counted(world, find(collective, name), block)
    own = nbytes // world.size if collective == "allgather" else nbytes
    expected = PROMISED[collective](world.size, own)
    assert counts.bytes_sent == expected
    assert counts.bytes_received == expected


@pytest.mark.parametrize("name", ["ring", "circulant", "direct"])
def test_uneven_blocks_differ_by_an_item_each(world: Comm, name: str) -> None:
    size = world.size
    x = np.ones(5 * size + size // 2)
    before = world.stats["allreduce", name].bytes_sent
    world.Allreduce(x, np.empty_like(x), algorithm=name, segment=0)
    sent = world.stats["allreduce", name].bytes_sent - before
    assert abs(sent - 2 * (size - 1) * x.nbytes / size) <= 2 * (size - 1) * ITEM


MESSAGES: dict[tuple[str, str], Callable[[int], int]] = {
    ("allreduce", "ring"): lambda size: 2 * (size - 1),
    ("allgather", "ring"): lambda size: size - 1,
    ("reduce_scatter", "ring"): lambda size: size - 1,
    ("reduce_scatter", "pairwise"): lambda size: size - 1,
    ("reduce_scatter", "direct"): lambda size: size - 1,
    ("alltoall", "pairwise"): lambda size: size - 1,
    ("barrier", "dissemination"): lambda size: (size - 1).bit_length(),
}


@pytest.mark.parametrize("key", MESSAGES, ids="-".join)
def test_messages(world: Comm, key: tuple[str, str]) -> None:
    _, counts = counted(world, find(*key))
    assert counts.messages_sent == counts.messages_received == MESSAGES[key](world.size)


@pytest.mark.parametrize("segment", [8, 100, 1 << 20])
def test_segments_change_messages_and_not_bytes(world: Comm, segment: int) -> None:
    x = np.ones(BLOCK * world.size)
    counts = []
    for size in (0, segment):
        comm = world.Dup()
        comm.Allreduce(x, np.empty_like(x), algorithm="ring", segment=size)
        counts.append(comm.stats["allreduce", "ring"])
        comm.Free()
    whole, cut = counts
    assert cut.bytes_sent == whole.bytes_sent
    pieces = max(1, -(-BLOCK // (segment // ITEM)))
    steps = find("allreduce", "ring").evaluate("Steps", P=world.size, S=pieces)
    assert cut.messages_sent == steps  # one per step; the allgather is not cut

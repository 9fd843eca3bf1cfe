"""Values anyone can check by hand, and the bytes that the formulas promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.algorithms import Algorithm, every, find, names

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

#: Elements of float64 per block: divides into whatever an algorithm cuts it to.
BLOCK = 96


def test_reduce_and_allreduce(world: mpicoll.Comm) -> None:
    """1 + 2 + 3 + 4 is 10, and [r + 1, 10 (r + 1)] on 4 ranks give [10, 100]."""
    total = SIZE * (SIZE + 1) // 2
    assert mpicoll.reduce(RANK + 1) == (total if RANK == 0 else None)
    result = mpicoll.allreduce(np.array([RANK + 1, 10 * (RANK + 1)]))
    assert result.tolist() == [total, 10 * total]


def test_reduce_scatter(world: mpicoll.Comm) -> None:
    """[10 r, 10 r + 1, …] on 4 ranks give 60, 64, 68, 72."""
    for name in names("reduce_scatter"):
        result = np.zeros(1, np.int64)
        world.Reduce_scatter_block(np.arange(SIZE) + 10 * RANK, result, algorithm=name)
        assert result[0] == 10 * (SIZE * (SIZE - 1) // 2) + SIZE * RANK, name


def test_alltoall(world: mpicoll.Comm) -> None:
    """[10 r + d] on 4 ranks give rank 2 [2, 12, 22, 32]."""
    for name in names("alltoall"):
        result = np.zeros(SIZE, np.int64)
        world.Alltoall(10 * RANK + np.arange(SIZE), result, algorithm=name)
        assert result.tolist() == [10 * peer + RANK for peer in range(SIZE)], name


def call(comm: mpicoll.Comm, algorithm: Algorithm) -> int:
    """Run an algorithm once on even blocks; return N, the bytes that its formula means."""
    vector, block = np.ones(BLOCK * SIZE), np.ones(BLOCK)
    whole, part = np.empty(BLOCK * SIZE), np.empty(BLOCK)
    arguments: dict[str, tuple[Any, ...]] = {
        "allgather": (block, whole),
        "allreduce": (vector, whole),
        "alltoall": (vector, whole),
        "barrier": (),
        "bcast": (vector,),
        "exscan": (vector, whole),
        "gather": (block, whole),
        "reduce": (vector, whole),
        "scan": (vector, whole),
        "scatter": (vector, part),
        "reduce_scatter": (vector, part),
    }
    method = {"reduce_scatter": "Reduce_scatter_block"}.get(
        algorithm.collective, algorithm.collective.capitalize()
    )
    keywords = {} if algorithm.collective == "barrier" else {"segment": 0}
    getattr(comm, method)(*arguments[algorithm.collective], algorithm=algorithm.name, **keywords)
    return vector.nbytes


@pytest.mark.parametrize("algorithm", every(), ids=lambda one: f"{one.collective}-{one.name}")
def test_counted_bytes_are_those_of_the_formula(world: mpicoll.Comm, algorithm: Algorithm) -> None:
    comm = world.Dup()
    nbytes = call(comm, algorithm)
    counts = comm.stats[algorithm.collective, algorithm.name]
    comm.Free()
    assert counts.calls == 1
    most = MPI.COMM_WORLD.allreduce(counts.bytes_sent, MPI.MAX)
    sent = MPI.COMM_WORLD.allreduce(counts.bytes_sent)
    assert sent == MPI.COMM_WORLD.allreduce(counts.bytes_received)
    formula = algorithm.evaluate("Sent", P=SIZE, N=nbytes) if SIZE > 1 else 0
    assert most == pytest.approx(formula)


@pytest.mark.parametrize(
    ("collective", "algorithms", "factor"),
    [
        ("allreduce", ["ring", "circulant", "direct"], 2 * (SIZE - 1) / SIZE),
        ("allgather", ["ring", "circulant"], (SIZE - 1) / SIZE),
        ("reduce_scatter", ["ring", "circulant", "direct", "pairwise"], (SIZE - 1) / SIZE),
        ("alltoall", ["linear", "pairwise"], (SIZE - 1) / SIZE),
    ],
)
def test_every_rank_sends_no_more_than_it_must(
    world: mpicoll.Comm, collective: str, algorithms: list[str], factor: float
) -> None:
    """2 (P - 1) N / P for an allreduce of N bytes, (P - 1) n for an allgather of n each, …"""
    for name in algorithms:
        comm = world.Dup()
        nbytes = call(comm, find(collective, name))
        counts = comm.stats[collective, name]
        comm.Free()
        assert counts.bytes_sent == pytest.approx(factor * nbytes), name
        assert counts.bytes_received == pytest.approx(factor * nbytes), name

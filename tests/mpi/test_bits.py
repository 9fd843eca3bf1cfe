"""The bits of reductions: those of a loop over ranks, the same on all ranks and every run,
and the right ones at the sizes where the automatic choice changes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import reference
from harness import Ranks
from kinds import kinds, operands, operators

from mpicoll import Comm
from mpicoll.algorithms import find, names
from mpicoll.schedule.partition import split

SMALL, LARGE = 8 << 10, 512 << 10

FLOATS = (
    "FLOAT16_T",
    "bfloat16",
    "FLOAT",
    "DOUBLE",
    "LONG_DOUBLE",
    "C_FLOAT_COMPLEX",
    "C_DOUBLE_COMPLEX",
)


def _sequential(collective: str) -> list[str | None]:
    return [None, *(n for n in names(collective) if find(collective, n).order == "sequential")]


def _reduced(comm: Comm, method: str, x: Any, **keywords: Any) -> tuple[Any, slice]:
    """Run a reduction of a vector; return the result of this rank and what part it is."""
    counts = split(x.size, comm.size)
    low = sum(counts[: comm.rank])
    part = slice(low, low + counts[comm.rank]) if method == "Reduce_scatter" else slice(None)
    result = np.zeros_like(x[part])
    if method == "Reduce_scatter":
        comm.Reduce_scatter(x, result, counts, **keywords)
    else:
        getattr(comm, method)(x, result, **keywords)
    return result, part if method != "Reduce" or comm.rank == 0 else slice(0)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    ("method", "algorithm"),
    [
        (method, name)
        for method in ("Allreduce", "Reduce", "Reduce_scatter")
        for name in _sequential(method.lower())
    ],
)
def test_order_of_ranks(
    method: str, algorithm: str | None, kind: str, world: Comm, rng: np.random.Generator
) -> None:
    """``order="rank"`` gives the bits of a loop over ranks, whatever the size."""
    item, add = kinds()[kind], operators()["SUM"]
    for count in (1, 7, 1000, 9973, 100_003):
        inputs = [operands(item, add, count, rank, rng) for rank in range(world.size)]
        expected = reference.fold(item, add, inputs)
        assert expected is not None
        x = inputs[world.rank].view(item.dtype)
        result, part = _reduced(world, method, x, algorithm=algorithm, order="rank")
        wanted = reference.solid(item, expected).view(item.dtype)[part]
        given = reference.solid(item, result[: wanted.size].view(np.uint8)).view(item.dtype)
        np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [
        (method, name)
        for method in ("Allreduce", "Reduce", "Reduce_scatter", "Scan", "Exscan")
        for name in (None, *names(method.lower()))
    ],
)
@pytest.mark.parametrize("operator", ["SUM", "PROD"])
@pytest.mark.parametrize("kind", ["FLOAT", "C_DOUBLE_COMPLEX", "FLOAT16_T"])
def test_same_bits_every_run(
    method: str, algorithm: str | None, operator: str, kind: str, world: Comm, ranks: Ranks
) -> None:
    """Wherever the buffers lie, and on all ranks where all have the result."""
    item = kinds()[kind]
    rng = np.random.default_rng([ranks.seed, world.rank])
    data = operands(item, operators()[operator], 1001, world.rank, rng).view(item.dtype)
    digests = set()
    for shift in (0, 1, 3):
        x = np.empty(data.size + shift, data.dtype)[shift:]
        x[:] = data
        result, _ = _reduced(world, method, x, op=operators()[operator].op, algorithm=algorithm)
        digests.add(zlib.crc32(result.tobytes()))
    assert len(digests) == 1
    if method == "Allreduce":
        assert len(set(ranks.comm.allgather(digests.pop()))) == 1


@pytest.mark.parametrize("nbytes", [0, SMALL, SMALL + 8, 8 * SMALL, LARGE, LARGE + 8, 3 << 20])
@pytest.mark.parametrize("method", ["Allreduce", "Reduce", "Reduce_scatter", "Scan", "Exscan"])
def test_choice_by_size_reduces(method: str, nbytes: int, world: Comm) -> None:
    x = np.arange(nbytes // 8) * (world.rank + 1)
    result, part = _reduced(world, method, x)
    last = {"Scan": world.rank + 1, "Exscan": world.rank}.get(method, world.size)
    expected = np.arange(x.size)[part] * (last * (last + 1) // 2)
    if part != slice(0):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("nbytes", [0, 256, SMALL, SMALL + 8, 8 * SMALL + 8, 1 << 20])
def test_choice_by_size_moves(nbytes: int, world: Comm) -> None:
    """``nbytes`` are those of one block; every block says whose it is and for whom."""
    rank, size, root, count = world.rank, world.size, world.size - 1, nbytes // 8
    item = np.arange(count)
    own = np.stack([item * 1000 + 10 * rank + peer for peer in range(size)])
    whole = np.stack([item * 1000 + 10 * peer for peer in range(size)])
    x = own[0].copy() if rank == root else np.zeros_like(item)
    world.Bcast(x, root)
    np.testing.assert_array_equal(x, item * 1000 + 10 * root)
    gathered = np.zeros_like(whole)
    world.Gather(own[0], gathered if rank == root else None, root)
    assert rank != root or (gathered == whole).all()
    world.Allgather(own[0], gathered)
    np.testing.assert_array_equal(gathered, whole)
    mine = np.zeros_like(item)
    world.Scatter(own if rank == root else None, mine, root)
    np.testing.assert_array_equal(mine, item * 1000 + 10 * root + rank)
    received = np.zeros_like(own)
    world.Alltoall(own, received)
    np.testing.assert_array_equal(received, whole + rank)


def test_wide_and_narrow(world: Comm) -> None:
    """Sums of halves: one rounding by the automatic choice, one per hop on a narrow wire."""
    x = np.array([2048.0 if world.rank == 0 else 1.0], np.float16)
    wide, narrow = np.zeros_like(x), np.zeros_like(x)
    world.Allreduce(x, wide)
    world.Allreduce(x, narrow, algorithm="reduce_bcast")
    exact = 2048 + world.size - 1
    assert wide[0] == np.float16(exact)  # to the nearest even multiple of 2
    assert abs(float(narrow[0]) - exact) <= exact * (world.size - 1) * 2.0**-11
    total = np.zeros(1, np.float16)
    world.Reduce(x, total, root=0)
    assert world.rank != 0 or total[0] == np.float16(exact)

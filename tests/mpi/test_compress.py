"""Reductions whose float32 travels as 16-bit floats, and 16-bit sums rounded at each hop."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.algorithms import find

#: Unit roundoff and least subnormal of the type on the wire.
TYPES = {
    "bf16": (np.dtype(ml_dtypes.bfloat16), Fraction(1, 2**8), Fraction(1, 2**133)),
    "fp16": (np.dtype(np.float16), Fraction(1, 2**11), Fraction(1, 2**24)),
}


def inputs(size: int, count: int) -> Any:
    """Return what every rank passes, known to all of them."""
    rng = np.random.default_rng([7, size, count])
    scale = 10.0 ** rng.integers(-3, 3, count)
    return (rng.standard_normal((size, count)) * scale).astype(np.float32)


def excess(result: Any, every: Any, name: str, mean: bool) -> list[int]:
    """Return the elements that are further from the exact sum than the bound allows.

    Each input is rounded (u), added in float32 (g) and the sum is rounded (u); eta is what
    underflow may cost in each rounding.
    """
    _, u, eta = TYPES[name]
    size = len(every)
    roundings = Fraction(size, 2**24)  # P - 1 additions, and the division of a mean
    g = roundings / (1 - roundings)
    wrong = []
    for column in range(every.shape[1]):
        values = [Fraction(float(value)) for value in every[:, column]]
        exact, total = sum(values), sum(abs(value) for value in values)
        lost = u * total + size * eta / 2
        folded = lost + g * (total + lost)
        divisor = size if mean else 1
        limit = u * (abs(exact) + folded) / divisor + folded / divisor + eta / 2
        if abs(Fraction(float(result[column])) - exact / divisor) > limit:
            wrong.append(column)
    return wrong


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent", "in place"])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("name", list(TYPES))
def test_allreduce(world: mpicoll.Comm, name: str, mean: bool, form: str) -> None:
    every = inputs(world.size, 101)
    op = mpicoll.AVG if mean else MPI.SUM
    source, result = every[world.rank].copy(), np.full(101, np.nan, np.float32)
    if form == "blocking":
        world.Allreduce(source, result, op, compress=name)
    elif form == "in place":
        result[:] = source
        world.Allreduce(MPI.IN_PLACE, result, op, compress=name)
    elif form == "non-blocking":
        world.Iallreduce(source, result, op, compress=name).Wait()
    else:
        plan = world.Allreduce_init(source, result, op, compress=name)
        source[:] = 0
        plan.Start()
        plan.Wait()
        source[:] = every[world.rank]  # a plan reads its input at every start
        plan.Start()
        plan.Wait()
        plan.Free()
    assert not excess(result, every, name, mean)
    assert (source == every[world.rank]).all()
    others = np.empty((world.size, 101), np.float32)
    world.Allgather(result, others)
    assert (others.view(np.uint32) == result.view(np.uint32)).all()


def ran(comm: mpicoll.Comm, form: str, method: str, *args: Any, **keywords: Any) -> None:
    """Run a collective in one of its forms."""
    if form == "blocking":
        getattr(comm, method)(*args, **keywords)
    elif form == "non-blocking":
        getattr(comm, f"I{method.lower()}")(*args, **keywords).Wait()
    else:
        plan = getattr(comm, f"{method}_init")(*args, **keywords)
        for _ in range(2):
            plan.Start()
            plan.Wait()
        plan.Free()


forms = pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])


@forms
@pytest.mark.parametrize("name", list(TYPES))
def test_reduce(world: mpicoll.Comm, name: str, form: str) -> None:
    every = inputs(world.size, 67)
    for root in range(world.size):
        result = np.full(67, np.nan, np.float32) if world.rank == root else None
        ran(world, form, "Reduce", every[world.rank], result, MPI.SUM, root, compress=name)
        assert result is None or not excess(result, every, name, mean=False)


@forms
@pytest.mark.parametrize("name", list(TYPES))
def test_reduce_scatter(world: mpicoll.Comm, name: str, form: str) -> None:
    every = inputs(world.size, 5 * world.size)
    block = slice(5 * world.rank, 5 * world.rank + 5)
    result = np.full(5, np.nan, np.float32)
    ran(world, form, "Reduce_scatter_block", every[world.rank], result, compress=name)
    assert not excess(result, every[:, block], name, mean=False)
    counts = list(range(world.size))  # none on rank 0
    start = sum(counts[: world.rank])
    uneven = np.full(world.rank, np.nan, np.float32)
    given = every[world.rank, : sum(counts)]
    ran(world, form, "Reduce_scatter", given, uneven, counts, compress=name)
    assert not excess(uneven, every[:, start : start + world.rank], name, mean=False)
    whole = every[world.rank].copy()
    world.Reduce_scatter_block(MPI.IN_PLACE, whole, compress=name)
    assert (whole[:5] == result).all()
    assert (whole[5:] == every[world.rank][5:]).all()


def test_half_the_bytes_travel(world: mpicoll.Comm) -> None:
    comm = world.Dup()
    count = 16 * world.size
    x = np.ones(count, np.float32)
    comm.Allreduce(x, np.empty_like(x), algorithm="ring", compress="bf16")
    assert comm.stats["allreduce", "ring"].bytes_sent == 2 * (world.size - 1) * 16 * 2
    comm.Free()


@pytest.mark.parametrize(
    ("dtype", "keywords", "words"),
    [
        (np.float64, {"compress": "bf16"}, "wants float32"),
        (np.float32, {"compress": "int8"}, "known: None, 'bf16', 'fp16'"),
        (np.float16, {"accumulate": "wide"}, "known: None, 'native'"),
    ],
)
def test_refused(world: mpicoll.Comm, dtype: Any, keywords: dict[str, Any], words: str) -> None:
    x = np.ones(3, dtype)
    with pytest.raises(ValueError, match=words):
        world.Allreduce(x, np.empty_like(x), **keywords)
    world.Barrier()


def test_native_accumulation_takes_the_fast_algorithms(world: mpicoll.Comm) -> None:
    """By default 16-bit sums go where they are rounded once; asked for, where other types go."""
    comm = world.Dup()
    x = np.ones(1 << 16, np.float16)
    for keywords in ({}, {"accumulate": "native"}):
        comm.stats.reset()
        comm.Allreduce(x, y := np.empty_like(x), **keywords)
        assert (y == world.size).all()
        (used,) = [name for collective, name in comm.stats if collective == "allreduce"]
        order = find("allreduce", used).order
        assert keywords or world.size <= 2 or order == "sequential"
        comm.stats.reset()
        comm.Allreduce(x.view(np.int16), np.empty(1 << 16, np.int16))
        (others,) = [name for collective, name in comm.stats if collective == "allreduce"]
        assert not keywords or used == others
    comm.Free()

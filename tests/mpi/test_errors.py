"""Wrong calls: mpi4py's exception class, a helpful sentence, and nothing touched.

Every rank makes the same mistake, and afterwards the communicator works on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
POISON = -7.0


def doubles(count: int) -> np.ndarray[Any, Any]:
    return np.full(count, POISON)


def frozen(count: int) -> np.ndarray[Any, Any]:
    array = doubles(count)
    array.flags.writeable = False
    return array


# name: (call on a communicator and a poisoned array of 4, class, words of the message)
WRONG: dict[str, tuple[Callable[[Any, Any], None], type[Exception], str]] = {
    "root too large": (lambda c, x: c.Bcast(x, root=SIZE), MPI.Exception, f"root {SIZE}, exp"),
    "root negative": (lambda c, x: c.Gather(x, x, root=-1), MPI.Exception, "root -1, exp"),
    "root of reduce": (lambda c, x: c.Reduce(x, x, root=99), MPI.Exception, "root 99, exp"),
    "negative count": (lambda c, x: c.Bcast([x, -1, MPI.DOUBLE]), ValueError, "negative count -1"),
    "negative counts": (
        lambda c, x: c.Allgatherv(doubles(1), [x, [-1] * SIZE]),
        MPI.Exception,
        "negative count -1",
    ),
    "receive side too small": (
        lambda c, x: c.Allreduce(doubles(9), [x, 9, MPI.DOUBLE]),
        ValueError,
        "32 bytes, the counts want bytes 0 to 72",
    ),
    "blocks do not divide": (
        lambda c, x: (
            c.Allgather(doubles(1), doubles(SIZE + 1)) if SIZE > 1 else c.Bcast([x, "?!"])
        ),
        (ValueError if SIZE > 1 else KeyError),
        "not a multiple of" if SIZE > 1 else "cannot map",
    ),
    "counts differ": (
        lambda c, x: c.Allreduce(doubles(3), x),
        ValueError,
        "send count 3 and receive count 4",
    ),
    "types differ": (
        lambda c, x: c.Scan(np.zeros(4, np.float32), x),
        ValueError,
        "MPI_FLOAT and MPI_DOUBLE",
    ),
    "not writable": (lambda c, x: c.Scan(x, frozen(4)), BufferError, "not writable"),
    "not contiguous": (lambda c, x: c.Scan(x, doubles(8)[::2]), BufferError, "not contiguous"),
    "no such type": (lambda c, x: c.Bcast(np.zeros(2, "S3")), KeyError, "cannot map '3s'"),
    "no buffer": (lambda c, x: c.Bcast(3.5), TypeError, "expecting buffer"),
    "operator of another type": (
        lambda c, x: c.Allreduce(doubles(4), x, MPI.BXOR),
        MPI.Exception,
        "BXOR is not defined for MPI_DOUBLE",
    ),
    "no operator": (lambda c, x: c.Allreduce(doubles(4), x, "sum"), TypeError, "got str"),
    "average in a scan": (
        lambda c, x: c.Scan(doubles(4), x, mpicoll.AVG),
        MPI.Exception,
        "AVG has no meaning for a scan",
    ),
    "overlap": (lambda c, x: c.Allreduce(x[:3], x[1:]), MPI.Exception, "overlap"),
    "no such algorithm": (
        lambda c, x: c.Allreduce(doubles(4), x, algorithm="rings"),
        mpicoll.AlgorithmError,
        "no algorithm 'rings'; known: circulant, direct",
    ),
    "algorithm reorders": (
        lambda c, x: c.Allreduce(doubles(4), x, algorithm="ring", order="rank"),
        mpicoll.AlgorithmError,
        "left to right over ranks; those that do: direct, gather",
    ),
    "no such order": (
        lambda c, x: c.Allreduce(doubles(4), x, order="left"),
        mpicoll.AlgorithmError,
        "order='left'",
    ),
    "negative segment": (
        lambda c, x: c.Allreduce(doubles(4), x, algorithm="ring", segment=-1),
        mpicoll.AlgorithmError,
        "segment=-1",
    ),
    "counts of a reduce-scatter": (
        lambda c, x: c.Reduce_scatter(doubles(4), x, [4] * (SIZE + 1)),
        ValueError,
        f"{SIZE + 1} receive counts for {SIZE} ranks",
    ),
    "fractional counts": (
        lambda c, x: c.Reduce_scatter(doubles(4), x, [4.5] * SIZE),
        TypeError,
        "float",
    ),
    "own block of two sizes": (
        lambda c, x: c.Allgatherv(doubles(1), [doubles(2 * SIZE), [2] * SIZE]),
        MPI.Exception,
        "own block has 8 bytes on the send side and 16",
    ),
}

#: Calls that mpi4py refuses before it sends anything, so that it can be asked.
ASKED = (
    *("negative count", "blocks do not divide", "counts differ", "types differ"),
    *("not writable", "not contiguous", "no such type", "no buffer"),
    *("operator of another type", "fractional counts"),
)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(world: mpicoll.Comm, name: str) -> None:
    call, expected, words = WRONG[name]
    x = doubles(4)
    with pytest.raises(expected) as caught:
        call(world, x)
    assert words in str(caught.value)
    assert f"on rank {RANK}" in str(caught.value)
    assert (x == POISON).all()
    assert mpicoll.allreduce(1, comm=world) == SIZE


@pytest.mark.parametrize("name", ASKED)
def test_class_is_that_of_mpi4py(world: mpicoll.Comm, name: str) -> None:
    call, expected, _ = WRONG[name]
    with pytest.raises(expected) as native:
        call(MPI.COMM_WORLD, doubles(4))
    with pytest.raises(expected) as ours:
        call(world, doubles(4))
    if isinstance(native.value, MPI.Exception):
        assert isinstance(ours.value, MPI.Exception)
        assert native.value.Get_error_class() == ours.value.Get_error_class()


def test_operator_that_does_not_commute(world: mpicoll.Comm) -> None:
    op = MPI.Op.Create(lambda left, right, datatype: None, commute=False)
    with pytest.raises(mpicoll.AlgorithmError, match="does not commute; fit: direct"):
        world.Allreduce(doubles(4), doubles(4), op, algorithm="circulant")
    op.Free()


def test_error_on_one_rank_does_not_mispair_the_next_call(world: mpicoll.Comm) -> None:
    """Rank 0's broken gather consumes its sequence number, like the others' good ones."""
    if RANK == 0:
        with pytest.raises(BufferError):
            world.Gather(np.zeros(1), frozen(SIZE))
    else:
        world.Gather(np.zeros(1), None, algorithm="linear")
    assert mpicoll.allreduce(RANK, comm=world) == SIZE * (SIZE - 1) // 2
    # What rank 0 did not receive is thrown away before its tag comes round.
    world._link._sweep()


def test_short_message(world: mpicoll.Comm) -> None:
    """Ranks that disagree on a count hear of it; what is stale is not taken for new."""
    if RANK > 1 or SIZE == 1:
        pair = world.Split(MPI.UNDEFINED)
        return
    pair = world.Split(0)
    if RANK == 0:
        pair.Bcast(doubles(4))
    else:
        with pytest.raises(mpicoll.ShortMessageError, match=r"rank 1: .*32 .* expected 40"):
            pair.Bcast(doubles(5))
    pair.Free()

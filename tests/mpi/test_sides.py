"""Arrays that are taken as they are: the same bytes as by a `Buffer`, and no others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.collectives.sides import plain, plain_pair
from mpicoll.runtime.specs import parse_recv

PLAIN: dict[str, np.ndarray[Any, Any]] = {
    "vector": np.arange(5.0),
    "matrix": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "0-d": np.array(1.5),
    "part": np.arange(10)[2:7],
    "one of a stride": np.arange(10)[::-3][:1],
    "longlong": np.arange(3, dtype=np.longlong),
    "bool": np.ones(3, np.bool_),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
}
OTHER: dict[str, Any] = {
    "gaps": np.arange(10)[::2],
    "backwards": np.arange(4)[::-1],
    "empty": np.empty(0),
    "byte order": np.arange(3).astype(np.dtype(np.int64).newbyteorder()),
    "objects": np.array([None]),
    "text": np.array(["a"]),
    "subclass": np.arange(3).view(np.recarray),
    "specification": [np.arange(3), MPI.INT64_T],
    "bytes": b"abc",
    "None": None,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_arrays_are_those_of_a_buffer(name: str) -> None:
    array = PLAIN[name]
    found = plain(array, written=True)
    assert found is not None
    buffer = parse_recv(array)
    bytes_, load = buffer.source()
    assert load is None
    assert found[0] is buffer.item
    assert found[1].__array_interface__ == bytes_.__array_interface__


@pytest.mark.parametrize("name", OTHER)
def test_what_goes_the_long_way(name: str) -> None:
    assert plain(OTHER[name], written=False) is None


def test_what_may_not_be_written_to() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert plain(array, written=True) is None
    assert plain(array, written=False) is not None


def test_pairs() -> None:
    x, y = np.arange(4), np.arange(4)
    pair = plain_pair(x, y)
    assert pair is not None
    assert not pair[3]
    same = plain_pair(x, x)
    assert same is not None
    assert same[3]
    assert plain_pair(x, x.view(np.longlong)) is None  # equal dtypes, two types of MPI
    assert plain_pair(x, y.astype(float)) is None


@pytest.mark.parametrize("sides", [(0, 1), (1, 0), (0, 2), (3, 0)])
def test_overlaps_are_refused(sides: tuple[int, int], world: mpicoll.Comm) -> None:
    """Also where they share one item only."""
    memory = np.arange(8.0)
    first, last = sides
    send, recv = memory[first : first + 4], memory[last : last + 4]
    assert plain_pair(send, recv) is None
    with pytest.raises(MPI.Exception, match="overlap"):
        world.Allreduce(send, recv)
    apart = plain_pair(memory[:4], memory[4:])
    assert apart is not None
    assert memory.tolist() == list(range(8))

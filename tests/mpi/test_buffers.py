"""Buffer specifications: what mpi4py takes is taken, refused alike, and nothing else touched.

Every rank tests alone, with COMM_SELF where a datatype must be packed.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.runtime.buffers import Buffer, check_aliasing
from mpicoll.runtime.datatypes import describe
from mpicoll.runtime.specs import (
    parse_recv,
    parse_recv_v,
    parse_recv_w,
    parse_send,
    parse_send_v,
    parse_send_w,
)

CODES = "?bhilqBHILQefdgFDG"
EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Types:
    """Derived datatypes on doubles, freed at the end of a test."""

    def __init__(self) -> None:
        self.all: list[MPI.Datatype] = []

    def keep(self, datatype: MPI.Datatype, commit: bool = True) -> MPI.Datatype:
        self.all.append(datatype)
        return datatype.Commit() if commit else datatype

    def vector(self, count: int, block: int, stride: int) -> MPI.Datatype:
        return self.keep(MPI.DOUBLE.Create_vector(count, block, stride))

    def resized(self, lb: int, extent: int) -> MPI.Datatype:
        return self.keep(MPI.DOUBLE.Create_resized(lb, extent))


@pytest.fixture
def types() -> Iterator[Types]:
    made = Types()
    yield made
    for datatype in made.all:
        datatype.Free()


def doubles(count: int) -> Any:
    return np.arange(float(count))


def loaded(buffer: Buffer) -> Any:
    """Return the dense bytes to send."""
    source, load = buffer.source()
    if load is not None:
        load()
    return source


def values(buffer: Buffer, dtype: Any = np.float64) -> list[Any]:
    """Return what the dense bytes say."""
    found: list[Any] = loaded(buffer).view(dtype).tolist()
    return found


def fill(buffer: Buffer, number: float) -> None:
    """Receive as many doubles of one value as go in."""
    target, _, finish = buffer.target()
    target[:] = np.full(target.size // 8, float(number)).view(np.uint8)
    if finish is not None:
        finish()


# -- simple forms -------------------------------------------------------------------------

SIMPLE: dict[str, tuple[Any, list[float]]] = {
    "array": (doubles(6), [0, 1, 2, 3, 4, 5]),
    "array, datatype": ([doubles(6), MPI.DOUBLE], [0, 1, 2, 3, 4, 5]),
    "array, typecode": ([doubles(6), "d"], [0, 1, 2, 3, 4, 5]),
    "array, type string": ([doubles(6), "f8"], [0, 1, 2, 3, 4, 5]),
    "array, count": ([doubles(6), 2], [0, 1]),
    "array, count, datatype": ([doubles(6), 2, MPI.DOUBLE], [0, 1]),
    "array, NumPy count": ([doubles(6), np.int64(2), MPI.DOUBLE], [0, 1]),
    "array, (count, displ)": ([doubles(6), (2, 3)], [3, 4]),
    "array, [count, displ], datatype": ((doubles(6), [2, 3], MPI.DOUBLE), [3, 4]),
    "array, (None, displ), datatype": ([doubles(6), (None, 3), MPI.DOUBLE], [3, 4, 5]),
    "array, count, displ, datatype": ([doubles(6), 2, 3, MPI.DOUBLE], [3, 4]),
    "Fortran order": (np.asfortranarray(doubles(6).reshape(2, 3)), [0, 3, 1, 4, 2, 5]),
    "0-d": (np.array(7.0), [7]),
    "scalar": (np.float64(7), [7]),
    "empty": (doubles(0), []),
    "empty, strided": (np.zeros((0, 4))[:, ::2], []),
    "3-d": (doubles(6).reshape(1, 2, 3), [0, 1, 2, 3, 4, 5]),
    "subclass": (np.ma.array(doubles(2)), [0, 1]),
    "array.array": (array.array("d", [0, 1]), [0, 1]),
    "memoryview": (memoryview(doubles(2)), [0, 1]),
    "memoryview, Fortran order": (memoryview(np.ones((2, 3)).T), [1] * 6),
    "bytes, datatype": ([doubles(2).tobytes(), MPI.DOUBLE], [0, 1]),
    "bytearray, datatype": ([bytearray(doubles(2).tobytes()), MPI.DOUBLE], [0, 1]),
    "MPI.memory, datatype": ([MPI.memory.frombuffer(doubles(2)), MPI.DOUBLE], [0, 1]),
    "nothing": ([None, 0, MPI.DOUBLE], []),
    "foreign byte order, datatype": ([doubles(2).view(">f8"), MPI.DOUBLE], [0, 1]),
}


@pytest.mark.parametrize("form", SIMPLE)
def test_simple(form: str) -> None:
    spec, expected = SIMPLE[form]
    buffer = parse_send(spec)
    assert values(buffer) == expected
    assert buffer.counts == (len(expected),)
    assert buffer.block_bytes == (buffer.nbytes,)
    assert loaded(buffer).size == buffer.nbytes


class Wrapped:
    """An array that only DLPack shows."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.data.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


def test_dlpack() -> None:
    data = doubles(3)
    fill(parse_recv(Wrapped(data)), 5)
    assert data.tolist() == [5, 5, 5]


@pytest.mark.parametrize("code", CODES)
def test_dtypes_are_views(code: str) -> None:
    data = np.ones(5, code)
    buffer = parse_recv(data)
    assert buffer.item.dtype == data.dtype
    assert buffer.item.datatype == MPI._typedict[code]
    target, _, finish = buffer.target()
    assert finish is None
    assert np.shares_memory(target, data)
    assert target.size == data.nbytes


@pytest.mark.parametrize("name", EXTENSIONS)
def test_dtypes_that_mpi_lacks(name: str) -> None:
    data = np.ones((2, 3), getattr(ml_dtypes, name))
    buffer = parse_recv([data, (2, 1)])
    assert buffer.item.datatype is None
    assert buffer.item.dtype == data.dtype
    target, _, _ = buffer.target()
    target[:] = 0
    assert data.astype(float).ravel().tolist() == [1, 0, 0, 1, 1, 1]


def test_blocks() -> None:
    buffer = parse_recv(doubles(6), blocks=3)
    assert buffer.count == 2
    assert buffer.counts == (2, 2, 2)
    assert buffer.block_bytes == (16, 16, 16)
    assert values(parse_recv([doubles(9), (2, 1), MPI.DOUBLE], blocks=3)) == [1, 2, 3, 4, 5, 6]


def test_count_above_31_bits() -> None:
    count = 2**31 + 3
    # An address range that nobody touches.
    memory = MPI.memory.fromaddress(1 << 20, 8 * count)
    buffer = parse_send([memory, count, MPI.DOUBLE])
    assert buffer.counts == (count,)
    assert buffer.nbytes == 8 * count
    assert loaded(buffer).size == 8 * count


def test_read_only_send() -> None:
    data = doubles(3)
    data.flags.writeable = False
    assert not loaded(parse_send(data)).flags.writeable


# -- counts and displacements -------------------------------------------------------------

VECTOR: dict[str, tuple[Any, list[int], list[float]]] = {
    "even split with remainder": (doubles(8), [3, 3, 2], [0, 1, 2, 3, 4, 5, 6, 7]),
    "empty": (doubles(0), [0, 0, 0], []),
    "counts": ([doubles(8), [1, 0, 2]], [1, 0, 2], [0, 1, 2]),
    "counts, tuple is a pair": ([doubles(8), ([1, 0, 2], None)], [1, 0, 2], [0, 1, 2]),
    "NumPy counts": ([doubles(8), np.array([1, 0, 2])], [1, 0, 2], [0, 1, 2]),
    "one count": ([doubles(8), 2], [2, 2, 2], [0, 1, 2, 3, 4, 5]),
    "counts, datatype": ([doubles(8), [1, 0, 2], MPI.DOUBLE], [1, 0, 2], [0, 1, 2]),
    "datatype": ([doubles(4), MPI.DOUBLE], [2, 1, 1], [0, 1, 2, 3]),
    "gaps": ([doubles(8), ([1, 1, 2], [0, 3, 5])], [1, 1, 2], [0, 3, 5, 6]),
    "gaps, datatype": ([doubles(8), ([1, 1, 2], [0, 3, 5]), "d"], [1, 1, 2], [0, 3, 5, 6]),
    "out of order": ([doubles(8), [1, 1, 2], [5, 3, 0], "d"], [1, 1, 2], [5, 3, 0, 1]),
    "one displacement": ([doubles(8), (2, 3)], [2, 2, 2], [0, 1, 3, 4, 6, 7]),
    "dense from an offset": ([doubles(8), ([1, 0, 2], [3, 99, 4])], [1, 0, 2], [3, 4, 5]),
    "twice the same": ([doubles(8), ([2, 2, 0], [1, 1, 0])], [2, 2, 0], [1, 2, 1, 2]),
}


@pytest.mark.parametrize("form", VECTOR)
def test_vector(form: str) -> None:
    spec, counts, expected = VECTOR[form]
    buffer = parse_send_v(spec, 3)
    assert buffer.counts == tuple(counts)
    assert buffer.block_bytes == tuple(8 * count for count in counts)
    assert values(buffer) == expected


@pytest.mark.parametrize("displs", [[0, 3, 5], [5, 0, 2], [1, 2, 4], [7, 0, 1]])
def test_vector_receive_touches_its_blocks_only(displs: list[int]) -> None:
    data = doubles(8)
    counts = [1, 2, 1]
    buffer = parse_recv_v([data, (counts, displs)], 3)
    target, _, finish = buffer.target()
    target[:] = np.arange(100.0, 104.0).view(np.uint8)
    if finish is not None:
        finish()
    expected = list(range(8))
    arrived = iter(range(100, 104))
    for count, displ in zip(counts, displs, strict=True):
        expected[displ : displ + count] = [next(arrived) for _ in range(count)]
    assert data.tolist() == expected


def test_dense_blocks_are_a_view() -> None:
    data = doubles(8)
    target, _, finish = parse_recv_v([data, ([1, 0, 2], [3, 0, 4])], 3).target()
    assert finish is None
    assert np.shares_memory(target, data[3:6])


def test_w_forms(types: Types) -> None:
    data = doubles(12)
    every_other = types.vector(2, 1, 2)
    forms: list[Any] = [
        [data, [1, 2], [0, 32], [every_other, MPI.DOUBLE]],
        [data, ([1, 2], [0, 32]), (every_other, MPI.DOUBLE)],
    ]
    for spec in forms:
        buffer = parse_send_w(spec, 2)
        assert buffer.block_bytes == (16, 16)
        assert values(buffer) == [0, 2, 4, 5]
    assert values(parse_send_w([data, [every_other, MPI.DOUBLE]], 2)) == [0, 2, 0]
    fill(parse_recv_w(forms[0], 2), -1)
    assert data.tolist() == [-1, 1, -1, 3, -1, -1, 6, 7, 8, 9, 10, 11]


# -- derived datatypes --------------------------------------------------------------------


def test_vector_type(types: Types) -> None:
    data = doubles(12)
    columns = types.vector(3, 1, 4)
    assert values(parse_send([data, 1, columns])) == [0, 4, 8]
    fill(parse_recv([data, 1, columns]), -1)
    assert data.tolist() == [-1, 1, 2, 3, -1, 5, 6, 7, -1, 9, 10, 11]


def test_blocks_of_a_type_with_gaps(types: Types) -> None:
    data = doubles(12)
    spaced = types.resized(0, 16)
    buffer = parse_recv([data, 2, spaced], blocks=3)
    assert buffer.block_bytes == (16, 16, 16)
    assert values(buffer) == [0, 2, 4, 6, 8, 10]
    fill(buffer, -1)
    assert data[1::2].tolist() == [1, 3, 5, 7, 9, 11]
    assert data[::2].tolist() == [-1] * 6


def test_permuted_type_without_gaps_is_packed(types: Types) -> None:
    swapped = types.keep(MPI.DOUBLE.Create_indexed([1, 1], [1, 0]))
    assert swapped.size == swapped.extent
    data = doubles(4)
    assert values(parse_send([data, 2, swapped])) == [1, 0, 3, 2]
    target, _, finish = parse_recv([data, 2, swapped]).target()
    target[:] = np.arange(10.0, 14.0).view(np.uint8)
    assert finish is not None
    finish()
    assert data.tolist() == [11, 10, 13, 12]


@pytest.mark.parametrize("make", ["Dup", "row", "row of rows", "resized to itself"])
def test_types_in_order_are_views(types: Types, make: str) -> None:
    if make == "Dup":
        datatype = types.keep(MPI.DOUBLE.Dup())
    elif make == "resized to itself":
        datatype = types.resized(0, 8)
    else:
        datatype = types.keep(MPI.DOUBLE.Create_contiguous(2))
        if make == "row of rows":
            datatype = types.keep(datatype.Create_contiguous(2))
    data = doubles(8)
    assert np.shares_memory(loaded(parse_send([data, datatype])), data)


def test_negative_extent(types: Types) -> None:
    data = doubles(6)
    backwards = types.resized(0, -8)
    assert values(parse_send([data[:4], 0, backwards])) == []
    with pytest.raises(ValueError, match="cannot infer count"):
        parse_send([data, backwards])


def test_absolute_addresses(types: Types) -> None:
    data = doubles(6)
    address = MPI.Get_address(data)
    datatype = types.keep(MPI.DOUBLE.Create_hindexed([2, 1], [address + 8, address + 40]))
    assert values(parse_send([MPI.BOTTOM, 1, datatype])) == [1, 2, 5]
    fill(parse_recv([MPI.BOTTOM, 1, datatype]), -1)
    assert data.tolist() == [0, -1, -1, 3, 4, -1]


PAIRS = ["SHORT_INT", "INT_INT", "LONG_INT", "FLOAT_INT", "DOUBLE_INT", "LONG_DOUBLE_INT"]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_lose_their_gaps(name: str) -> None:
    datatype = getattr(MPI, name)
    data = np.full(3 * datatype.extent, 7, np.uint8)
    buffer = parse_recv([data, 3, datatype])
    assert buffer.nbytes == 3 * datatype.size
    target, _, finish = buffer.target()
    target[:] = 1
    if finish is not None:
        finish()
    assert int((data == 1).sum()) == 3 * datatype.size
    assert int((data == 7).sum()) == 3 * (datatype.extent - datatype.size)


def test_freed_handles_are_forgotten() -> None:
    for stride in range(2, 6):
        datatype = MPI.DOUBLE.Create_vector(2, 1, stride).Commit()
        assert values(parse_send([doubles(8), 1, datatype])) == [0, stride]
        datatype.Free()


# -- refused ------------------------------------------------------------------------------


def frozen() -> Any:
    data = doubles(4)
    data.flags.writeable = False
    return data


class Device:
    """Looks like an array on a GPU."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (2,), "typestr": "<f8", "data": (1 << 20, False), "version": 3}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, "expecting buffer"),
    "a number": (3, TypeError, "expecting buffer"),
    "a string": ("abc", TypeError, "expecting buffer"),
    "a device array": (Device(), TypeError, "device array"),
    "one item": ([doubles(4)], ValueError, "expecting 2 to 4 items"),
    "five items": ([doubles(4), 1, 2, 3, 4], ValueError, "expecting 2 to 4 items"),
    "strided": (doubles(8)[::2], BufferError, "contiguous"),
    "strided view": (memoryview(bytearray(8))[::2], BufferError, "contiguous"),
    "read-only": (frozen(), BufferError, "writable"),
    "bytes": (b"12345678", BufferError, "writable"),
    "scalar": (np.float64(1), BufferError, "writable"),
    "big-endian": (np.zeros(2, ">f8"), BufferError, "byte order"),
    "datetime": (np.zeros(2, "M8[s]"), BufferError, "dtype 'M'"),
    "structured": (np.zeros(2, "i4,f8"), KeyError, "cannot map"),
    "objects": (np.zeros(2, object), KeyError, "cannot map"),
    "unknown typecode": ([doubles(4), "zz"], KeyError, "cannot map 'zz'"),
    "not a datatype": ([doubles(4), 1, 3], KeyError, "cannot map 3"),
    "float count": ([doubles(4), 1.0, MPI.DOUBLE], TypeError, "integer"),
    "negative count": ([doubles(4), -1, MPI.DOUBLE], ValueError, "negative count -1"),
    "negative displacement": ([doubles(4), (1, -1)], ValueError, "negative displacement -1"),
    "displacement": ([doubles(4), (1, 5)], ValueError, "5 out of bounds, .* entries 4"),
    "nothing of one": ([None, 1, MPI.DOUBLE], ValueError, "buffer is None but count is 1"),
    "a remainder": ([bytearray(7), MPI.DOUBLE], ValueError, "length 7 is not a multiple"),
    "too small": ([doubles(4), 5, MPI.DOUBLE], ValueError, "has 32 bytes, .* 0 to 40"),
    "too small behind": ([doubles(4), (2, 3), MPI.DOUBLE], ValueError, "has 32 bytes"),
    "a view too small": ([doubles(9)[:4], 5, MPI.DOUBLE], ValueError, "has 32 bytes"),
    "null datatype": ([doubles(4), 1, MPI.DATATYPE_NULL], MPI.Exception, "(?i)datatype"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    spec, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        parse_recv(spec)


def test_refused_blocks() -> None:
    with pytest.raises(ValueError, match=r"entries 4 is not a multiple .* blocks 3"):
        parse_recv(doubles(4), blocks=3)
    with pytest.raises(ValueError, match="has 32 bytes"):
        parse_recv([doubles(4), 2, MPI.DOUBLE], blocks=3)


VECTOR_REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "negative count": ([doubles(4), [1, -1]], MPI.Exception, "negative count -1"),
    "too few counts": ([doubles(4), [1]], ValueError, "expecting 2 counts, got 1"),
    "too many displacements": ([doubles(4), ([1, 1], [0, 1, 2])], ValueError, "expecting 2 disp"),
    "float count": ([doubles(4), [1.0, 1]], TypeError, "integer"),
    "a list is no pair": ([doubles(4), [[1, 1], [0, 1]]], TypeError, "integer"),
    "too small": ([doubles(4), ([1, 2], [0, 3])], ValueError, "has 32 bytes"),
    "before the memory": ([doubles(4), ([1, 1], [-1, 0])], ValueError, "-8"),
    "a remainder": ([bytearray(7), MPI.DOUBLE], ValueError, "not a multiple"),
}


@pytest.mark.parametrize("what", VECTOR_REFUSED)
def test_vector_refused(what: str) -> None:
    spec, error, message = VECTOR_REFUSED[what]
    with pytest.raises(error, match=message) as caught:
        parse_recv_v(spec, 2)
    if isinstance(caught.value, MPI.Exception):
        assert caught.value.Get_error_class() == MPI.ERR_COUNT


W_REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "types missing": (lambda: [doubles(4), [MPI.DOUBLE]], ValueError, "expecting 2 datatypes"),
    "negative count": (
        lambda: [doubles(4), [1, -1], [0, 0], [MPI.DOUBLE] * 2],
        MPI.Exception,
        "negative count -1",
    ),
    "too small": (
        lambda: [doubles(4), [1, 1], [0, 32], [MPI.DOUBLE] * 2],
        ValueError,
        "has 32 bytes",
    ),
    "read-only": (lambda: [frozen(), [MPI.DOUBLE] * 2], BufferError, "writable"),
}


@pytest.mark.parametrize("what", W_REFUSED)
def test_w_refused(what: str) -> None:
    make, error, message = W_REFUSED[what]
    with pytest.raises(error, match=message):
        parse_recv_w(make(), 2)


# -- aliasing -----------------------------------------------------------------------------


def test_aliasing() -> None:
    data = doubles(8)
    assert check_aliasing(parse_send(data), parse_recv(data))
    assert not check_aliasing(parse_send(data[:4]), parse_recv(data[4:]))
    assert not check_aliasing(parse_send(data[:0]), parse_recv(data))
    assert check_aliasing(parse_send(data[2:4]), parse_recv(data, blocks=4), 1)
    with pytest.raises(MPI.Exception, match=r"0x.* to 0x.* overlap") as caught:
        check_aliasing(parse_send(data[:4]), parse_recv(data[2:6]))
    assert caught.value.Get_error_class() == MPI.ERR_BUFFER


def test_describe_keeps_predefined_only(types: Types) -> None:
    assert describe(MPI.DOUBLE) is describe(MPI.DOUBLE)
    datatype = types.vector(2, 1, 2)
    assert describe(datatype) is not describe(datatype)


# -- found wrong once ---------------------------------------------------------------------


def test_column_from_a_part_of_a_row(types: Types) -> None:
    matrix = doubles(12).reshape(3, 4)
    column = types.vector(3, 1, 4)
    assert values(parse_send([matrix[0, 2:], 1, column])) == [2, 6, 10]
    fill(parse_recv([matrix[0, 3:], 1, column]), -1)
    assert matrix[:, 3].tolist() == [-1] * 3
    with pytest.raises(ValueError, match="buffer too small"):
        parse_recv([matrix[1, 2:], 1, column])


def test_what_interleaves_does_not_overlap(types: Types) -> None:
    data = doubles(12)
    column = types.vector(3, 1, 4)
    assert not check_aliasing(parse_send([data, 1, column]), parse_recv([data[1:], 1, column]))
    assert not check_aliasing(
        parse_send_v([data, ([1, 1], [0, 4])], 2), parse_recv_v([data, ([1, 1], [2, 6])], 2)
    )
    with pytest.raises(MPI.Exception, match="overlap"):
        check_aliasing(parse_send([data, 1, column]), parse_recv(data[8:]))
    with pytest.raises(MPI.Exception, match="overlap"):
        check_aliasing(
            parse_send_v([data, ([1, 1], [0, 4])], 2), parse_recv_v([data, ([1, 1], [4, 6])], 2)
        )


def test_what_is_not_received_stays(types: Types) -> None:
    data = doubles(6)
    target, load, finish = parse_recv([data, 3, types.resized(0, 16)]).target(keep=True)
    assert load is not None
    load()
    target[:8] = np.array([-1.0]).view(np.uint8)
    assert finish is not None
    finish()
    assert data.tolist() == [-1, 1, 2, 3, 4, 5]


def test_longlong_is_not_long() -> None:
    assert parse_send(np.zeros(1, np.longlong)).item.datatype == MPI.LONG_LONG
    assert parse_send(np.zeros(1, "l")).item.datatype == MPI.LONG


def test_uncommitted_is_refused(types: Types) -> None:
    datatype = types.keep(MPI.DOUBLE.Create_vector(2, 1, 2), commit=False)
    with pytest.raises(MPI.Exception) as caught:
        parse_recv([doubles(4), 1, datatype])
    assert caught.value.Get_error_class() == MPI.ERR_TYPE


def test_small_differences_to_mpi4py(types: Types) -> None:
    assert parse_recv_v([doubles(4), np.array(1)], 2).counts == (1, 1)
    with pytest.raises(TypeError, match="got str"):
        parse_recv_w([doubles(4), ["d", "d"]], 2)
    with pytest.raises(KeyError, match="cannot map None"):
        parse_recv([MPI.BOTTOM, 1])
    with pytest.raises(ValueError, match="cannot handle displacement"):
        parse_recv([doubles(4), (1, 1), types.resized(0, 0)])

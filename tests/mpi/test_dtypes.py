"""Operators bound to item types, held to the MPI's own `Op.Reduce_local`.

Every rank tests alone. What the MPI refuses is refused here, with its error class.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.runtime.datatypes import Item, describe
from mpicoll.runtime.operators import AVG, Reducer, reducer
from mpicoll.runtime.specs import parse_send


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    """
    BYTE PACKED CHAR WCHAR SIGNED_CHAR SHORT INT LONG LONG_LONG UNSIGNED_CHAR UNSIGNED_SHORT
    UNSIGNED UNSIGNED_LONG UNSIGNED_LONG_LONG FLOAT DOUBLE LONG_DOUBLE C_BOOL INT8_T INT16_T
    INT32_T INT64_T UINT8_T UINT16_T UINT32_T UINT64_T C_COMPLEX C_FLOAT_COMPLEX
    C_DOUBLE_COMPLEX C_LONG_DOUBLE_COMPLEX CXX_BOOL CXX_FLOAT_COMPLEX CXX_DOUBLE_COMPLEX
    CXX_LONG_DOUBLE_COMPLEX SHORT_INT INT_INT LONG_INT FLOAT_INT DOUBLE_INT LONG_DOUBLE_INT
    CHARACTER LOGICAL INTEGER REAL DOUBLE_PRECISION COMPLEX DOUBLE_COMPLEX LOGICAL1 LOGICAL2
    LOGICAL4 LOGICAL8 INTEGER1 INTEGER2 INTEGER4 INTEGER8 REAL4 REAL8 REAL16 COMPLEX8
    COMPLEX16 COMPLEX32 AINT COUNT OFFSET FLOAT16_T
    """
)
OPERATORS = words(
    "MAX MIN SUM PROD LAND BAND LOR BOR LXOR BXOR MAXLOC MINLOC REPLACE NO_OP OP_NULL"
)
LOGIC = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
PAIRS = {
    "SHORT_INT": "i2",
    "INT_INT": "i4",
    "LONG_INT": "l",
    "FLOAT_INT": "f4",
    "DOUBLE_INT": "f8",
    "LONG_DOUBLE_INT": "g",
}
COUNT = 7
FILL = 99


def item_of(dtype: Any) -> Item:
    return parse_send(np.zeros(1, dtype)).item


def dense(values: Any, dtype: Any) -> Any:
    """Return values as dense bytes."""
    return np.array(values).astype(dtype).view(np.uint8)


def folded(reduction: Reducer, operands: Sequence[Any]) -> Any:
    target = np.full_like(operands[0], FILL)
    reduction.reduce(target, operands)
    return target


def same(result: Any, expected: Any, dtype: Any) -> bool:
    """Compare values, not bytes, where a long double has padding that is nobody's."""
    if dtype is not None and any(code in str(np.dtype(dtype)) for code in ("float128", "256")):
        return bool(np.array_equal(result.view(dtype), expected.view(dtype)))
    return bool(np.array_equal(result, expected))


def datatypes() -> list[Any]:
    found = [getattr(MPI, name, MPI.DATATYPE_NULL) for name in NAMES]
    return [
        pytest.param(datatype, id=name)
        for name, datatype in zip(NAMES, found, strict=True)
        if datatype != MPI.DATATYPE_NULL and datatype.Get_size()
    ]


def operands_for(datatype: MPI.Datatype, number: int) -> Any:
    """Return small values, packed, that any type has; the long ones with clean padding."""
    dtype = describe(datatype).dtype
    codes = {name: code for name, code in PAIRS.items() if getattr(MPI, name) == datatype}
    values = (np.arange(COUNT) * (3 + number) + number) % 5
    if codes:
        (code,) = codes.values()
        packed = np.zeros(COUNT, [("value", code), ("place", "i4")])
        packed["value"], packed["place"] = values, (np.arange(COUNT) + number) % 3
        return packed.view(np.uint8)
    if dtype is None:
        # Logical, character and quad types: every item all zero or the same small number.
        raw = np.zeros((COUNT, datatype.Get_size()), np.uint8)
        raw[:, 0] = values % 2
        return raw.ravel()
    if dtype.kind == "b":
        values = values % 2
    return dense(values, dtype)


def native(op: MPI.Op, datatype: MPI.Datatype, left: Any, right: Any) -> Any:
    """Reduce with the MPI, in memory laid out as it wants."""
    laid_out = [np.zeros(COUNT * datatype.Get_extent()[1] + 64, np.uint8) for _ in range(2)]
    for packed, memory in zip((left, right), laid_out, strict=True):
        datatype.Unpack(packed, 0, memory[: COUNT * datatype.Get_extent()[1]], MPI.COMM_SELF)
    op.Reduce_local([laid_out[0], COUNT, datatype], [laid_out[1], COUNT, datatype])
    result = np.empty_like(left)
    datatype.Pack(laid_out[1][: COUNT * datatype.Get_extent()[1]], result, 0, MPI.COMM_SELF)
    return result


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("datatype", datatypes())
def test_every_type_and_operator(datatype: MPI.Datatype, name: str) -> None:
    op = getattr(MPI, name)
    left, right = operands_for(datatype, 0), operands_for(datatype, 1)
    refused = 0
    try:
        expected = native(op, datatype, left, right)
    except MPI.Exception as error:
        refused = error.Get_error_class()
    if refused:
        with pytest.raises(MPI.Exception, match=datatype.Get_name()) as caught:
            reducer(op, describe(datatype))
        assert caught.value.Get_error_class() == refused
        return
    reduction = reducer(op, describe(datatype))
    assert reduction.item_bytes == datatype.Get_size()
    assert reduction.commutative
    result = folded(reduction, (left, right))
    kinds: Any = describe(datatype).dtype
    if kinds is not None and kinds.kind == "f" and name in LOGIC:
        # Intel MPI takes it, beyond the standard, and returns an operand.
        expected = dense(LOGIC[name](left.view(kinds), right.view(kinds)), kinds)
    if datatype == MPI.LONG_DOUBLE_INT:
        kinds = [("value", "g"), ("place", "i4")]
    assert same(result, expected, kinds)


@pytest.mark.parametrize("size", [1, 3, 1000, 5000])
@pytest.mark.parametrize("where", ["apart", "left", "right"])
@pytest.mark.parametrize("dtype", ["i4", "f4", "f2", "c8", ml_dtypes.bfloat16])
def test_target_may_be_one_of_two(dtype: Any, where: str, size: int) -> None:
    left = dense(np.arange(size) % 11, dtype)
    right = dense(np.arange(size) % 7, dtype)
    target = {"apart": np.full_like(left, FILL), "left": left, "right": right}[where]
    kept = {"apart": [left, right], "left": [right], "right": [left]}[where]
    before = [one.copy() for one in kept]
    reducer(MPI.SUM, item_of(dtype)).reduce(target, [left, right])
    expected = dense(np.arange(size) % 11 + np.arange(size) % 7, dtype)
    assert np.array_equal(target, expected)
    assert all(np.array_equal(one, old) for one, old in zip(kept, before, strict=True))


@pytest.mark.parametrize("number", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "g", "c16", ml_dtypes.bfloat16])
def test_folds(dtype: Any, number: int) -> None:
    if dtype == "?":
        operands = [dense(np.arange(9) % (k + 2) == 0, dtype) for k in range(number)]
        expected = np.all([one.view(bool) for one in operands], axis=0)
        result = folded(reducer(MPI.LAND, item_of(dtype)), operands)
    else:
        operands = [dense(np.arange(9) % 4 + k, dtype) for k in range(number)]
        expected = number * (np.arange(9) % 4) + sum(range(number))
        result = folded(reducer(MPI.SUM, item_of(dtype)), operands)
    assert same(result, dense(expected, dtype), dtype)


def test_empty() -> None:
    nothing = np.empty(0, np.uint8)
    for datatype in (MPI.DOUBLE, MPI.DOUBLE_INT, MPI.CHAR):
        op = MPI.MINLOC if datatype == MPI.DOUBLE_INT else MPI.MAX
        reducer(op, describe(datatype)).reduce(nothing, [nothing, nothing, nothing])


def test_unaligned() -> None:
    memory = np.zeros(100, np.uint8)
    left, right, target = memory[1:25], memory[30:54], memory[61:85]
    left[:], right[:] = dense([1, 2, 3], "f8"), dense([10, 20, 30], "f8")
    for operands in ([left, right], [left, right, right]):
        reducer(MPI.SUM, item_of("f8")).reduce(target, operands)
    assert target.view("f8").tolist() == [21, 42, 63]


def test_integers_wrap_and_floats_overflow_in_silence() -> None:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        assert folded(reducer(MPI.SUM, item_of("i1")), [dense([127], "i1")] * 2).view("i1") == -2
        for dtype, big in (("f2", 6e4), ("f4", 3e38), ("f8", 1e308)):
            for number in (2, 3):
                for size in (1, 5000):
                    operands = [dense([big] * size, dtype)] * number
                    result = folded(reducer(MPI.SUM, item_of(dtype)), operands).view(dtype)
                    assert np.isinf(result).all()


def test_maximum_keeps_nan() -> None:
    for size in (1, 5000):
        left, right = np.full(size, np.nan), np.ones(size)
        for operands in ([left, right], [right, left]):
            views = [one.view(np.uint8) for one in operands]
            assert np.isnan(folded(reducer(MPI.MAX, item_of("f8")), views).view("f8")).all()


# -- narrow floats ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
def test_wide_folds_round_once(dtype: Any) -> None:
    reduction = reducer(MPI.SUM, item_of(dtype))
    assert reduction.wide
    # Half of the last place, three times: lost one by one, seen in the sum of all.
    ulp = 2.0**-10 if dtype == "f2" else 2.0**-7
    for size in (5, 40000):
        one, half = dense([1.0] * size, dtype), dense([ulp / 2] * size, dtype)
        result = folded(reduction, [one, half, half, half]).view(dtype)
        assert set(result.astype(float).tolist()) == {1 + 2 * ulp}


def test_wide_is_said_of_narrow_sums_only() -> None:
    assert reducer(MPI.PROD, item_of("f2")).wide
    assert not reducer(MPI.MAX, item_of("f2")).wide
    assert not reducer(MPI.SUM, item_of("f4")).wide
    assert not reducer(MPI.SUM, item_of("i2")).wide
    assert reducer(AVG, item_of("f2")).wide


@pytest.mark.parametrize("name", ["SUM", "PROD"])
def test_two_narrow_operands_round_like_numpy(name: str) -> None:
    """All pairs of 256 bit patterns; whatever loop is taken, the bits are those of NumPy."""
    patterns = np.arange(0, 1 << 16, 257).astype(np.uint16).view("f2")
    left, right = (grid.ravel() for grid in np.meshgrid(patterns, patterns))
    ufunc = np.add if name == "SUM" else np.multiply
    with np.errstate(all="ignore"):
        expected = ufunc(left, right)
    reduction = reducer(getattr(MPI, name), item_of("f2"))
    for size in (32, left.size):
        result = folded(reduction, [left[:size].view("u1"), right[:size].view("u1")]).view("f2")
        same = result.view("u2") == expected[:size].view("u2")
        assert np.all(same | (np.isnan(result) & np.isnan(expected[:size])))


def test_extension_types() -> None:
    item = item_of(ml_dtypes.bfloat16)
    for name, expected in (("SUM", 5), ("PROD", 6), ("MAX", 3), ("MIN", 2)):
        operands = [dense([2], ml_dtypes.bfloat16), dense([3], ml_dtypes.bfloat16)]
        result = folded(reducer(getattr(MPI, name), item), operands)
        assert result.view(ml_dtypes.bfloat16).astype(float) == expected
    for name in ("LAND", "BXOR", "MAXLOC", "REPLACE"):
        with pytest.raises(MPI.Exception, match="bfloat16") as caught:
            reducer(getattr(MPI, name), item)
        assert caught.value.Get_error_class() == MPI.ERR_OP


@pytest.mark.parametrize("name", [one for one in dir(ml_dtypes) if one.startswith("float8_")])
def test_floats_of_8_bits(name: str) -> None:
    dtype = getattr(ml_dtypes, name)
    for op, expected in ((MPI.SUM, 4), (MPI.PROD, 4), (MPI.MAX, 2), (MPI.MIN, 1), (AVG, 1)):
        reduction = reducer(op, item_of(dtype), 3)
        operands = [dense([one] * 37, dtype) for one in (1, 2, 1 if op == MPI.SUM else 2)]
        if op == AVG:
            operands = [operands[0]] * 3
        result = folded(reduction, operands)
        assert (result.view(dtype).astype(float) == expected).all(), op


# -- user operators -----------------------------------------------------------------------


def digits(a: Any, b: Any, datatype: MPI.Datatype) -> None:
    """Write numbers one behind the other: 12 op 3 is 123. Does not commute."""
    left, right = np.frombuffer(a, "i8"), np.frombuffer(b, "i8")
    length = np.ceil(np.log10(right + 1)).astype(int)
    right[:] = left * 10**length + right


@pytest.mark.parametrize("where", ["apart", "left", "right"])
def test_user_operator_keeps_the_order(where: str) -> None:
    op = MPI.Op.Create(digits, commute=False)
    try:
        reduction = reducer(op, item_of("i8"))
        assert not reduction.commutative
        left, right = dense([1, 2], "i8"), dense([34, 5], "i8")
        target = {"apart": np.full_like(left, FILL), "left": left, "right": right}[where]
        reduction.reduce(target, [left, right])
        assert target.view("i8").tolist() == [134, 25]
        for number in (3, 4, 5):
            operands = [dense([k, k + 1], "i8") for k in range(1, number + 1)]
            before = [one.copy() for one in operands]
            result = folded(reduction, operands).view("i8").tolist()
            expected = ["".join(str(k + i) for k in range(1, number + 1)) for i in (0, 1)]
            assert result == [int(text) for text in expected]
            assert all(map(np.array_equal, operands, before))
    finally:
        op.Free()


def test_user_operator_on_types_with_gaps() -> None:
    seen: list[tuple[int, MPI.Datatype]] = []

    def add(a: Any, b: Any, datatype: MPI.Datatype) -> None:
        seen.append((len(b), MPI.Datatype(datatype)))
        left, right = np.frombuffer(a, "f8"), np.frombuffer(b, "f8")
        right[1::3] += left[1::3]

    datatype = MPI.DOUBLE.Create_subarray([3], [1], [1]).Commit()
    op = MPI.Op.Create(add, commute=True)
    try:
        reduction = reducer(op, describe(datatype))
        assert reduction.item_bytes == 8
        operands = [dense([k, 10 * k], "f8") for k in range(1, 4)]
        assert folded(reduction, operands).view("f8").tolist() == [6, 60]
        assert all(size == 2 * 24 and one == datatype for size, one in seen)
    finally:
        op.Free()
        datatype.Free()


def test_predefined_operator_on_derived_type() -> None:
    datatype = MPI.DOUBLE.Create_contiguous(2).Commit()
    try:
        with pytest.raises(MPI.Exception) as caught:
            reducer(MPI.SUM, describe(datatype))
        assert caught.value.Get_error_class() == MPI.ERR_OP
    finally:
        datatype.Free()


def test_not_an_operator() -> None:
    with pytest.raises(TypeError, match="got NoneType"):
        reducer(None, item_of("f8"))  # type: ignore[arg-type]


# -- average ------------------------------------------------------------------------------


def averaged(dtype: Any, values: Any, size: int) -> Any:
    reduction = reducer(AVG, item_of(dtype))
    assert reduction.finish is not None
    result = dense(values, dtype)
    reduction.finish(result, size)
    return result.view(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "g", "c8", "c16"])
def test_average(dtype: str) -> None:
    assert np.array_equal(averaged(dtype, [3, -6, 9], 3), np.array([1, -2, 3], dtype))


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8"])
def test_average_truncates_towards_zero(dtype: str) -> None:
    assert averaged(dtype, [7, -7, 6, -6, -1], 2).tolist() == [3, -3, 3, -3, 0]
    assert averaged("u1", [7, 255], 2).tolist() == [3, 127]


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
def test_average_of_narrow_floats_rounds_once(dtype: Any) -> None:
    values = np.linspace(1, 100, 50).astype(dtype)
    expected = (values.astype("f4") / np.float32(3)).astype(dtype)
    assert np.array_equal(averaged(dtype, values, 3).view("u2"), expected.view("u2"))


@pytest.mark.parametrize(
    "datatype", [MPI.C_BOOL, MPI.DOUBLE_INT, MPI.CHAR], ids=MPI.Datatype.Get_name
)
def test_average_refused(datatype: MPI.Datatype) -> None:
    with pytest.raises(MPI.Exception, match=r"AVG|SUM") as caught:
        reducer(AVG, describe(datatype))
    assert caught.value.Get_error_class() == MPI.ERR_OP


def test_average_says_its_name() -> None:
    assert repr(AVG) == "mpicoll.AVG"
    assert reducer(MPI.SUM, item_of("f8")).finish is None


def test_average_over_more_ranks_than_the_type_counts() -> None:
    assert averaged("i1", [127, -128, 0], 128).tolist() == [0, -1, 0]
    assert averaged("i1", [127, -128, 0], 200).tolist() == [0, 0, 0]
    assert averaged("u1", [255, 0], 300).tolist() == [0, 0]


def test_average_of_complex_numbers_is_that_of_their_parts() -> None:
    values = (np.arange(1, 101) - 1j * np.arange(100)).astype("c8")
    parts = values.view("f4") / np.float32(3)
    assert np.array_equal(averaged("c8", values, 3).view("f4"), parts)
    result = averaged("c8", [complex(np.inf, 1)], 2)
    assert np.array_equal(result, np.array([complex(np.inf, 0.5)], "c8"))


def test_average_is_silent() -> None:
    with np.errstate(all="raise"):
        assert averaged("f4", [2e-38], 7)[0] > 0  # subnormal

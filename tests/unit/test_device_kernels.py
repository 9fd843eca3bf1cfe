"""The device's folds, compiled for the host, have the bits of the host's own loops."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from skips import compiler

from mpicoll import kernels
from mpicoll.runtime import device_kernels as device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = [np.dtype(np.float16), BFLOAT16]
INTEGERS = [np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
BYTES = [
    np.dtype(getattr(ml_dtypes, name)) for name in dir(ml_dtypes) if name.startswith("float8_")
]
ARITHMETIC, LOGIC = ("SUM", "PROD", "MAX", "MIN"), ("LAND", "LOR", "LXOR")
#: What the tables of the docs say.
FOLDED = {
    *itertools.product((*ARITHMETIC, *LOGIC, "BAND", "BOR", "BXOR"), INTEGERS),
    *itertools.product(ARITHMETIC, FLOATS + HALVES + BYTES),
    *itertools.product(("SUM", "PROD"), COMPLEX),
    # Of the extension types, the host takes logic of what NumPy calls a float.
    *itertools.product(LOGIC, [np.dtype(code) for code in "?efd"]),
    *itertools.product(LOGIC, [np.dtype(ml_dtypes.float8_e5m2)]),
}

LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("kernels")
    number = itertools.count()
    command = compiler()
    if not command:
        pytest.skip("no C compiler")

    def built(source: str) -> Any:
        path: Path = folder / f"{next(number)}.c"
        path.write_text(source)
        library = path.with_suffix(".so")
        flags = ["-O0", "-std=c99", "-Wall", "-Werror", "-Wno-parentheses", "-ffp-contract=off"]
        flags += ["-Wno-unused-function", "-shared", "-fPIC"]
        subprocess.run([command, *flags, "-o", library, path], check=True, timeout=120)
        return ctypes.CDLL(str(library))

    return built


def run_fold(library: Any, dtype: Any, target: Any, operands: Sequence[Any]) -> None:
    at = [ctypes.c_void_p(one.ctypes.data) for one in (target, *operands)]
    library.fold(*at, ctypes.c_ulonglong(target.nbytes // device.unit(dtype)))


def values(dtype: Any, count: int, rng: np.random.Generator) -> Any:
    """Return any bits, small values and special ones."""
    size = dtype.itemsize
    wild = rng.integers(0, 256, count * size, np.uint8).view(dtype)
    if dtype.kind in "iu":
        return np.where(rng.integers(0, 2, count) == 0, rng.integers(0, 3, count), wild).astype(
            dtype
        )
    real = np.dtype(dtype.char.lower()) if dtype.kind == "c" else dtype
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.5], np.float32).astype(real)
    parts = wild.view(real)
    if not on_x86():
        return rng.uniform(-2, 2, parts.size).astype(real).view(dtype)
    few = special[rng.integers(0, special.size, parts.size)]
    return np.where(rng.integers(0, 2, parts.size) == 0, few, parts).astype(real).view(dtype)


def on_x86() -> bool:
    """Whether NumPy's loops settle signs of zeros and NaNs as the kernels do."""
    return platform.machine().lower() in ("x86_64", "amd64")


def same(one: Any, other: Any) -> bool:
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def reals(array: Any) -> Any:
    """Return complex numbers as their parts, others as they are."""
    return array.view(array.dtype.char.lower()) if array.dtype.kind == "c" else array


def chained(name: str, operands: list[Any]) -> tuple[Any, Any]:
    """Return what the loops of the host make of the operands, and where NaNs met.

    Which of two NaNs a sum or a product keeps is not settled: it differs between versions of
    NumPy, and in some with the place in the array.
    """
    total = operands[0]
    met = np.zeros(reals(total).shape, bool)
    with np.errstate(all="ignore"):
        for operand in operands[1:]:
            if name in ("SUM", "PROD") and operand.dtype.kind in "fc":
                met |= np.isnan(reals(total)) & np.isnan(reals(operand))
            total = LOOPS[name](total, operand).astype(operand.dtype)
    return total, met


def same_but(one: Any, other: Any, met: Any) -> bool:
    """Whether the bits are the same, and where NaNs met both are NaN."""
    one, other = reals(one), reals(other)
    return same(one[~met], other[~met]) and bool(np.isnan(one[met]).all())


def test_each_operator_of_each_type_is_there() -> None:
    types = [*INTEGERS, *FLOATS, *HALVES, *COMPLEX, *BYTES, np.dtype(np.bool_)]
    found = {pair for pair in itertools.product(LOOPS, types) if device.supported(*pair)}
    assert found == FOLDED


def cases() -> list[Any]:
    own = {
        *itertools.product(ARITHMETIC, HALVES + BYTES),
        *itertools.product(("PROD",), COMPLEX),
        *itertools.product(LOGIC, BYTES),
    }
    return [
        pytest.param(*pair, id=f"{pair[0]} {pair[1]}") for pair in sorted(FOLDED - own, key=str)
    ]


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_fold_has_the_bits_of_numpy(name: str, dtype: Any, build: Callable[[str], Any]) -> None:
    rng = np.random.default_rng(1)
    for count in (2, 5):
        library = build(device.fold_source(name, dtype, count))
        for items, shift in ((1, 0), (37, 0), (64, 0), (37, 1)):
            operands = [values(dtype, items + shift, rng)[shift:] for _ in range(count)]
            expected, met = chained(name, operands)
            target = operands[1].copy()
            run_fold(library, dtype, target, operands)
            assert same_but(target, expected, met)
            run_fold(library, dtype, operands[1], operands)
            assert same_but(operands[1], expected, met)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_product_has_the_bits_of_its_parts(
    dtype: Any, count: int, build: Callable[[str], Any]
) -> None:
    """Any with any of the numbers whose parts are special ones, and any bits."""
    real = np.dtype(dtype.char.lower())
    info = np.finfo(real)
    few = [0, np.inf, np.nan, 1, 1 / 3, 0.7, info.max, info.tiny, info.smallest_subnormal]
    parts = np.array([*few, *np.negative(few)], real)
    numbers = np.stack([np.repeat(parts, parts.size), np.tile(parts, parts.size)], axis=1)
    left, right = np.repeat(numbers, len(numbers), axis=0), np.tile(numbers, (len(numbers), 1))
    rng = np.random.default_rng(7)
    operands = [
        np.concatenate([one, rng.integers(0, 256, one.nbytes, np.uint8).view(real).reshape(-1, 2)])
        for one in (left, right, rng.permutation(right))
    ][:count]
    expected = operands[0]
    with np.errstate(all="ignore"):
        for operand in operands[1:]:
            (a, b), (c, d) = expected.T, operand.T
            expected = np.stack([a * c - b * d, a * d + b * c], axis=1)
    expected[np.isnan(expected)] = np.nan
    library = build(device.fold_source("PROD", dtype, count))
    target = np.zeros_like(expected)
    for low, high in ((0, len(target)), (1, len(target)), (0, 1)):  # packs, none, too few
        run_fold(library, dtype, target[low:high], [one[low:high] for one in operands])
        assert same(target[low:high], expected[low:high])
        target[:] = 0
    run_fold(library, dtype, operands[1], operands)
    assert same(operands[1], expected)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", [*ARITHMETIC, *LOGIC])
def test_fold_of_bytes_has_the_bits_of_ml_dtypes(
    name: str, dtype: Any, build: Callable[[str], Any]
) -> None:
    if (name, dtype) not in FOLDED:
        assert not device.supported(name, dtype)
        return
    every = np.arange(256, dtype=np.uint8)
    pairs = [np.repeat(every, 256), np.tile(every, 256)]
    rng = np.random.default_rng(8)
    for count, mean_of in ((2, 0), (5, 0), (3, 3)):
        if mean_of and name != "SUM":
            continue
        operands = [*pairs, *(rng.permutation(pairs[0]) for _ in range(count - 2))]
        given = [one.view(dtype) for one in operands]
        if name in ("SUM", "PROD"):
            given = [one.astype(np.float32) for one in given]
        expected, met = chained(name, given)
        with np.errstate(all="ignore"):
            if mean_of:
                expected /= np.float32(mean_of)
            expected = expected.astype(dtype)
        library = build(device.fold_source(name, dtype, count, mean_of))
        for low in (0, 1):  # by packs, one by one
            target = np.empty_like(operands[0])
            run_fold(library, dtype, target[low:], [one[low:] for one in operands])
            # The sign of a NaN that comes of other than NaN is x86's.
            free = met[low:] | (np.isnan(expected[low:]) & (not on_x86()))
            assert same_but(target[low:].view(dtype), expected[low:], free)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bytes_are_rounded_as_by_ml_dtypes(dtype: Any, build: Callable[[str], Any]) -> None:
    """At all values, all that lie midway between two, next to both, and wherever chance has it."""
    library = build(
        device.fold_source("SUM", dtype, 2)
        + "\nvoid rounded(u1 *target, const f4 *source, u8 count) {"
        + "\n    for (u8 i = 0; i < count; i++) target[i] = narrow(source[i]);\n}\n"
    )
    known = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    known = np.unique(known[np.isfinite(known)])
    places = np.concatenate([known, (known[1:] + known[:-1]) / 2, [1e-45, np.inf]])
    with np.errstate(all="ignore"):
        bits = np.concatenate([places, -places]).astype(np.float32).view(np.uint32)
    bits = np.concatenate(
        [
            *(bits + np.uint32(step) for step in (0, 1, 2, (1 << 32) - 1)),
            np.arange(1 << 16, dtype=np.uint32) << 16,
            np.random.default_rng(9).integers(0, 1 << 32, 1 << 20, np.uint32),
        ]
    )
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(dtype).view(np.uint8)
    target = np.empty_like(expected)
    at = [ctypes.c_void_p(one.ctypes.data) for one in (target, bits)]
    library.rounded(*at, ctypes.c_ulonglong(target.size))
    assert same(target, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["SUM", "PROD", "MAX", "MIN"])
def test_fold_of_halves_has_the_bits_of_the_host_kernels(
    name: str, dtype: Any, build: Callable[[str], Any]
) -> None:
    half = kernels.half(dtype)
    assert half is not None
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(2)
    for count in (2, 3, 7):
        library = build(device.fold_source(name, dtype, count))
        operands = [every, *(rng.permutation(every) for _ in range(count - 1))]
        expected, target = np.empty_like(every), np.empty_like(every)
        half.reduce(name, expected.view(np.uint8), [one.view(np.uint8) for one in operands])
        run_fold(library, dtype, target, operands)
        assert same(target, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mean_of_halves_is_divided_before_it_is_rounded(
    dtype: Any, build: Callable[[str], Any]
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    operands = [every.view(dtype), np.random.default_rng(3).permutation(every).view(dtype)]
    with np.errstate(all="ignore"):
        total = operands[0].astype(np.float32) + operands[1].astype(np.float32)
        expected = (total / np.float32(2)).astype(dtype)
    target = np.empty_like(expected)
    run_fold(build(device.fold_source("SUM", dtype, 2, 2)), dtype, target, operands)
    number = ~np.isnan(expected)
    assert same(target[number], expected[number])
    assert np.isnan(target[~number]).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logic_of_halves(dtype: Any, build: Callable[[str], Any]) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    operands = [every, np.random.default_rng(5).permutation(every)]
    zeros = np.array([0.0, -0.0, np.nan, 1.0]).astype(dtype)
    operands = [
        np.concatenate(both)
        for both in zip(operands, (np.repeat(zeros, 4), np.tile(zeros, 4)), strict=True)
    ]
    for name in LOGIC:
        if (name, dtype) not in FOLDED:
            assert not device.supported(name, dtype)
            continue
        expected = LOOPS[name](*operands).astype(dtype)
        target = np.empty_like(expected)
        run_fold(build(device.fold_source(name, dtype, 2)), dtype, target, operands)
        assert same(target, expected)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *HALVES, *BYTES, *COMPLEX], ids=str)
def test_division(dtype: Any, build: Callable[[str], Any]) -> None:
    given = values(dtype, 97, np.random.default_rng(4))
    library = build(device.divide_source(dtype))
    for size in (1, 3, 200):
        target = given.copy()
        library.divide(
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_ulonglong(target.nbytes // device.unit(dtype)),
            ctypes.c_longlong(size),
        )
        with np.errstate(all="ignore"):
            if dtype.kind in "iu":
                expected = np.array([_truncated(int(one), size) for one in given], dtype)
            elif dtype.kind == "c":
                parts = given.view(dtype.char.lower())
                expected = (parts / parts.dtype.type(size)).view(dtype)
            elif dtype.itemsize == 1:
                expected = (given.astype(np.float32) / np.float32(size)).astype(dtype)
            elif dtype.itemsize == 2:
                expected = (given.astype(np.float32) / np.float32(size)).astype(dtype)
                number = ~np.isnan(expected)
                target, expected = target[number], expected[number]
            else:
                expected = given / dtype.type(size)
        assert same(target, expected)


def _truncated(value: int, size: int) -> int:
    return abs(value) // size * (1 if value >= 0 else -1)


def test_gather_and_scatter_leave_gaps_alone(build: Callable[[str], Any]) -> None:
    from mpicoll.runtime.backend import NOWHERE

    library = build(device.move_source(NOWHERE))
    source = np.arange(48, dtype=np.uint8)
    positions = np.array([4, 0, NOWHERE, -2], np.int64)
    dense = np.full(12, 99, np.uint8)
    last = (
        ctypes.c_void_p(positions.ctypes.data),
        ctypes.c_longlong(12),
        ctypes.c_ulonglong(4),
        ctypes.c_ulonglong(3),
    )
    begin = ctypes.c_void_p(source.ctypes.data + 4)
    library.gather(ctypes.c_void_p(dense.ctypes.data), begin, *last)
    assert dense.tolist() == [8, 4, 0, 2, 20, 16, 0, 14, 32, 28, 0, 26]
    target = np.full(48, 99, np.uint8)
    library.scatter(
        ctypes.c_void_p(target.ctypes.data + 4), ctypes.c_void_p(dense.ctypes.data), *last
    )
    written = [2, 4, 8, 14, 16, 20, 26, 28, 32]
    assert np.flatnonzero(target != 99).tolist() == written
    assert target[written].tolist() == written


def test_what_has_no_kernel() -> None:
    for name, dtype in (
        ("MAX", np.dtype(np.complex64)),
        ("LAND", np.dtype(np.complex64)),
        ("SUM", np.dtype(np.longdouble)),
        ("PROD", np.dtype(np.clongdouble)),
        ("LAND", np.dtype(np.longdouble)),
        ("BAND", np.dtype(np.float64)),
        ("LAND", BFLOAT16),
        ("SUM", np.dtype(np.bool_)),
        ("LAND", np.dtype(ml_dtypes.float8_e4m3fn)),
        ("SUM", np.dtype(ml_dtypes.float6_e2m3fn)),
        ("SUM", np.dtype(ml_dtypes.int4)),
        ("MINLOC", np.dtype(np.int32)),
    ):
        assert not device.supported(name, dtype), (name, dtype)

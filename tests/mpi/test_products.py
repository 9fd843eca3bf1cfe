"""Products of complex numbers: their bits are those of the parts, whoever multiplies.

Every rank tests alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.runtime.operators import reducer
from mpicoll.runtime.products import PIECE, ProductReducer
from mpicoll.runtime.specs import parse_send

DTYPES = ["c8", "c16"]


def textbook(operands: Sequence[Any]) -> Any:
    """Return the product, its parts rounded after each step, and NaN the quiet one."""
    result = operands[0]
    with np.errstate(all="ignore"):
        for operand in operands[1:]:
            product = np.empty_like(result)
            a, b, c, d = result.real, result.imag, operand.real, operand.imag
            product.real, product.imag = a * c - b * d, a * d + b * c
            result = product
    parts = result.view(result.dtype.char.lower())
    parts[np.isnan(parts)] = np.nan
    return result


def fused(target: Any, operands: Sequence[Any], dtype: Any) -> None:
    """Multiply complex64 with one of two products in each part not rounded."""
    one, other = (operand.view(dtype) for operand in operands)
    a, b, c, d = (part.astype(np.float64) for part in (one.real, one.imag, other.real, other.imag))
    out = target.view(dtype)
    out.real = a * c - (b * d).astype(np.float32)
    out.imag = a * d + (b * c).astype(np.float32)


def rounded(target: Any, operands: Sequence[Any], dtype: Any) -> None:
    target.view(dtype)[:] = textbook([operand.view(dtype) for operand in operands])


def made(dtype: str, loop: Callable[..., None] | None = None) -> ProductReducer:
    """Return the reducer of PROD, with the MPI's loop or another."""
    known = np.dtype(dtype)
    if loop is not None:
        return ProductReducer(known, lambda target, operands: loop(target, operands, known))
    found = reducer(MPI.PROD, parse_send(np.zeros(1, known)).item)
    assert isinstance(found, ProductReducer)
    return found


def numbers(dtype: str, count: int, number: int, special: bool) -> Any:
    rng = np.random.default_rng([count, number])
    real = np.dtype(np.dtype(dtype).char.lower())
    parts = rng.uniform(-1.2, 1.2, 2 * count).astype(real)
    if special:
        info = np.finfo(real)
        few = np.array([0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny], real)
        parts = np.where(rng.integers(0, 2, parts.size) == 0, rng.choice(few, parts.size), parts)
    return parts.view(dtype)


def bits(values: Any) -> Any:
    return values.view(np.uint8)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_parts(dtype: str, special: bool, native: bool) -> None:
    reduction = made(dtype)
    if not native:
        reduction = ProductReducer(np.dtype(dtype), reduction._native or reduction._multiply)
        reduction._native = None
    whole = PIECE // np.dtype(dtype).itemsize
    for count in (0, 1, 5, 64, whole, 2 * whole + 3):
        for ways in (2, 3, 5):
            given = [numbers(dtype, count, way, special) for way in range(ways)]
            expected = bits(textbook(given))
            for shift in (0, 1, 4):
                room = [np.empty(expected.size + shift, np.uint8)[shift:] for _ in given]
                for memory, values in zip(room, given, strict=True):
                    memory[:] = bits(values)
                target = np.empty_like(room[0])
                reduction.reduce(target, room)
                assert np.array_equal(target, expected)
                assert all(map(np.array_equal, room, map(bits, given)))
                for place in (0, 1) if ways == 2 else ():
                    again = [memory.copy() for memory in room]
                    reduction.reduce(again[place], again)
                    assert np.array_equal(again[place], expected)


def test_a_loop_that_fuses_is_not_taken() -> None:
    assert made("c8", rounded)._native is not None
    assert made("c8", fused)._native is None

    def at_times(target: Any, operands: Sequence[Any], dtype: Any) -> None:
        rounded(target, operands, dtype)
        if target.size > 16:  # as a loop over vectors with a rest of single items
            fused(target[:8], [operand[:8] for operand in operands], dtype)

    assert made("c8", at_times)._native is None


def test_infinities_that_c_restores_stay_lost() -> None:
    def restoring(target: Any, operands: Sequence[Any], dtype: Any) -> None:
        rounded(target, operands, dtype)
        target.view(dtype)[np.isnan(target.view(dtype))] = complex(np.inf, np.inf)

    reduction = made("c8", restoring)
    assert reduction._native is not None
    given = [np.array([1, value], "c8") for value in (complex(np.inf, np.inf), 1j)]
    target = np.empty(16, np.uint8)
    reduction.reduce(target, [bits(one) for one in given])
    assert np.array_equal(target, bits(textbook(given)))
    assert np.isnan(target.view("f4")).tolist() == [False, False, True, True]


def test_silent_and_said_to_be_for_a_device() -> None:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for dtype in DTYPES:
            reduction = made(dtype)
            assert reduction.loop == ("PROD", np.dtype(dtype))
            assert reduction.label == f"PROD {np.dtype(dtype).str}"
            operands = [bits(numbers(dtype, 99, way, True)) for way in range(2)]
            reduction.reduce(np.empty_like(operands[0]), operands)


def test_long_double_is_the_mpis_own() -> None:
    item = parse_send(np.zeros(1, np.clongdouble)).item
    assert reducer(MPI.PROD, item).loop is None

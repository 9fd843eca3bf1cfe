"""The loops on 16-bit floats against exact arithmetic, at every level that runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from mpicoll import kernels
from mpicoll.kernels import OPERATORS

Array = npt.NDArray[Any]


class Format(NamedTuple):
    """A binary format: its precision in bits, the exponents of its least and largest values."""

    precision: int
    lowest: int
    highest: int


class Kind(NamedTuple):
    """A 16-bit type."""

    dtype: np.dtype[Any]
    format: Format
    infinity: int
    quiet: int


HALF = Kind(np.dtype(np.float16), Format(11, -24, 15), 0x7C00, 0x7E00)
BRAIN = Kind(np.dtype(ml_dtypes.bfloat16), Format(8, -133, 127), 0x7F80, 0x7FC0)
SINGLE = Format(24, -149, 127)
EVERY = np.arange(1 << 16, dtype=np.uint16)
LEVELS = kernels.levels()

kinds = pytest.mark.parametrize("kind", [HALF, BRAIN], ids=["float16", "bfloat16"])
levels = pytest.mark.parametrize("level", LEVELS)
operators = pytest.mark.parametrize("op", OPERATORS)


def loops(kind: Kind, level: str) -> kernels.Half:
    found = kernels._half_at(kind.dtype, level)
    assert found is not None
    return found


def others(kind: Kind) -> Array:
    """Return special bit patterns, both signs of each, and 500 random ones."""
    one = int(np.ones(1, kind.dtype).view(np.uint16)[0])
    smallest_normal = kind.infinity & -kind.infinity
    special = [0, 1, 2, 3, smallest_normal - 1, smallest_normal, smallest_normal + 1]
    special += [one - 1, one, one + 1, kind.infinity - 2, kind.infinity - 1, kind.infinity]
    special += [kind.infinity + 1, kind.quiet, kind.quiet + 5, 0x7FFF]
    both = [bits | sign for bits in special for sign in (0, 0x8000)]
    rng = np.random.default_rng(16)
    return np.concatenate([both, rng.integers(0, 1 << 16, 500)]).astype(np.uint16)


def values(bits: Array, kind: Kind) -> Array:
    """Return bit patterns as float64, made from sign, exponent and mantissa."""
    mantissa_bits = kind.format.precision - 1
    magnitude = bits.astype(np.int64) & 0x7FFF
    exponent = np.maximum(magnitude >> mantissa_bits, 1)
    fraction = magnitude - ((exponent - 1) << mantissa_bits)
    value = np.ldexp(fraction.astype(np.float64), exponent - 1 + kind.format.lowest)
    value[magnitude == kind.infinity] = np.inf
    value[magnitude > kind.infinity] = np.nan
    signed: Array = np.copysign(value, np.where(bits & 0x8000, -1.0, 1.0))
    return signed


def rounded(exact: Array, to: Format) -> Array:
    """Round float64 to a narrower format, to nearest, ties to even.

    A number is divided by the unit of its last place in that format, a power of two, so
    exactly; then `rint` is what rounds.
    """
    finite = np.where(np.isfinite(exact), exact, 0)
    unit = np.maximum(np.frexp(finite)[1] - to.precision, to.lowest)
    result = np.ldexp(np.rint(np.ldexp(finite, -unit)), unit)
    largest = (2 - 2.0 ** (1 - to.precision)) * 2.0**to.highest
    result = np.where(np.abs(result) > largest, np.copysign(np.inf, result), result)
    return np.where(np.isfinite(exact), result, exact)


def bits_of(value: Array, kind: Kind) -> Array:
    """Return the bits of values that the format has; all NaN alike."""
    single = value.astype(np.float32)
    if kind is HALF:
        bits = single.astype(np.float16).view(np.uint16)
    else:
        bits = (single.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(kind.quiet), bits)


def exact_sum(a: Array, b: Array) -> Array:
    """Return a + b with the last bit set if there is more behind it ("rounded to odd").

    The sum of two bfloat16 can have 260 bits. The two-sum of Knuth gives what float64 has
    lost; a neighbour with an odd last bit then stands for all values strictly between its
    even neighbours, and rounding to 8, 11 or 24 bits has the same result for all of them.
    """
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    even = total.view(np.int64) & 1 == 0
    wrong = np.isfinite(total) & (lost != 0) & even
    return np.where(wrong, np.nextafter(total, np.copysign(np.inf, lost)), total)


def exact_product(a: Array, b: Array) -> Array:
    """Return a * b, which of two 16-bit values has 22 bits at most, of two float32 48."""
    return a * b


def extreme(sign: int) -> Callable[[Array, Array], Array]:
    """Return the maximum (sign 1) or minimum of IEEE 754-2019."""

    def choose(a: Array, b: Array) -> Array:
        first = (sign * a > sign * b) | ((a == b) & (np.signbit(a) == (sign < 0)))
        chosen = np.where(first, a, b)
        return np.where(np.isnan(a) | np.isnan(b), np.nan, chosen)

    return choose


REFERENCE = {"SUM": exact_sum, "PROD": exact_product, "MAX": extreme(1), "MIN": extreme(-1)}


@kinds
@operators
def test_every_pattern(kind: Kind, op: str) -> None:
    # The reference is rounded once, the loops round to float32 first. It never shows: 24 bits
    # are at least 2 * 11 + 2; sums are exact among subnormals, and so are products of 16 bits
    # that are not below half of the least subnormal, 2**-134, float32 reaching to 2**-149.
    mine = values(EVERY, kind)
    made = {level: loops(kind, level) for level in LEVELS}
    for number, other in enumerate(others(kind)):
        second = np.full_like(EVERY, other)
        with np.errstate(all="ignore"):
            exact = REFERENCE[op](mine, values(second, kind))
            expected = bits_of(rounded(exact, kind.format), kind)
        operands = [EVERY.view(np.uint8), second.view(np.uint8)]
        if number % 2:
            operands.reverse()
        for level, half in made.items():
            result = np.full_like(EVERY, 0xBEEF)
            half.reduce(op, result.view(np.uint8), operands)
            wrong = np.flatnonzero(result != expected)
            assert not wrong.size, (
                f"{level}: {EVERY[wrong[0]]:#06x} {op} {other:#06x} is {result[wrong[0]]:#06x}, "
                f"exact {expected[wrong[0]]:#06x}; {wrong.size} differ"
            )


@kinds
@levels
@operators
def test_lengths_and_addresses(kind: Kind, level: str, op: str) -> None:
    rng, half = np.random.default_rng(5), loops(kind, level)
    for count in (*range(68), 1023, 1025):
        one, other = rng.integers(0, 1 << 16, (2, count)).astype(np.uint16).view(np.uint8)
        with np.errstate(all="ignore"):
            numbers = [values(bits.view(np.uint16), kind) for bits in (one, other)]
            expected = bits_of(rounded(REFERENCE[op](*numbers), kind.format), kind).view(np.uint8)
        for shift in (0, 1, 2, 7):
            memory = np.full((3, 2 * count + 64), 0xA5, np.uint8)
            spans = [row[shift + 16 : shift + 16 + 2 * count] for row in memory]
            for target in range(3):
                spans[0][:], spans[1][:] = one, other
                half.reduce(op, spans[target], spans[:2])
                assert (spans[target] == expected).all(), (count, shift, target)
            for row in memory:
                assert (row[: shift + 16] == 0xA5).all()
                assert (row[shift + 16 + 2 * count :] == 0xA5).all()


def fold_cases(kind: Kind) -> Iterator[list[Array]]:
    """Yield operands: any bits, and values of like size, whose folds stay finite."""
    rng = np.random.default_rng(7)
    for number in (3, 4, 8, 9, 16, 17, 40):
        for count in (0, 1, 31, 67, 2500):
            yield list(rng.integers(0, 1 << 16, (number, count)).astype(np.uint16))
            near_one = rng.uniform(0.5, 1.9, (number, count)) * rng.choice((-1, 1), count)
            yield list(near_one.astype(kind.dtype).view(np.uint16))


@kinds
@levels
@operators
def test_folds(kind: Kind, level: str, op: str) -> None:
    half = loops(kind, level)
    for operands in fold_cases(kind):
        numbers = [values(operand, kind) for operand in operands]
        total = numbers[0]
        with np.errstate(all="ignore"):
            for number in numbers[1:]:
                total = rounded(REFERENCE[op](total, number), SINGLE)
            expected = bits_of(rounded(total, kind.format), kind)
        target = np.full_like(operands[0], 0xBEEF)
        half.reduce(op, target.view(np.uint8), [operand.view(np.uint8) for operand in operands])
        assert (target == expected).all(), (len(operands), target.size)


# A quotient of two float32 that is rounded to float64 and then to float32 is as if rounded at
# once, since 53 bits are at least 2 * 24 + 2 (S. Figueroa, "When is double rounding innocuous?").
@kinds
@levels
@pytest.mark.parametrize("factor", [3, 1 / 3, 64, 1e-3, -7.0, 0.0, np.inf])
@pytest.mark.parametrize("divide", [False, True])
def test_scale(kind: Kind, level: str, factor: float, divide: bool) -> None:
    single = np.float64(np.float32(factor))
    with np.errstate(all="ignore"):
        exact = values(EVERY, kind) / single if divide else values(EVERY, kind) * single
        expected = bits_of(rounded(rounded(exact, SINGLE), kind.format), kind)
    bits = EVERY.copy()
    loops(kind, level).scale(bits.view(np.uint8), bits.view(np.uint8), factor, divide=divide)
    assert (bits == expected).all()


@kinds
@levels
def test_widen_and_accumulate(kind: Kind, level: str) -> None:
    half, numbers = loops(kind, level), values(EVERY, kind)
    for count in (*range(35), 1 << 16):
        bits = EVERY[EVERY.size - count :].view(np.uint8)
        wide = np.full(count + 1, 77, np.float32)
        half.widen(wide[:count], bits)
        expected = numbers[EVERY.size - count :]
        np.testing.assert_array_equal(wide[:count], expected)
        assert (np.signbit(wide[:count]) == (np.signbit(expected) & ~np.isnan(expected))).all()
        assert wide[count] == 77
    rng = np.random.default_rng(9)
    total = rng.standard_normal(1 << 16).astype(np.float32)
    with np.errstate(all="ignore"):
        summed = (total + numbers.astype(np.float32)).astype(np.float32)
    half.accumulate(total, EVERY.view(np.uint8))
    np.testing.assert_array_equal(total, summed)


@kinds
@levels
def test_narrow(kind: Kind, level: str) -> None:
    half = loops(kind, level)
    high = EVERY.astype(np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x3000, 0x5000):
        single = (high | np.uint32(low)).view(np.float32)
        with np.errstate(all="ignore"):
            expected = bits_of(rounded(single.astype(np.float64), kind.format), kind)
        for count in (1 << 16, 13):
            result = np.full(count, 0xBEEF, np.uint16)
            half.narrow(result.view(np.uint8), single[:count])
            assert (result == expected[:count]).all(), hex(low)


@kinds
@levels
def test_refusals(kind: Kind, level: str) -> None:
    half, four, six = loops(kind, level), np.zeros(4, np.uint8), np.zeros(6, np.uint8)
    with pytest.raises(ValueError, match="an operand of 6 bytes where 4 are expected"):
        half.reduce("SUM", four, [four, six])
    with pytest.raises(ValueError, match="an operand of 4 bytes where 6 are expected"):
        half.scale(six, four, 2.0)
    with pytest.raises(ValueError, match="5 bytes are not whole items of 2"):
        half.reduce("MAX", six[:5], [six[:5], six[:5]])
    with pytest.raises(ValueError, match="at least two operands"):
        half.reduce("SUM", four, [four])
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        half.reduce("SUM", frozen, [four, four])
    half.reduce("SUM", four, [frozen, frozen])


def test_what_runs() -> None:
    assert kernels.levels()[-1] == "numpy"
    assert kernels.active() == kernels.levels()[0]
    assert kernels.half(np.float32) is None
    assert kernels.half(np.dtype(np.float16).newbyteorder()) is None
    assert kernels.describe() in (f"{kernels.active()} (compiled)", "NumPy (not compiled)")

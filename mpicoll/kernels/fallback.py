"""The loops of `mpicoll.kernels` in NumPy and ml_dtypes, with the same bits.

They work by pieces that stay in cache, and on bits where that is as good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

#: The operators, by the numbers that they have in levels.h.
OPERATORS = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3}

#: Values per piece.
PIECE = 1 << 14

_ARITHMETIC = {"SUM": np.add, "PROD": np.multiply}


class NumpyHalf:
    """The loops of one 16-bit type; see `mpicoll.kernels.Half`."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        # In bits; the quiet NaN is infinity with the first bit of the mantissa set.
        self._infinity, self._quiet = (0x7C00, 0x7E00) if dtype == np.float16 else (0x7F80, 0x7FC0)
        self._dtype = dtype

    def reduce(self, op: str, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold two or more operands from the left."""
        if len(operands) < 2:
            raise ValueError("at least two operands expected")
        with np.errstate(all="ignore"):
            for piece in _pieces(target, *operands):
                out, *views = [array[piece] for array in (target, *operands)]
                if op not in _ARITHMETIC:
                    self._select(op, out, views)
                elif len(views) > 2:
                    self._fold(_ARITHMETIC[op], out, views)
                else:
                    one, other = (view.view(self._dtype) for view in views)
                    _ARITHMETIC[op](one, other, out=out.view(self._dtype))
                    self._settle(out)

    def scale(self, target: Bytes, source: Bytes, factor: float, *, divide: bool = False) -> None:
        """Multiply or divide in float32 and round once."""
        by = np.divide if divide else np.multiply
        with np.errstate(all="ignore"):
            for piece in _pieces(target, source):
                values = source[piece].view(self._dtype).astype(np.float32)
                self._round(by(values, np.float32(factor)), target[piece])

    def accumulate(self, total: Floats, source: Bytes) -> None:
        """Add to float32 values."""
        _same(total.size, source)
        with np.errstate(all="ignore"):
            total += source.view(self._dtype).astype(np.float32)
        total[np.isnan(total)] = np.nan

    def widen(self, target: Floats, source: Bytes) -> None:
        """Convert to float32."""
        _same(target.size, source)
        with np.errstate(all="ignore"):
            target[:] = source.view(self._dtype)
        target[np.isnan(target)] = np.nan

    def narrow(self, target: Bytes, source: Floats) -> None:
        """Round float32 values."""
        _same(source.size, target)
        with np.errstate(all="ignore"):
            self._round(source, target)

    def _fold(self, ufunc: np.ufunc, out: Bytes, views: Sequence[Bytes]) -> None:
        total = views[0].view(self._dtype).astype(np.float32)
        for view in views[1:]:
            ufunc(total, view.view(self._dtype).astype(np.float32), out=total)
        self._round(total, out)

    def _round(self, values: Floats, out: Bytes) -> None:
        out.view(self._dtype)[:] = values.astype(self._dtype)
        self._settle(out)

    def _select(self, op: str, out: Bytes, views: Sequence[Bytes]) -> None:
        """Compare as integers, for which the bits of negative values are turned over."""
        choose = np.maximum if op == "MAX" else np.minimum
        result: npt.NDArray[np.int16] | None = None
        unordered = np.zeros(out.size // 2, np.bool_)
        for view in views:
            bits = view.view(np.int16)
            magnitude = bits & np.int16(0x7FFF)
            unordered |= magnitude > self._infinity
            key = np.where(bits < 0, ~magnitude, magnitude)
            result = key if result is None else choose(result, key)
        assert result is not None
        values = np.where(result < 0, ~result | np.int16(-0x8000), result)
        values[unordered] = self._quiet
        out.view(np.int16)[:] = values

    def _settle(self, out: Bytes) -> None:
        """Give every NaN the same bits."""
        bits = out.view(np.int16)
        unordered = (bits & np.int16(0x7FFF)) > self._infinity
        if unordered.any():
            bits[unordered] = self._quiet


def _pieces(target: Bytes, *operands: Bytes) -> Iterator[slice]:
    if target.size % 2:
        raise ValueError(f"{target.size} bytes are not whole items of 2")
    for operand in operands:
        _same(target.size // 2, operand)
    for low in range(0, target.size, 2 * PIECE):
        yield slice(low, low + 2 * PIECE)


def _same(count: int, operand: Bytes) -> None:
    if operand.size != 2 * count:
        raise ValueError(f"an operand of {operand.size} bytes where {2 * count} are expected")

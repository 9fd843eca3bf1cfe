"""Loops on float16 and bfloat16: compiled ones where they are built, else NumPy's.

Both give the same bits. An operation of two operands is done in float32 and rounded to
nearest, ties to even; a fold of more runs in float32 from the left and is rounded once.
Every NaN that comes out is the quiet one without sign and payload. MAX and MIN are those
of IEEE 754-2019: NaN wins, and -0 is below +0, so that the order of operands never shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mpicoll.kernels.fallback import OPERATORS, Bytes, Floats, NumpyHalf

try:
    from mpicoll.kernels import _half
except ImportError:  # installed without a C compiler
    _LEVELS: dict[str, int] = {}
else:
    _LEVELS = _half.levels()

__all__ = ["OPERATORS", "Half", "active", "describe", "half", "levels"]

DType: TypeAlias = "np.dtype[Any]"

_KINDS = {np.dtype(np.float16): 0, np.dtype(ml_dtypes.bfloat16): 1}


class Half(Protocol):
    """The loops of one 16-bit type.

    Arrays are one-dimensional and contiguous, at any address: bytes where the values are
    16-bit, float32 otherwise. Lengths that do not fit raise ValueError.
    """

    def reduce(self, op: str, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold two or more operands from the left; ``target`` may be one of two."""

    def scale(self, target: Bytes, source: Bytes, factor: float, *, divide: bool = False) -> None:
        """Set ``target`` to ``source`` times, or divided by, ``factor``; they may be the same."""

    def accumulate(self, total: Floats, source: Bytes) -> None:
        """Add 16-bit ``source`` to float32 ``total``."""

    def widen(self, target: Floats, source: Bytes) -> None:
        """Set float32 ``target`` to 16-bit ``source``, exactly."""

    def narrow(self, target: Bytes, source: Floats) -> None:
        """Set 16-bit ``target`` to float32 ``source``, rounded."""


class _CompiledHalf:
    """Loops in C; `mpicoll/kernels/half.c`."""

    def __init__(self, kind: int, level: int) -> None:
        self._kind = kind
        self._level = level

    def reduce(self, op: str, target: Bytes, operands: Sequence[Bytes]) -> None:
        _half.reduce(self._level, self._kind, OPERATORS[op], target, operands)

    def scale(self, target: Bytes, source: Bytes, factor: float, *, divide: bool = False) -> None:
        _half.scale(self._level, self._kind, divide, target, source, factor)

    def accumulate(self, total: Floats, source: Bytes) -> None:
        _half.widen(self._level, self._kind, 1, total, source)

    def widen(self, target: Floats, source: Bytes) -> None:
        _half.widen(self._level, self._kind, 0, target, source)

    def narrow(self, target: Bytes, source: Floats) -> None:
        _half.narrow(self._level, self._kind, 0, target, source)


def levels() -> tuple[str, ...]:
    """Return the names of what runs on this machine, best first; "numpy" is the last."""
    return (*_LEVELS, "numpy")


def active() -> str:
    """Return what runs: "avx512", "avx2", "neon", "portable", or "numpy" where not compiled."""
    return levels()[0]


def describe() -> str:
    """Return `active` in words, for people."""
    return f"{active()} (compiled)" if _LEVELS else "NumPy (not compiled)"


def half(dtype: npt.DTypeLike) -> Half | None:
    """Return the loops for float16 or bfloat16 in native byte order; None for other types."""
    return _half_at(np.dtype(dtype), active())


def _half_at(dtype: DType, level: str) -> Half | None:
    """Return the loops of one level of `levels`."""
    kind = _KINDS.get(dtype)
    if kind is None:
        return None
    return NumpyHalf(dtype) if level == "numpy" else _CompiledHalf(kind, _LEVELS[level])

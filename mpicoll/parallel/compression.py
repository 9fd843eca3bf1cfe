"""What a bucket of gradients becomes on the wire: a hook that casts it to another type.

The hook of this package casts float32 to a 16-bit float, so that half of the bytes travel. With
u the unit roundoff of the 16-bit type (2^-11 for float16, 2^-8 for bfloat16), e its least
subnormal (2^-24, 2^-133), g = P 2^-24 / (1 - P 2^-24), m the exact mean of a gradient's element
over P ranks and s the mean of its magnitudes, the mean that comes out is within

    u |m| + (1 + u) (u s + e + g ((1 + u) s + e)) + e

of m, about 2 u s: each rank rounds once, the sum and the division are in float32 and rounded
once. This holds for the automatic choice of algorithm; one that is named and rounds at each
hop, such as ring, loses more. float16 is infinite beyond 65504, bfloat16 reaches as far as
float32.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from mpicoll.parallel.library import Array, narrow, widen


@runtime_checkable
class Compression(Protocol):
    """A hook for the float32 buckets of `DataParallel`; the same one on all ranks.

    A bucket of n elements travels as n elements of ``dtype``, which are summed or averaged
    as such. ``name`` tells hooks apart when the ranks compare what they were given.
    """

    name: str
    dtype: np.dtype[Any]

    def compress(self, wire: Array, bucket: Array) -> None:
        """Set ``wire`` from the float32 ``bucket``; both are dense, of one length and place."""

    def expand(self, bucket: Array, wire: Array) -> None:
        """Set the float32 ``bucket`` from the reduced ``wire``."""


class HalfWire:
    """Casts float32 to a 16-bit float and back: "fp16" or "bf16"; bound in the module's text."""

    def __init__(self, name: str) -> None:
        """Take a name; raises ValueError for an unknown one."""
        if name not in _HALVES:
            raise ValueError(f"compress={name!r}; known: {', '.join(_HALVES)}, or a Compression")
        self.name = name
        self.dtype = _HALVES[name]

    def compress(self, wire: Array, bucket: Array) -> None:
        """Round to nearest, ties to even."""
        narrow(wire, bucket)

    def expand(self, bucket: Array, wire: Array) -> None:
        """Widen; exact."""
        widen(bucket, wire)


_HALVES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}

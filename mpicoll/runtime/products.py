"""Products of complex numbers whose bits are defined, on the host as on a device.

NumPy's own loop fuses multiply and add or not by how operands are aligned; C's depends on
the compiler, and restores infinities that came out as NaN (C99, annex G). Here
(a + bi)(c + di) is ac - bd and ad + bc, each product, difference and sum rounded once, and
a part that is NaN is the quiet one without sign and payload. No infinity is restored, as
little as by NumPy: (inf + inf i) i is NaN in both parts, where C has -inf + inf i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.runtime.datatypes import DType
from mpicoll.runtime.executor import Bytes

#: Bytes that are multiplied at a time; with scratch of as much they stay in cache.
PIECE = 1 << 17

Fold = Callable[[Bytes, Sequence[Bytes]], None]


class ProductReducer:
    """PROD of complex64 or complex128; a `mpicoll.runtime.operators.Reducer`.

    ``native`` folds with the MPI's own loop. That is faster than NumPy's over parts, and is
    taken where it rounds as said above. A result of it that is finite is then right: an
    infinity or NaN on the way would show in it, and annex G changes nothing else.
    """

    operator = "PROD"
    commutative = True
    wide = False
    mean_of = 0
    finish: Callable[[Bytes, int], None] | None = None

    def __init__(self, dtype: DType, native: Fold) -> None:
        self.label = f"PROD {dtype.str}"
        self.item_bytes = dtype.itemsize
        self.loop: tuple[str, DType] | None = ("PROD", dtype)
        self._real = np.dtype(dtype.char.lower())
        self._native = native if self._agrees(native) else None

    def _agrees(self, native: Fold) -> bool:
        """Whether the MPI rounds each step, with vectors of any length and alignment.

        A fused product and sum differs for most of the pairs that are tried.
        """
        few = np.array([1 / 3, -0.7, 1 + np.finfo(self._real).eps, 0.0, -0.0], self._real)
        parts = np.stack([np.tile(few, few.size), np.repeat(few, few.size)], axis=1)
        left = np.repeat(parts, len(parts), axis=0).reshape(-1).view(np.uint8)
        right = np.tile(parts, (len(parts), 1)).reshape(-1).view(np.uint8)
        ours = np.empty_like(left)
        self._multiply(ours, [left, right])
        item = self.item_bytes
        for shift in (0, item // 2, 1):
            room = [np.empty(left.size + shift, np.uint8)[shift:] for _ in range(3)]
            room[1][:], room[2][:] = left, right
            for items in (left.size // item, 1, 7):
                for low in range(0, left.size, items * item):
                    piece = slice(low, low + items * item)
                    native(room[0][piece], [room[1][piece], room[2][piece]])
                if not np.array_equal(room[0], ours):
                    return False
        return True

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold ``operands`` from the left into ``target``, which may be one of two."""
        for low in range(0, target.size, PIECE):
            piece = slice(low, low + PIECE)
            self._fold(target[piece], [operand[piece] for operand in operands])

    def _fold(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        if self._native is not None:
            result = np.empty_like(target)  # operands are needed once more if it is not finite
            self._native(result, operands)
            finite = np.isfinite(result.view(self._real))
            if np.count_nonzero(finite) == finite.size:
                target[:] = result
                return
        self._multiply(target, operands)

    def _multiply(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        out = target.view(self._real)
        real, imaginary = out[::2], out[1::2]
        ac, bd, ad, bc = np.empty((4, real.size), self._real)
        first, *others = [operand.view(self._real) for operand in operands]
        a, b = first[::2], first[1::2]
        with np.errstate(all="ignore"):
            for other in others:
                c, d = other[::2], other[1::2]
                for one, another, product in ((a, c, ac), (b, d, bd), (a, d, ad), (b, c, bc)):
                    np.multiply(one, another, out=product)
                np.subtract(ac, bd, out=real)
                np.add(ad, bc, out=imaginary)
                a, b = real, imaginary
        unordered: Any = np.isnan(out)
        if np.count_nonzero(unordered):
            out[unordered] = np.nan

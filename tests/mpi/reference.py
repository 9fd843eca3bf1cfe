"""What a reduction has to give: bits where the operator is exact, else a derived bound.

Notation: u is the unit roundoff of a type and gamma(k) = k u / (1 - k u). A sum of n
numbers in any bracketing is within gamma(n - 1) * sum|x| of the exact one, a product
within gamma(n - 1) times itself (N. J. Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd edition, sections 3.1 and 4.2); a complex product of two within
sqrt(2) gamma(2) (lemma 3.5). The reference is itself computed in long double, whose error
is added by the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import quirks
from kinds import Array, Bytes, Kind, Operator


def _multiply(one: Array, other: Array) -> Array:
    """Multiply by the textbook: NumPy's own loop over complex numbers fuses operations for
    some items and not for others, depending on where in the array they lie."""
    if one.dtype.kind != "c":
        return one * other
    product = np.empty_like(one)
    product.real = one.real * other.real - one.imag * other.imag
    product.imag = one.real * other.imag + one.imag * other.real
    return product


def _compose(one: Array, other: Array) -> Array:
    """Compose maps x -> a x + b, which lie in pairs."""
    result = np.empty_like(one)
    result[1::2] = one[1::2] * other[::2] + other[1::2]
    result[::2] = one[::2] * other[::2]
    return result


_LOOPS: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PROD": _multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "maximum": np.maximum,
    "first": lambda one, other: one,
    "compose": _compose,
}


def solid(kind: Kind, data: Bytes) -> Bytes:
    """Return ``data`` with the bytes of long doubles that mean nothing set to zero."""
    if not _padded(kind):
        return data
    mask = np.ones(kind.nbytes, np.uint8)
    for part in range(0, kind.nbytes - 15, 16):
        mask[part + 10 : part + 16] = 0
    return (data.reshape(-1, kind.nbytes) * mask).reshape(-1)


def _padded(kind: Kind) -> bool:
    """Whether items are 80-bit numbers in 16 bytes; not all MPIs copy the other six."""
    if np.finfo(np.longdouble).nmant != 63:
        return False
    if kind.family == "quad":
        return quirks.QUAD_IS_LONG_DOUBLE
    dtype = kind.dtype
    return dtype is not None and (dtype[0] if dtype.names else dtype).char in "gG"


def fold(kind: Kind, operator: Operator, inputs: Sequence[Bytes]) -> Bytes | None:
    """Return the bits of a left-to-right loop; 16-bit sums are rounded once, at its end.

    None for what NumPy has no loop for, pairs and quadruple precision, and for Fortran's
    characters, of which MPIs differ on the sign.
    """
    dtype = np.dtype(np.uint64) if kind.family == "affine" else kind.dtype
    loop = _LOOPS.get(operator.name)
    if dtype is None or dtype.names or loop is None or kind.family == "character":
        return None
    values = [one.view(dtype) for one in inputs]
    with np.errstate(all="ignore"):
        if _is_narrow(kind) and operator.name in ("SUM", "PROD"):
            total: Array = reduce(loop, [one.astype(np.float32) for one in values])
        else:
            total = reduce(loop, values)
        if operator.name == "AVG":
            total = np.trunc(total.astype(np.longdouble) / len(inputs))
        return np.ascontiguousarray(total.astype(dtype)).view(np.uint8)


def _is_narrow(kind: Kind) -> bool:
    return kind.family == "float" and kind.dtype is not None and kind.dtype.itemsize == 2


def _roundoff(dtype: Any) -> float:
    finfo: Any = ml_dtypes.finfo if dtype.itemsize == 2 else np.finfo
    return float(finfo(dtype).eps) / 2


def _gamma(k: int, u: float) -> float:
    return k * u / (1 - k * u)


def excess(
    kind: Kind, operator: Operator, inputs: Sequence[Bytes], result: Bytes, wide: bool
) -> str:
    """Return how a rounded result breaks its bound, or an empty string.

    ``wide`` holds a 16-bit type to accumulation in float32 and one rounding.
    """
    u = _roundoff(kind.dtype)
    if operator.name == "PROD":
        got, exact, bound = _product(kind, inputs, result, u, wide)
    else:
        got, exact, bound = _sum(kind, inputs, result, u, wide, operator.name == "AVG")
    error = np.abs(got - exact)
    bad = ~(error <= bound)
    if not bad.any():
        return ""
    at = int(np.argmax(bad))
    return (
        f"{np.count_nonzero(bad)} of {bad.size} out of bound; item {at} is {got[at]}, expected "
        f"{exact[at]} within {bound[at]:.3g}"
    )


_REFERENCE = _roundoff(np.dtype(np.longdouble))


def _wider(values: Array) -> Array:
    return values.astype(np.clongdouble if values.dtype.kind == "c" else np.longdouble)


def _sum(
    kind: Kind, inputs: Sequence[Bytes], result: Bytes, u: float, wide: bool, average: bool
) -> tuple[Array, Array, Array]:
    """Return result, reference and bound; complex numbers are summed by their parts."""
    real = np.dtype(kind.dtype.char.lower()) if kind.family == "complex" else kind.dtype
    values = [_wider(one.view(real)) for one in inputs]
    steps = len(inputs) - 1
    size = reduce(np.add, [np.abs(one) for one in values]) * (1 + _gamma(steps, _REFERENCE))
    exact = reduce(np.add, values)
    bound = _gamma(steps, u) * size
    if wide and _is_narrow(kind):
        bound = u * np.abs(exact) + (1 + u) * _gamma(steps, 2.0**-24) * size
    if average:
        # A quotient is rounded once, one of 16 bits twice: in float32, then to its type.
        once = u + 2.0**-24 * (1 + u) if _is_narrow(kind) else u
        bound = (bound + once * (np.abs(exact) + bound)) / len(inputs)
        exact = exact / len(inputs)
        size = size / len(inputs)
    return _wider(result.view(real)), exact, bound + 2 * _gamma(steps + 1, _REFERENCE) * size


def _product(
    kind: Kind, inputs: Sequence[Bytes], result: Bytes, u: float, wide: bool
) -> tuple[Array, Array, Array]:
    steps = len(inputs) - 1
    exact = reduce(np.multiply, [_wider(one.view(kind.dtype)) for one in inputs])
    of: Callable[[float], float]
    if kind.family == "complex":

        def of(u: float) -> float:
            return float(np.expm1(steps * np.log1p(np.sqrt(2) * _gamma(2, u))))

    else:

        def of(u: float) -> float:
            return _gamma(steps, u)

    relative = of(u)
    if wide and _is_narrow(kind):
        relative = u + (1 + u) * of(2.0**-24)
    relative += 2 * of(_REFERENCE)
    return _wider(result.view(kind.dtype)), exact, relative * np.abs(exact)

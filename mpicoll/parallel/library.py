"""The library of an array: NumPy for those on the host, CuPy for those on a device.

CuPy has NumPy's names, so this package is written once, for the library of what it is given;
where the two are not alike, the difference is here. CuPy is not imported: who has one of its
arrays has loaded it. What is done to device arrays is queued on the caller's current stream,
and waited for only where the host needs a number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from mpicoll import kernels

#: An array of either library; CuPy's have the same methods, and no types that can be checked.
Array: TypeAlias = npt.NDArray[Any]

#: What the errors say that was expected.
EXPECTED = "a NumPy or CuPy array"

#: Elements that are widened at a time on the host, so that they stay in cache.
_PIECE = 1 << 14


def _of(value: Any) -> Any:
    """Return the library that an array belongs to, None for what is none."""
    if isinstance(value, np.ndarray):
        return np
    kind = type(value)
    root = sys.modules.get(kind.__module__.partition(".")[0])
    if not hasattr(kind, "__cuda_array_interface__") or not hasattr(root, "asnumpy"):
        return None
    return root if issubclass(kind, getattr(root, "ndarray", ())) else None


def library(array: Array) -> Any:
    """Return the module whose functions take ``array``: ``numpy`` or ``cupy``."""
    return _of(array) or np


def is_array(value: Any) -> TypeGuard[Array]:
    """Whether this package works on ``value``."""
    return _of(value) is not None


def on_host(array: Array) -> bool:
    """Whether an array is NumPy's."""
    return library(array) is np


def place(array: Array) -> str:
    """Return where an array lies, in words that tell devices apart: "host", "device 0"."""
    return "host" if on_host(array) else f"device {getattr(array.device, 'id', array.device)}"


def scattered(arrays: Iterable[Array]) -> str:
    """Return the devices of arrays that lie on several, or an empty string: one is taken."""
    devices = sorted({place(array) for array in arrays} - {"host"})
    return " and ".join(devices) if len(devices) > 1 else ""


def address(array: Array) -> int:
    """Return where an array begins; 0 for an empty one on a device."""
    if on_host(array):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)  # type: ignore[attr-defined]


def writeable(array: Array) -> bool:
    """Whether elements can be set; CuPy has no such flag, and so takes what repeats none."""
    if on_host(array):
        return bool(array.flags.writeable)
    lengths = zip(array.strides, array.shape, strict=True)
    return not (array.size and any(step == 0 and length > 1 for step, length in lengths))


def to_host(array: Array) -> Array:
    """Return a NumPy array of the same elements: itself, or a copy that is there."""
    found: Array = array if on_host(array) else library(array).asnumpy(array)
    return found


def as_array(value: Any, like: Array | None = None) -> Array:
    """Return an array of either library as it is; what else makes one, where ``like`` is."""
    if is_array(value):
        return value
    made = np.asarray(value)
    return made if like is None else beside(made, like)


def beside(array: Array, like: Array) -> Array:
    """Return an array where ``like`` is: itself, or a copy; one to the host waits for it."""
    if on_host(like):
        return to_host(array)
    there: Array = library(like).asarray(array)
    return there


def gather(rows: Array, index: Array) -> Array:
    """Return the rows that an index of the host names."""
    found: Array = rows[beside(index, rows)]
    return found


def scatter(target: Array, index: Array, rows: Array) -> None:
    """Set the rows that an index of the host names, each once."""
    target[beside(index, target)] = rows


def dense(array: Array) -> Array:
    """Return an array in C order, copied only if it must be."""
    made: Array = library(array).ascontiguousarray(array)
    return made


def widen(target: Array, source: Array) -> None:
    """Set a dense float32 array to dense 16-bit floats; exact."""
    half = kernels.half(source.dtype)
    if on_host(target) and half is not None:
        half.widen(target.reshape(-1), source.reshape(-1).view(np.uint8))
    else:
        target[...] = source


def narrow(target: Array, source: Array) -> None:
    """Set dense 16-bit floats to a dense float32 array, to the nearest, ties to even."""
    half = kernels.half(target.dtype)
    if on_host(target) and half is not None:
        half.narrow(target.reshape(-1).view(np.uint8), source.reshape(-1))
    else:
        target[...] = source


def real_parts(flat: Array) -> Array:
    """Return complex numbers viewed as their parts; others as they are."""
    return flat.view(flat.dtype.char.lower()) if flat.dtype.kind == "c" else flat


def scale(flat: Array, factor: float) -> None:
    """Multiply a dense array in place, 16-bit floats in float32 and rounded once."""
    half = kernels.half(flat.dtype)
    if half is not None and on_host(flat):
        items = flat.view(np.uint8)
        half.scale(items, items, factor)
    elif half is not None:
        flat[...] = flat.astype(np.float32) * np.float32(factor)
    else:
        parts = real_parts(flat)
        with np.errstate(all="ignore"):
            parts *= parts.dtype.type(factor)


def squares(flat: Array) -> float:
    """Return the sum of squared magnitudes in float64, in an order that its length decides."""
    if not on_host(flat):
        return float(_squares_there(flat))
    parts, total = real_parts(flat), 0.0
    with np.errstate(all="ignore"):
        for low in range(0, parts.size, _PIECE):
            wide = parts[low : low + _PIECE].astype(np.float64)
            total += float(np.add.reduce(wide * wide))
    return total


def total_squares(flats: Iterable[Array]) -> float:
    """Return the sum of the `squares` of several arrays; a device is waited for once."""
    here, there = 0.0, None
    for flat in flats:
        if on_host(flat):
            here += squares(flat)
        else:
            part = _squares_there(flat)
            there = part if there is None else there + part
    return here if there is None else here + float(there)


def _squares_there(flat: Array) -> Any:
    """Return the sum of squared magnitudes, left on the device."""
    wide = real_parts(flat).astype(np.float64)
    wide *= wide
    return wide.sum()

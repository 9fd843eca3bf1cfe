"""float32 that travels as 16-bit floats: what is converted before and after a reduction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from mpicoll import kernels
from mpicoll.runtime.datatypes import Item
from mpicoll.runtime.executor import Bytes

_TYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}


def wire_item(item: Item, compress: object) -> Item:
    """Return the item type that travels for ``compress=``: ``item`` itself without it.

    Raises ValueError for an unknown name and for items other than float32.
    """
    if compress is None:
        return item
    if compress not in _TYPES:
        raise ValueError(f"compress={compress!r}; known: None, {', '.join(map(repr, _TYPES))}")
    if item.dtype != np.dtype(np.float32):
        raise ValueError(f"compress={compress!r} wants float32, got {item.name}")
    return Item(None, _TYPES[str(compress)], 2, 2, 0, 2, True)


def compressed(source: Bytes, item: Item) -> tuple[Bytes, Callable[[], None]]:
    """Return memory for float32 ``source`` as 16-bit items, and what fills it."""
    packed = np.empty(source.size // 2, np.uint8)
    half = _loops(item)
    return packed, partial(half.narrow, packed, source.view(np.float32))


def expanded(target: Bytes, item: Item) -> tuple[Bytes, Callable[[], None]]:
    """Return memory for 16-bit items, and what spreads it to float32 ``target``."""
    packed = np.empty(target.size // 2, np.uint8)
    half = _loops(item)
    return packed, partial(half.widen, target.view(np.float32), packed)


def _loops(item: Item) -> kernels.Half:
    assert item.dtype is not None
    half = kernels.half(item.dtype)
    assert half is not None
    return half

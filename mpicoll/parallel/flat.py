"""Parameters in flat groups of one dtype and place, each cut into equal shards, one per rank.

A group lays its parameters one after another and pads the end with zeros to a multiple of
the number of ranks, so that rank r owns elements ``r * share`` to ``(r + 1) * share``. What
is made for a group lies where its parameters lie. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from mpicoll.parallel.library import (
    EXPECTED,
    Array,
    address,
    dense,
    is_array,
    library,
    place,
    real_parts,
    scattered,
    writeable,
)

DType: TypeAlias = "np.dtype[Any]"

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
#: What an optimizer can work on; 16-bit floats by a float32 copy, complex numbers by parts.
TRAINABLE = (*_HALVES, *(np.dtype(char) for char in "fdFD"))


def real(dtype: DType) -> DType:
    """Return the dtype of the parts of a complex number; other dtypes as they are."""
    return np.dtype(dtype.char.lower()) if dtype.kind == "c" else dtype


def is_half(dtype: DType) -> bool:
    """Whether ``dtype`` is float16 or bfloat16, which are updated through float32."""
    return dtype in _HALVES


def bits(array: Array) -> Array:
    """Return a dense array viewed as unsigned integers, which every MPI can move."""
    size = array.dtype.itemsize
    return array.view(f"u{size}" if size in (1, 2, 4, 8) else np.uint8)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a parameter lies in its group: elements ``start`` to ``stop``."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one dtype in one place, one after another.

    Elements are of dtype ``element``; a complex number is two of them. ``wire`` is the
    dtype in which gradients are sent, ``update`` the one in which the optimizer works. The
    ``place`` is this rank's own business, and ``xp`` the library that makes arrays there.
    """

    label: str
    dtype: DType
    wire: DType
    trainable: bool
    entries: tuple[Entry, ...]
    place: str = field(default="host", compare=False)
    xp: Any = field(default=np, compare=False, repr=False)

    @property
    def element(self) -> DType:
        return real(self.dtype)

    @property
    def update(self) -> DType:
        return np.dtype(np.float32) if is_half(self.dtype) else self.element

    @property
    def count(self) -> int:
        """Elements without the padding."""
        return self.entries[-1].stop if self.entries else 0

    def share(self, size: int) -> int:
        """Elements that each of ``size`` ranks owns, padding included."""
        return -(-self.count // size)

    def padded(self, size: int) -> int:
        """Elements of all ranks together."""
        return self.share(size) * size

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parameters as views of a whole flat array."""
        return {
            entry.name: flat[entry.start : entry.stop].view(self.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def read(self, values: Mapping[str, Array], low: int, target: Array) -> None:
        """Set ``target`` to the elements of ``values`` from ``low`` on; padding is zero."""
        high = low + target.size
        for entry in self.entries:
            first, last = max(low, entry.start), min(high, entry.stop)
            if first < last:
                piece = slice(first - entry.start, last - entry.start)
                target[first - low : last - low] = elements(values[entry.name])[piece]
        target[max(0, self.count - low) :] = 0

    def write(self, flat: Array, values: Mapping[str, Array]) -> None:
        """Set the arrays ``values`` to what a whole flat array holds."""
        for name, view in self.views(flat).items():
            values[name][...] = view


def elements(value: Array) -> Array:
    """Return an array as a dense vector of its elements, copied only if it must be."""
    return real_parts(dense(value).reshape(-1))


def objection(name: object, value: object, trainable: bool, updated: bool) -> str:
    """Return why an array cannot be a parameter, or an empty string if it can."""
    if not isinstance(name, str) or not name:
        return f"parameter name {name!r}, expected a string of one character or more"
    if not is_array(value):
        return f"parameter {name!r} of type {type(value).__name__}, expected {EXPECTED}"
    dtype = value.dtype
    if not dtype.isnative:
        return f"parameter {name!r} of dtype {dtype.str}, expected native byte order"
    if trainable and dtype not in TRAINABLE:
        known = ", ".join(one.name for one in TRAINABLE)
        return f"parameter {name!r} of dtype {dtype}; cast it to one of {known}, or freeze it"
    if dtype.kind not in "biufc" and dtype.isbuiltin != 2:
        return f"parameter {name!r} of dtype {dtype}, expected numbers"
    if updated and not writeable(value):
        return f"parameter {name!r} that is read-only; it has to be updated in place"
    return ""


def check(values: object, frozen: Collection[str], updated: bool) -> str:
    """Return what is wrong with a set of parameters, or an empty string."""
    if not isinstance(values, Mapping):
        return f"parameters of type {type(values).__name__}, expected arrays by name"
    unknown = sorted(map(repr, set(frozen) - set(values)))
    if unknown:
        return f"frozen={', '.join(unknown)}, which is no parameter"
    known: dict[tuple[str, int], str] = {}
    for name, value in values.items():
        fault = objection(name, value, name not in frozen, updated)
        if fault:
            return fault
        if updated and value.size:
            other = known.setdefault((place(value), address(value)), name)
            if other != name:
                return f"parameters {other!r} and {name!r} that share memory; pass it once"
    devices = scattered(values.values())
    return f"parameters on {devices}, expected those of one device" if devices else ""


class _Open:
    """A group that is being filled, in the place of its first parameter."""

    def __init__(self, first: Array) -> None:
        self.place, self.xp = place(first), library(first)
        self.entries: list[Entry] = []
        self.stop = 0

    def add(self, name: str, value: Array) -> None:
        start = self.stop
        self.stop += value.size * (2 if value.dtype.kind == "c" else 1)
        self.entries.append(Entry(name, value.shape, start, self.stop))


def plan(
    values: Mapping[str, Array],
    frozen: Collection[str],
    wire: DType | None,
    bucket_bytes: int | None = None,
    label: str = "",
    names: Iterable[str] | None = None,
) -> list[Group]:
    """Return groups of one dtype and place, trainable or frozen, in the order in which they fill.

    ``names`` is the order in which gradients are expected. A group is closed when it has
    ``bucket_bytes`` or more, None for one group per kind. ``wire`` replaces the dtype in
    which the gradients of 16-bit floats are sent.
    """
    groups: list[Group] = []
    opened: dict[tuple[str, DType, bool], _Open] = {}

    def close(key: tuple[str, DType, bool]) -> None:
        _, dtype, trainable = key
        full = opened.pop(key)
        sent = wire if wire is not None and is_half(dtype) else real(dtype)
        title = f"{label}{len(groups)}:{dtype.name}"
        entries = tuple(full.entries)
        groups.append(Group(title, dtype, sent, trainable, entries, full.place, full.xp))

    for name in values if names is None else names:
        value = values[name]
        key = place(value), value.dtype, name not in frozen
        if key not in opened:
            opened[key] = _Open(value)
        group = opened[key]
        group.add(name, value)
        if bucket_bytes is not None and group.stop * real(value.dtype).itemsize >= bucket_bytes:
            close(key)
    for key in list(opened):
        close(key)
    return groups

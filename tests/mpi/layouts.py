"""Buffers in every form that mpi4py takes, with canaries around them and in every gap.

A `Side` knows where each byte of its data lies by its own arithmetic, so what a call made
of a specification is seen without asking MPI.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from kinds import Array, Bytes, Kind, Rng
from mpi4py import MPI
from quirks import DERIVED

Starts: TypeAlias = npt.NDArray[np.intp]

CANARY = 64
POISON = 0xA5

ARRAYS = ("array", "fortran", "zero_d", "readonly")
PLAIN = (*ARRAYS, "typed", "counted", "shifted", "python")
VECTORS = ("counts", "displs", "gaps", "permuted", "gaps in items")
EVERY = (*PLAIN, *DERIVED, *VECTORS, "w")
IN_PLACE = "in_place"
SAME = "same_address"


class Side:
    """One side of a call: memory full of poison, the places of the data, the buffer
    specification."""

    def __init__(self, memory: Bytes, places: Starts, spec: Any) -> None:
        """Join the parts; ``places`` are indices into ``memory``."""
        self.memory = memory
        self.places = places
        self.spec = spec

    def put(self, data: Bytes, at: int = 0) -> None:
        """Set the data from its byte ``at`` on."""
        self.memory[self.places[at : at + data.size]] = data

    def data(self) -> Bytes:
        """Return the data, dense."""
        return self.memory[self.places]

    def strayed(self) -> int:
        """Return how many bytes outside of the data have changed."""
        outside = np.ones(self.memory.size, bool)
        outside[self.places] = False
        return int(np.count_nonzero(self.memory[outside] != POISON))


def fits(layout: str, kind: Kind) -> bool:
    """Return whether items of ``kind`` can be laid out so."""
    if layout in (IN_PLACE, SAME):
        return True
    if layout in ARRAYS:
        return kind.inferred
    return kind.datatype is not None or layout == "counts"


def side(layout: str, kind: Kind, counts: Sequence[int], rng: Rng) -> Side:
    """Make a side with blocks of ``counts`` items; all equal but for vector layouts."""
    if layout in VECTORS:
        return _vector(layout, kind, counts, rng)
    if layout in DERIVED:
        return _derived(layout, kind, counts, rng)
    return _plain(layout, kind, counts)


def _plain(layout: str, kind: Kind, counts: Sequence[int]) -> Side:
    total, extent = sum(counts), kind.extent
    skip, tail = {"shifted": (2, 1), "counted": (0, 3)}.get(layout, (0, 0))
    if layout == "python":
        return _python(kind, total)
    memory, inner = _memory((skip + total + tail) * extent)
    places = _places(kind, np.arange(skip, skip + total) * extent)
    spec: Any = [inner, kind.datatype]
    if layout in ARRAYS:
        spec = inner.view(kind.dtype)
        if layout == "fortran":
            rows = 2 if total % 2 == 0 else 1
            spec = spec.reshape((total // rows, rows)).T
        elif layout == "zero_d":
            spec = spec.reshape(())
        spec.flags.writeable = layout != "readonly"
    elif layout == "counted":
        spec = [inner, counts[0], kind.datatype]
    elif layout == "shifted":
        spec = [inner, (counts[0], skip), kind.datatype]
    return Side(memory, places, spec)


def _python(kind: Kind, total: int) -> Side:
    """Use an object of Python itself; canaries have no place there."""
    code = kind.dtype.char if kind.inferred else ""
    inside = code != "" and code in array.typecodes
    size = total * kind.extent
    owner: Any = array.array(code, bytes(size)) if inside else bytearray(size)
    memory = np.frombuffer(owner, np.uint8) if size else np.empty(0, np.uint8)
    memory[:] = POISON
    places = _places(kind, np.arange(total) * kind.extent, 0)
    return Side(memory, places, owner if inside else [owner, kind.datatype])


def _derived(layout: str, kind: Kind, counts: Sequence[int], rng: Rng) -> Side:
    """Use a derived type of k items, k a divisor of the items of a block."""
    count = counts[0]
    k = int(rng.choice([k for k in range(1, min(count, 64) + 1) if count % k == 0] or [1]))
    datatype, offsets, extent = item_type(layout, kind, k)
    each = count // k
    starts = np.add.outer(np.arange(each * len(counts)) * extent, offsets).reshape(-1)
    memory, inner = _memory(each * len(counts) * extent)
    return Side(memory, _places(kind, starts), [inner, each, datatype])


def item_type(layout: str, kind: Kind, k: int) -> tuple[MPI.Datatype, Starts, int]:
    """Return a type of ``k`` items, where they begin in it, and its extent."""
    base, extent = kind.datatype, kind.extent
    assert base is not None
    at = np.arange(k) * extent
    if layout == "contiguous":
        made, reach = base.Create_contiguous(k), k * extent
    elif layout == "vector":
        made, at, reach = base.Create_vector(k, 1, 2), 2 * at, (2 * k - 1) * extent
    elif layout == "indexed":
        made = base.Create_indexed_block(1, range(k - 1, -1, -1))
        at, reach = at[::-1], k * extent
    elif layout == "struct":
        head = k // 2
        displs = [0, (head + 1) * extent]
        made = MPI.Datatype.Create_struct([head, k - head], displs, [base, base])
        at = at + extent * (np.arange(k) >= head)
        # A type with nothing at its head begins where its data does.
        made, reach = made.Create_resized(0, (k + 1) * extent), (k + 1) * extent
    else:
        made = base.Create_contiguous(k).Create_resized(0, (k + 2) * extent)
        reach = (k + 2) * extent
    return made.Commit(), at, reach


def _vector(layout: str, kind: Kind, counts: Sequence[int], rng: Rng) -> Side:
    """Lay blocks out by counts and displacements."""
    datatype, extent = kind.datatype, kind.extent
    order = np.arange(len(counts))
    gaps = np.zeros(len(counts) + 1, np.intp)
    if layout == "permuted":
        order = rng.permutation(len(counts))
    if layout in ("gaps", "permuted", "gaps in items"):
        gaps = rng.integers(0, 4, len(counts) + 1)
    if layout == "gaps in items":
        datatype, _, extent = item_type("resized", kind, 1)
    ends = list(accumulate(int(gaps[i]) + counts[int(block)] for i, block in enumerate(order)))
    displs = np.empty(len(counts), np.intp)
    displs[order] = np.array(ends) - np.array(counts)[order]
    memory, inner = _memory((ends[-1] + int(gaps[-1])) * extent)
    items = [displ + np.arange(count) for displ, count in zip(displs, counts, strict=True)]
    places = _places(kind, np.concatenate(items) * extent)
    where = displs.tolist()
    data: Array = inner.view(kind.dtype) if kind.inferred else inner
    spec = {
        "counts": [data, list(counts)] if kind.inferred else [inner, list(counts), datatype],
        "displs": [inner, list(counts), where, datatype],
    }.get(layout, [inner, (list(counts), where), datatype])
    return Side(memory, places, spec)


def side_w(kind: Kind, counts: Sequence[int], rng: Rng) -> Side:
    """Make a side whose blocks have a datatype each, in a random order with gaps."""
    kinds = [str(one) for one in rng.choice(DERIVED, len(counts))]
    types = [item_type(one, kind, max(count, 1)) for one, count in zip(kinds, counts, strict=True)]
    displs, at = [0] * len(counts), 0
    for block in rng.permutation(len(counts)):
        displs[block] = at = at + int(rng.integers(0, 3)) * kind.extent
        at += types[block][2] if counts[block] else 0
    memory, inner = _memory(at)
    starts = [
        displ + offsets if count else offsets[:0]
        for displ, count, (_, offsets, _) in zip(displs, counts, types, strict=True)
    ]
    spec = [inner, ([min(count, 1) for count in counts], displs), [one for one, _, _ in types]]
    return Side(memory, _places(kind, np.concatenate(starts)), spec)


def _memory(nbytes: int) -> tuple[Bytes, Bytes]:
    """Return poisoned memory and the part of it that lies between the canaries."""
    raw = np.empty(nbytes + 3 * CANARY, np.uint8)
    skip = -raw.__array_interface__["data"][0] % CANARY
    memory = raw[skip : skip + nbytes + 2 * CANARY]
    memory[:] = POISON
    return memory, memory[CANARY : CANARY + nbytes]


def _places(kind: Kind, starts: Starts, begin: int = CANARY) -> Starts:
    return begin + np.add.outer(starts, kind.places).reshape(-1).astype(np.intp)

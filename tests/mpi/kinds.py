"""What the matrix is made of: kinds of items, operators, and data for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import quirks
from mpi4py import MPI

import mpicoll

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Rng: TypeAlias = np.random.Generator


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of item. ``places`` are the bytes of its extent that are data, in the order
    of its signature; ``datatype`` is None for what MPI has no type for, ``dtype`` (of NumPy)
    for what NumPy can not compute with."""

    name: str
    family: str
    datatype: MPI.Datatype | None
    dtype: Any
    extent: int
    places: npt.NDArray[np.intp]

    @property
    def nbytes(self) -> int:
        """The bytes of the signature."""
        return len(self.places)

    @property
    def inferred(self) -> bool:
        """Whether an array of the NumPy dtype alone says that it is of this kind."""
        if self.dtype is None:
            return False
        if self.datatype is None:
            return True
        try:
            return MPI.Datatype.fromcode(self.dtype.char) == self.datatype
        except ValueError:
            return False


# NumPy type by name; what is not listed is moved, and reduced by nobody's arithmetic but
# the MPI's.
_DTYPES = {
    "integer": {
        "b": "INT8_T SIGNED_CHAR CHAR INTEGER1",
        "h": "INT16_T SHORT INTEGER2",
        "i": "INT32_T INT INTEGER INTEGER4",
        "q": "INT64_T LONG_LONG INTEGER8 AINT OFFSET COUNT",
        "l": "LONG",
        "B": "UINT8_T UNSIGNED_CHAR BYTE",
        "H": "UINT16_T UNSIGNED_SHORT",
        "I": "UINT32_T UNSIGNED",
        "Q": "UINT64_T UNSIGNED_LONG_LONG",
        "L": "UNSIGNED_LONG",
    },
    "float": {
        "e": "FLOAT16_T",
        "f": "FLOAT REAL REAL4",
        "d": "DOUBLE DOUBLE_PRECISION REAL8",
        "g": "LONG_DOUBLE",
    },
    "complex": {
        "F": "C_FLOAT_COMPLEX C_COMPLEX CXX_FLOAT_COMPLEX COMPLEX COMPLEX8",
        "D": "C_DOUBLE_COMPLEX CXX_DOUBLE_COMPLEX DOUBLE_COMPLEX COMPLEX16",
        "G": "C_LONG_DOUBLE_COMPLEX CXX_LONG_DOUBLE_COMPLEX",
    },
    "logical": {
        "?": "C_BOOL CXX_BOOL",
        "b": "LOGICAL1",
        "h": "LOGICAL2",
        "i": "LOGICAL LOGICAL4",
        "q": "LOGICAL8",
    },
    "quad": {"V16": "REAL16", "V32": "COMPLEX32"},
    "pair": {
        "f4,i4": "FLOAT_INT",
        "f8,i4": "DOUBLE_INT",
        "l,i4": "LONG_INT",
        "i4,i4": "TWOINT",
        "i2,i4": "SHORT_INT",
        "g,i4": "LONG_DOUBLE_INT",
    },
    "character": {"B": "CHARACTER"},
    "opaque": {"V1": "PACKED", "V4": "WCHAR"},
}


def _predefined() -> list[Kind]:
    found: dict[int, Kind] = {}
    for family, codes in _DTYPES.items():
        for code, names in codes.items():
            for name in names.split():
                datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
                if datatype == MPI.DATATYPE_NULL or datatype.Get_size() == 0:
                    continue
                dtype = np.dtype(code, align=True)
                known: Any = dtype
                places = np.arange(dtype.itemsize)
                if dtype.names:
                    fields = [(at, field) for field, at, *_ in dtype.fields.values()]  # type: ignore[union-attr]
                    places = np.concatenate([at + np.arange(one.itemsize) for at, one in fields])
                elif dtype.kind == "V":
                    known = None
                extent = datatype.Get_extent()[1]
                assert (len(places), dtype.itemsize) == (datatype.Get_size(), extent), name
                kind = Kind(name, family, datatype, known, extent, places)
                found.setdefault(datatype.handle, kind)
    return list(found.values())


def _derived() -> list[Kind]:
    """Kinds of items that only user operators reduce, and one that only moves."""
    word = MPI.UINT64_T
    vector = word.Create_vector(2, 1, 2)
    types = {
        "affine": word.Create_contiguous(2),
        "affine with gaps": vector.Create_resized(0, 32),
        "trace": MPI.BYTE.Create_contiguous(TRACE),
        "record": MPI.Datatype.Create_struct(
            [1, 1, 2], [0, 8, 16], [MPI.INT8_T, MPI.DOUBLE, MPI.INT16_T]
        ).Create_resized(0, 24),
    }
    places = {
        "affine": np.arange(16),
        "affine with gaps": np.r_[0:8, 16:24],
        "trace": np.arange(TRACE),
        "record": np.r_[0:1, 8:16, 16:20],
    }
    return [
        Kind(name, name.split()[0], one.Commit(), None, one.Get_extent()[1], places[name])
        for name, one in types.items()
    ]


#: Bytes of a trace: its length, then as many ranks.
TRACE = 64


@cache
def kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    every = [
        *_predefined(),
        Kind("bfloat16", "float", None, bfloat16, 2, np.arange(2)),
        *_derived(),
    ]
    return {kind.name: kind for kind in every}


# -- operators --------------------------------------------------------------------------


def _maximum(one: Any, other: Any, datatype: MPI.Datatype) -> None:
    kind = next(k for k in kinds().values() if k.datatype == datatype)
    out = np.frombuffer(other, kind.dtype)
    np.maximum(np.frombuffer(one, kind.dtype), out, out=out)


def _first(one: Any, other: Any, datatype: MPI.Datatype) -> None:
    other[:] = one


def _compose(one: Any, other: Any, datatype: MPI.Datatype) -> None:
    """Compose x -> a x + b, modulo 2**64: associative, exact and not commutative."""
    stride = datatype.Get_extent()[1] // 8
    left, right = (np.frombuffer(one_, np.uint64) for one_ in (one, other))
    b = stride // 2
    right[b::stride] += right[::stride] * left[b::stride]
    right[::stride] *= left[::stride]


def _append(one: Any, other: Any, datatype: MPI.Datatype) -> None:
    """Join traces of ranks: the result says in which order the operands came."""
    left, right = (np.frombuffer(one_, np.uint8).reshape(-1, TRACE) for one_ in (one, other))
    for head, tail in zip(left, right, strict=True):
        joined = [*head[1 : 1 + head[0]], *tail[1 : 1 + tail[0]]][: TRACE - 1]
        tail[0] = len(joined)
        tail[1 : 1 + len(joined)] = joined


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator, and the families or kinds that it is tried on."""

    name: str
    op: Any
    commutative: bool = True
    only: tuple[str, ...] = ()

    @property
    def native(self) -> bool:
        """Whether MPI has it."""
        return isinstance(self.op, MPI.Op)

    def allows(self, kind: Kind) -> bool:
        """Whether the operator is defined for ``kind``: for the MPI's own, by its word."""
        if self.only:
            return kind.name in self.only
        if kind.family in ("affine", "trace", "record"):
            return False
        if not self.native:
            numbers = ("integer", "float", "complex")
            return kind.family in numbers and kind.name not in ("BYTE", "CHAR")
        if kind.datatype is None:
            return self.name in ("SUM", "PROD", "MAX", "MIN")
        if kind.family == "float" and self.name in ("LAND", "LOR", "LXOR"):
            return False  # Intel MPI allows them, the standard does not; no value is right
        return _allowed(self.name, kind.name)

    def exact(self, kind: Kind) -> bool:
        """Whether a result does not depend on where the brackets are, to the bit."""
        rounds = self.name in ("SUM", "PROD", "AVG") and kind.family in ("float", "complex")
        return not rounds


@cache
def _allowed(op: str, kind: str) -> bool:
    datatype = kinds()[kind].datatype
    one, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    try:
        getattr(MPI, op).Reduce_local([one, 1, datatype], [other, 1, datatype])
    except MPI.Exception:
        return False
    return True


PREDEFINED = (
    *("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"),
    *("MINLOC", "MAXLOC"),
)


@cache
def operators() -> dict[str, Operator]:
    """Return all operators by name; those of the user are made once and never freed."""
    create: Callable[..., MPI.Op] = MPI.Op.Create
    every = [
        *(Operator(name, getattr(MPI, name)) for name in PREDEFINED),
        Operator("AVG", mpicoll.AVG),
        Operator("maximum", create(_maximum, True), True, ("INT32_T", "DOUBLE", "UINT8_T")),
        Operator("first", create(_first, False), False, ("INT16_T", "DOUBLE", "C_BOOL")),
        Operator("compose", create(_compose, False), False, ("affine", "affine with gaps")),
        Operator("append", create(_append, False), False, ("trace",)),
    ]
    return {operator.name: operator for operator in every}


# -- data -------------------------------------------------------------------------------


def noise(kind: Kind, count: int, rng: Rng) -> Bytes:
    """Return the bytes of ``count`` items of any bits, to be moved."""
    if kind.family == "logical":
        return _bytes(rng.integers(0, 2, count).astype(kind.dtype))
    return rng.integers(0, 256, count * kind.nbytes, np.uint8)


def operands(kind: Kind, operator: Operator, count: int, rank: int, rng: Rng) -> Bytes:
    """Return the dense bytes of ``count`` items that are worth reducing."""
    dtype = kind.dtype
    if kind.family == "trace":
        traces = np.zeros((count, TRACE), np.uint8)
        traces[:, :2] = 1, rank
        return traces.reshape(-1)
    if kind.family in ("integer", "character"):
        if operator.name == "AVG":
            return _bytes(rng.integers(0 if dtype.kind == "u" else -15, 15, count).astype(dtype))
        if operator.name == "SUM" and quirks.SATURATES and dtype.itemsize <= 2:
            return _bytes(rng.integers(0, 3, count).astype(dtype))
        # Half of any bits, half small ones, so that zeros and ties occur.
        small = rng.integers(0, 3, count).astype(dtype)
        wild = noise(kind, count, rng).view(dtype)
        return _bytes(np.where(rng.integers(0, 2, count) == 0, small, wild))
    if kind.family == "pair":
        items = np.zeros(count, dtype)
        items["f0"], items["f1"] = rng.integers(-3, 3, count), rng.integers(0, 100, count)
        return items.view(np.uint8).reshape(count, kind.extent)[:, kind.places].reshape(-1)
    if kind.family == "quad":
        # Powers of two: their sums and products are exact, so NumPy needs no such type.
        words = np.zeros((count, kind.nbytes // 16, 2), np.uint64)
        words[..., 1] = (16383 + rng.integers(0, 3, words.shape[:2]).astype(np.uint64)) << 48
        return _bytes(words.reshape(-1))
    if kind.family in ("float", "complex"):
        # Products of [0.75, 1.25] neither vanish nor overflow in 16 bits; sums may cancel.
        low, high = (0.75, 1.25) if operator.name == "PROD" else (0.5, 2.0)
        parts = 2 if kind.family == "complex" else 1
        values = rng.uniform(low, high, (parts, count)) * rng.choice([-1.0, 1.0], (parts, count))
        if kind.family == "complex":
            scale = np.sqrt(0.5) if operator.name == "PROD" else 1.0
            return _bytes(((values[0] + 1j * values[1]) * scale).astype(dtype))
        return _bytes(values[0].astype(dtype))
    return noise(kind, count, rng)


def _bytes(values: Array) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)

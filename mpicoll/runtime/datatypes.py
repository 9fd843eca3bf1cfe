"""What is known of an MPI datatype: sizes, whether it is dense, its NumPy counterpart."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.runtime.faults import CallError

DType: TypeAlias = np.dtype[Any]


class Item(NamedTuple):
    """An item type. ``datatype`` is None where MPI has none; it then moves as bytes.

    ``nbytes`` is the size of its signature; ``dense`` says that items in memory are that
    signature, in order and without gaps. ``dtype`` is set where NumPy can compute with it.
    """

    datatype: MPI.Datatype | None
    dtype: DType | None
    nbytes: int
    extent: int
    true_lb: int
    true_ub: int
    dense: bool

    @property
    def name(self) -> str:
        """The name for messages."""
        if self.datatype is None:
            return str(self.dtype)
        known = _NAMES.get(self.datatype.handle)
        return known or self.datatype.Get_name() or "derived datatype"

    def same(self, other: Item) -> bool:
        """Whether both are the same datatype."""
        if self.datatype is None or other.datatype is None:
            return self.datatype is other.datatype and self.dtype == other.dtype
        return self.datatype == other.datatype


def _numpy_counterparts() -> dict[int, DType]:
    """Return NumPy dtypes by the handle of the datatype, for what NumPy computes with."""
    named = {
        "?": ["C_BOOL", "CXX_BOOL"],
        "i1": ["INT8_T", "SIGNED_CHAR", "INTEGER1"],
        "i2": ["INT16_T", "SHORT", "INTEGER2"],
        "i4": ["INT32_T", "INT", "INTEGER", "INTEGER4"],
        "i8": ["INT64_T", "LONG_LONG", "INTEGER8", "AINT", "OFFSET", "COUNT"],
        "u1": ["UINT8_T", "UNSIGNED_CHAR"],
        "u2": ["UINT16_T", "UNSIGNED_SHORT"],
        "u4": ["UINT32_T", "UNSIGNED"],
        "u8": ["UINT64_T", "UNSIGNED_LONG_LONG"],
        "l": ["LONG"],
        "L": ["UNSIGNED_LONG"],
        "f2": ["FLOAT16_T", "REAL2"],
        "f4": ["FLOAT", "REAL", "REAL4"],
        "f8": ["DOUBLE", "DOUBLE_PRECISION", "REAL8"],
        "g": ["LONG_DOUBLE"],
        "c8": ["C_COMPLEX", "C_FLOAT_COMPLEX", "CXX_FLOAT_COMPLEX", "COMPLEX", "COMPLEX8"],
        "c16": ["C_DOUBLE_COMPLEX", "CXX_DOUBLE_COMPLEX", "DOUBLE_COMPLEX", "COMPLEX16"],
        "G": ["C_LONG_DOUBLE_COMPLEX", "CXX_LONG_DOUBLE_COMPLEX"],
    }
    found: dict[int, DType] = {}
    for code, names in named.items():
        dtype = np.dtype(code)
        for name in names:
            datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
            if datatype != MPI.DATATYPE_NULL and datatype.Get_size() == dtype.itemsize:
                found[datatype.handle] = dtype
    return found


_COUNTERPARTS = _numpy_counterparts()
_NOTHING = np.empty(0, np.uint8)
_PREDEFINED: dict[int, Item] = {}
_NAMES: dict[int, str] = {}


def describe(datatype: MPI.Datatype) -> Item:
    """Return what is known of ``datatype``; raises ERR_TYPE where it is null or not committed."""
    # Handles of freed datatypes come again, so only those that live for ever are kept.
    known = _PREDEFINED.get(datatype.handle)
    if known is not None:
        return known
    try:
        return _described(datatype)
    except MPI.Exception as error:
        null = datatype == MPI.DATATYPE_NULL
        raise CallError(
            error.Get_error_class(), f"the datatype is {'null' if null else 'not committed'}"
        ) from None


def _described(datatype: MPI.Datatype) -> Item:
    nbytes = datatype.Get_size()
    _, extent = datatype.Get_extent()
    if not datatype.is_predefined and extent:
        # A pack of nothing raises ERR_TYPE for a datatype that was not committed, before
        # anything is sent. Open MPI crashes in Pack_size, mpi4py where the extent is 0.
        datatype.Pack(_NOTHING, _NOTHING, 0, MPI.COMM_SELF)
    true_lb, true_extent = datatype.Get_true_extent()
    item = Item(
        datatype,
        _COUNTERPARTS.get(datatype.handle),
        nbytes,
        extent,
        true_lb,
        true_lb + true_extent,
        true_lb == 0 and nbytes == extent == true_extent and _in_order(datatype),
    )
    if datatype.is_predefined:
        _PREDEFINED[datatype.handle] = item
        _NAMES[datatype.handle] = datatype.Get_name()
    return item


def _in_order(datatype: MPI.Datatype) -> bool:
    """Whether the bytes of the signature are in the order of memory.

    An indexed type can permute without leaving a gap; of the derived types only copies
    and rows of what is in order are sure to be in order.
    """
    if datatype.is_predefined:
        return True
    base, combiner, parameters = datatype.decode()
    in_order = combiner in ("DUP", "CONTIGUOUS", "RESIZED") and _in_order(base)
    for member in parameters.get("datatypes", [base]):  # new handles, ours to free
        if not member.is_predefined:
            member.Free()
    return in_order


#: Item types by type number, which tells int64 from longlong as mpi4py does; as dtypes
#: the two are equal. The types of ml_dtypes have numbers of their own.
_OF_NUMBER: dict[int, Item | None] = {}


def _of_dtype(dtype: DType) -> Item | None:
    """Return the item type of a NumPy dtype, None where mpi4py has the say."""
    if not dtype.isnative:
        return None
    number = dtype.num
    if number not in _OF_NUMBER:
        _OF_NUMBER[number] = _find(dtype)
    return _OF_NUMBER[number]


def _find(dtype: DType) -> Item | None:
    size = dtype.itemsize
    if dtype.type.__module__ == ml_dtypes.__name__:
        return Item(None, dtype, size, size, 0, size, True)
    if dtype.char not in "?bhilqBHILQefdgFDG":
        return None
    datatype = MPI._typedict.get(dtype.char, MPI.DATATYPE_NULL)
    if datatype != MPI.DATATYPE_NULL:
        return describe(datatype)._replace(dtype=dtype)
    return Item(None, dtype, size, size, 0, size, True) if dtype.char == "e" else None


def of_dtype(dtype: DType | None) -> Item:
    """Return the item type of a dtype, as mpi4py would of an array of it; raises KeyError."""
    found = None if dtype is None else _of_dtype(dtype)
    if found is None:
        raise KeyError(f"cannot map {dtype!s} to MPI datatype")
    return found


def of_array(array: np.ndarray[Any, Any]) -> Item | None:
    """Return the item type of a NumPy array of a usual dtype, else None."""
    return _of_dtype(array.dtype)


def lookup(array: Any) -> Item:
    """Return the item type of any array; raises what mpi4py raises where there is none."""
    found = _of_dtype(array.dtype)
    if found is not None:
        return found
    try:
        code = memoryview(array).format
    except ValueError as error:
        raise BufferError(f"message: {error}") from None
    if not array.dtype.isnative:
        raise BufferError(f"format string {code!r} with non-native byte order")
    if code in MPI._typedict and MPI._typedict[code] != MPI.DATATYPE_NULL:
        return describe(MPI._typedict[code])
    raise KeyError(f"cannot map {code!r} to MPI datatype")


def element_name(spec: Any) -> str:
    """Return the basic type that the items of a buffer argument consist of, such as float64.

    "" where there are no items, where they are not of one type, where they are bytes, which go
    with all of them, and where nobody but the MPI knows. What is wrong with ``spec`` is for others
    to say.
    """
    try:
        array, *others = spec if isinstance(spec, (list, tuple)) else (spec,)
        if not np.size(array) or (others and _are_none(others[0])):
            return ""
        named = next((one for one in others if isinstance(one, (MPI.Datatype, str))), None)
        if isinstance(named, str):
            named = MPI._typedict[named]
        dtype = lookup(array).dtype if named is None else _basic(named)
    except Exception:
        return ""
    return "" if dtype is None else str(dtype)


def _are_none(counts: Any) -> bool:
    """Whether the second part of a buffer argument, be it counts or more, counts no items."""
    if counts is None or isinstance(counts, (MPI.Datatype, str)):
        return False
    if isinstance(counts, (list, tuple)) and counts and np.ndim(counts[0]):
        counts = counts[0]
    return not np.any(counts)


def _basic(datatype: MPI.Datatype) -> DType | None:
    if datatype.is_predefined:
        return _COUNTERPARTS.get(datatype.handle)
    base, _, parameters = datatype.decode()
    found = set()
    for member in parameters.get("datatypes", [base]):  # new handles, ours to free
        found.add(_basic(member))
        if not member.is_predefined:
            member.Free()
    return found.pop() if len(found) == 1 else None

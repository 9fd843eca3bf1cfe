"""Reduction operators bound to an item type: NumPy loops, or the MPI's own.

Which operator a type allows is asked of the MPI itself, by reducing one item, so that
nothing is refused that the MPI's own collectives take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.runtime.buffers import Memory
from mpicoll.runtime.datatypes import DType, Item, describe
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError


class AverageOp:
    """The operator of `mpicoll.AVG`: a sum, divided by the number of ranks at the end."""

    def __repr__(self) -> str:
        return "mpicoll.AVG"


AVG = AverageOp()

#: Items per piece of a wide fold, whose accumulator then stays in cache.
WIDE_PIECE = 1 << 14

_UFUNCS = {
    "SUM": (MPI.SUM, np.add, "iufcV"),
    "PROD": (MPI.PROD, np.multiply, "iufcV"),
    "MAX": (MPI.MAX, np.maximum, "iufV"),
    "MIN": (MPI.MIN, np.minimum, "iufV"),
    "LAND": (MPI.LAND, np.logical_and, "biu"),
    "LOR": (MPI.LOR, np.logical_or, "biu"),
    "LXOR": (MPI.LXOR, np.logical_xor, "biu"),
    "BAND": (MPI.BAND, np.bitwise_and, "iu"),
    "BOR": (MPI.BOR, np.bitwise_or, "iu"),
    "BXOR": (MPI.BXOR, np.bitwise_xor, "iu"),
}
_BY_HANDLE = {op.handle: (name, ufunc, kinds) for name, (op, ufunc, kinds) in _UFUNCS.items()}


class Reducer(Protocol):
    """An operator bound to an item type.

    ``wide`` says that it sums or multiplies 16-bit floats: a fold of more than two operands
    accumulates in float32 and rounds once. ``finish``, of AVG only, divides a result by
    the number of ranks.
    """

    commutative: bool
    item_bytes: int
    wide: bool
    finish: Callable[[Bytes, int], None] | None

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold ``operands`` from the left into ``target``, which may be one of two."""


class _NumpyReducer:
    """Loops of NumPy. Warnings are off: MPI has none, and one turned into an error on
    one rank would leave the others waiting."""

    def __init__(self, ufunc: np.ufunc, dtype: DType, wide: bool, average: bool) -> None:
        self.commutative = True
        self.item_bytes = dtype.itemsize
        self.wide = wide
        self.finish: Callable[[Bytes, int], None] | None = self._divide if average else None
        self._ufunc = ufunc
        self._dtype = dtype

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        dtype, ufunc = self._dtype, self._ufunc
        out = target.view(dtype)
        views = [operand.view(dtype) for operand in operands]
        with np.errstate(all="ignore"):
            if self.wide and len(views) > 2:
                self._fold_wide(out, views)
                return
            ufunc(views[0], views[1], out=out)
            for view in views[2:]:
                ufunc(out, view, out=out)

    def _fold_wide(self, out: Any, views: Sequence[Any]) -> None:
        for low in range(0, out.size, WIDE_PIECE):
            piece = slice(low, low + WIDE_PIECE)
            total = views[0][piece].astype(np.float32)
            for view in views[1:]:
                self._ufunc(total, view[piece].astype(np.float32), out=total)
            out[piece] = total.astype(self._dtype)

    def _divide(self, result: Bytes, size: int) -> None:
        values = result.view(self._dtype)
        if self._dtype.kind in "iu":
            # Truncation towards zero, as torch has it; floor division rounds down.
            negative = (values < 0) & (values % size != 0)
            np.floor_divide(values, size, out=values)
            values += negative
        elif self.wide:
            values[:] = (values.astype(np.float32) / np.float32(size)).astype(self._dtype)
        else:
            np.divide(values, size, out=values)


class _NativeReducer:
    """The MPI's own loop, `Op.Reduce_local`: user operators, MINLOC, types NumPy lacks.

    A user operator that raises ends the job, as it does in mpi4py's own collectives.
    """

    def __init__(self, op: MPI.Op, item: Item) -> None:
        self.commutative = op.Is_commutative()
        self.item_bytes = item.nbytes
        self.wide = False
        self.finish: Callable[[Bytes, int], None] | None = None
        self._op = op
        self._item = item

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        count = target.size // self.item_bytes if self.item_bytes else 0
        if count == 0:
            return
        # inout = in op inout, so the running value is the input and each next operand a
        # copy that becomes the running value. Copies also align what the MPI reads.
        running = self._laid_out(operands[0], count)
        for operand in operands[1:]:
            inout = self._laid_out(operand, count)
            self._op.Reduce_local(self._spec(running, count), self._spec(inout, count))
            running = inout
        running.pack(0, count, self._item, target)

    def _spec(self, memory: Memory, count: int) -> list[Any]:
        return [MPI.memory.fromaddress(memory.address, 1), count, self._item.datatype]

    def _laid_out(self, packed: Bytes, count: int) -> Memory:
        """Return scratch with ``count`` items laid out as the datatype has them."""
        item = self._item
        reach = (count - 1) * item.extent
        low = item.true_lb + min(0, reach)
        scratch = np.empty(item.true_ub + max(0, reach) - low + 2 * _ALIGNMENT, np.uint8)
        # The address of an item is aligned; its data may begin before or behind it.
        begin = scratch.__array_interface__["data"][0] + _ALIGNMENT - low
        memory = Memory(begin - begin % _ALIGNMENT, None, False, (scratch,))
        memory.unpack(0, count, item, packed)
        return memory


_ALIGNMENT = 64


def reducer(op: MPI.Op | AverageOp, item: Item) -> Reducer:
    """Return ``op`` for items; an operator that the type does not allow raises ERR_OP."""
    if isinstance(op, AverageOp):
        if item.dtype is None or item.dtype.kind == "b":
            raise CallError(MPI.ERR_OP, f"{op} has no meaning for {item.name}")
        return _bound(MPI.SUM.handle, *_key(item), True)
    if not isinstance(op, MPI.Op):
        raise TypeError(f"expected an MPI.Op or mpicoll.AVG, got {type(op).__name__}")
    if item.datatype is None or (op.is_predefined and item.datatype.is_predefined):
        return _bound(op.handle, *_key(item), False)
    _ask(op, item)
    return _NativeReducer(op, item)


def _key(item: Item) -> tuple[int | None, DType | None]:
    """Return what identifies a type for ever; used for predefined ones only."""
    return (None if item.datatype is None else item.datatype.handle), item.dtype


@lru_cache(maxsize=1024)
def _bound(op_handle: int, type_handle: int | None, dtype: DType | None, average: bool) -> Reducer:
    op = MPI.Op.fromhandle(op_handle)
    name, ufunc, kinds = _BY_HANDLE.get(op_handle, ("", None, ""))
    if type_handle is None:
        assert dtype is not None
        if ufunc is None or dtype.kind not in kinds:
            raise CallError(MPI.ERR_OP, f"the operator is not defined for {dtype}")
    else:
        item = describe(MPI.Datatype.fromhandle(type_handle))
        _ask(op, item)
        if ufunc is None or dtype is None or dtype.kind not in kinds:
            return _NativeReducer(op, item)
    return _NumpyReducer(ufunc, dtype, name in ("SUM", "PROD") and _narrow(dtype), average)


def _narrow(dtype: DType) -> bool:
    """Whether ``dtype`` is a floating type of at most 16 bits."""
    if dtype.itemsize > 2 or dtype.kind not in "fV":
        return False
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return False
    return True


def _ask(op: MPI.Op, item: Item) -> None:
    """Let the MPI reduce one item; raise its verdict with operator and type in words."""
    if not op.is_predefined:
        return
    low, high = min(0, item.true_lb), max(item.true_ub, item.extent, 1)
    scratch = [np.zeros(high - low + _ALIGNMENT, np.uint8) for _ in range(2)]
    one, other = (
        [MPI.memory.fromaddress(array.__array_interface__["data"][0] - low, 1), 1, item.datatype]
        for array in scratch
    )
    try:
        op.Reduce_local(one, other)
    except MPI.Exception as error:
        name, _, _ = _BY_HANDLE.get(op.handle, ("the operator", None, ""))
        raise CallError(
            error.Get_error_class(), f"{name} is not defined for {item.name} by this MPI"
        ) from None

"""Reduction operators bound to an item type: our loops, NumPy's, or the MPI's own.

Which operator a type allows is asked of the MPI itself, by reducing one item, so that
nothing is refused that the MPI's own collectives take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll import kernels
from mpicoll.runtime.buffers import Memory, Piece
from mpicoll.runtime.datatypes import DType, Item, describe
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.products import ProductReducer


class AverageOp:
    """The operator of `mpicoll.AVG`: a sum, divided by the number of ranks at the end.

    Integers wrap in the sum as they do in MPI.SUM, and the division truncates.
    """

    def __repr__(self) -> str:
        return "mpicoll.AVG"


AVG = AverageOp()

#: Items per piece of a wide fold, whose accumulator then stays in cache.
WIDE_PIECE = 1 << 14

# Complex products have loops of their own, products.py; long double ones are the MPI's.
_UFUNCS = {
    "SUM": (MPI.SUM, np.add, "iufcV"),
    "PROD": (MPI.PROD, np.multiply, "iufV"),
    "MAX": (MPI.MAX, np.maximum, "iufV"),
    "MIN": (MPI.MIN, np.minimum, "iufV"),
    "LAND": (MPI.LAND, np.logical_and, "biuf"),
    "LOR": (MPI.LOR, np.logical_or, "biuf"),
    "LXOR": (MPI.LXOR, np.logical_xor, "biuf"),
    "BAND": (MPI.BAND, np.bitwise_and, "iu"),
    "BOR": (MPI.BOR, np.bitwise_or, "iu"),
    "BXOR": (MPI.BXOR, np.bitwise_xor, "iu"),
}
_BY_HANDLE = {op.handle: (name, ufunc, kinds) for name, (op, ufunc, kinds) in _UFUNCS.items()}


class Reducer(Protocol):
    """An operator bound to an item type.

    ``wide`` says that it sums or multiplies 16-bit floats: a fold of more than two operands
    accumulates in float32 and rounds once. ``finish``, of AVG only, divides a result by
    the number of ranks; a wide fold over ``mean_of`` operands, all there are, divides by
    itself before it rounds, so that a sum of float16 can not overflow. ``operator`` is its
    name, ``label`` tells operator and type from others, the same on all ranks. ``loop`` is
    what a device would have to compute, None where there is only the MPI's own loop.
    """

    operator: str
    label: str
    commutative: bool
    item_bytes: int
    wide: bool
    mean_of: int
    finish: Callable[[Bytes, int], None] | None
    loop: tuple[str, DType] | None

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold ``operands`` from the left into ``target``, which may be one of two."""


class _Local:
    """`Op.Reduce_local` on dense items: the MPI's own loop, three times as fast to call.

    It computes inout = in op inout, so the left operand is the in and the right one the
    inout. The order is kept even for sums: a NaN takes its bits from the first operand, and
    all ranks must get the same. ``swaps`` says that operands commute bit for bit.
    """

    def __init__(self, op: MPI.Op, datatype: MPI.Datatype, item_bytes: int, swaps: bool) -> None:
        self._reduce_local = op.Reduce_local
        self._datatype = datatype
        self._item_bytes = item_bytes
        self._swaps = swaps

    def pair(self, target: Bytes, left: Bytes, right: Bytes) -> None:
        """Set ``target``, which may be one of the two, to ``left op right``."""
        address: Callable[[Any], int] = MPI.Get_address
        at = address(target)
        if at != address(right):
            if at != address(left):
                target[:] = right
            elif self._swaps:
                left = right
            else:
                result = right.copy()
                self._into(left, result)
                target[:] = result
                return
        self._into(left, target)

    def fold(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold two or more operands from the left."""
        if len(operands) == 2:
            self.pair(target, operands[0], operands[1])
            return
        # Each operand is copied to where it becomes the running value; the last is target.
        turns = (target, np.empty_like(target))
        running = operands[0]
        for left, operand in zip(range(len(operands) - 2, -1, -1), operands[1:], strict=True):
            turns[left % 2][:] = operand
            self._into(running, turns[left % 2])
            running = turns[left % 2]

    def _into(self, left: Bytes, inout: Bytes) -> None:
        size, datatype = self._item_bytes, self._datatype
        count = inout.size // size
        if count <= COUNT_LIMIT:
            self._reduce_local([left, count, datatype], [inout, count, datatype])
            return
        for low in range(0, inout.size, COUNT_LIMIT * size):  # Open MPI's counts are 32-bit
            piece = slice(low, low + COUNT_LIMIT * size)
            self._into(left[piece], inout[piece])


class _NumpyReducer:
    """Loops of NumPy, and those of the MPI where a call costs more than its work.

    Both give the same bits. Warnings are off: MPI has none, and one turned into an error on
    one rank would leave the others waiting.
    """

    def __init__(self, name: str, ufunc: np.ufunc, dtype: DType, wide: bool, average: int) -> None:
        self.operator = "AVG" if average else name
        self.label = f"{self.operator} {dtype.str}"
        self.commutative = True
        self.item_bytes = dtype.itemsize
        self.wide = wide
        self.mean_of = average if wide else 0
        self.finish: Callable[[Bytes, int], None] | None = self._divide if average else None
        # A long double of x86 has 10 bytes of 16; the rest would differ between ranks.
        long = dtype.type in (np.longdouble, np.clongdouble)  # others have their letters, too
        self._padded = long and np.finfo(np.longdouble).nmant == 63
        self.loop: tuple[str, DType] | None = (name, dtype)
        self._ufunc = ufunc
        self._dtype = dtype
        self._local: _Local | None = None
        self._local_bytes = -1

    def prefer(self, op: MPI.Op, datatype: MPI.Datatype) -> None:
        """Let the MPI reduce two small operands, where it surely does what NumPy does.

        Not so for maxima of floats (NaN), logic on floats, which Intel MPI alone takes and
        gets wrong, booleans that are neither 0 nor 1, 16-bit floats (rounding), and short
        integers, whose sums Open MPI saturates where its vector loop runs.
        """
        kind = self._dtype.kind
        if self._dtype.itemsize < 4 or self._padded or kind == "b":
            return
        if kind == "f" and self._ufunc not in (np.add, np.multiply):
            return
        local = _Local(op, datatype, self.item_bytes, swaps=kind in "iu")
        if self._agrees(local):
            self._local = local
            self._local_bytes = 2048 if kind in "iu" else 8192

    def _agrees(self, local: _Local) -> bool:
        """Whether the MPI does with some telling pairs what NumPy does.

        Open MPI, for one, takes the signed MPI_OFFSET for unsigned. One element may go
        either way on two ranks, by the length of its piece, so they have to be the same.
        """
        values: list[float]
        if self._dtype.kind in "iu":
            limits = np.iinfo(self._dtype)
            values = [limits.min, limits.max, limits.max - 1, 0, 1, 2, 3, 100]
        else:
            tiny = float(np.finfo(self._dtype).tiny)
            values = [0.0, -0.0, 1.5, -2.25, 0.1, tiny, tiny / 4, np.inf, -np.inf]
        few = np.array(values, self._dtype)
        left = np.repeat(few, few.size).view(np.uint8)
        right = np.tile(few, few.size).view(np.uint8)
        ours, theirs = np.zeros_like(left), np.zeros_like(left)
        self.reduce(ours, [left, right])
        local.pair(theirs, left, right)
        both = np.array([ours.view(self._dtype), theirs.view(self._dtype)])
        same = (both[0] == both[1]) | (np.isnan(both[0]) & np.isnan(both[1]))
        return bool(same.all())

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        if 0 < target.size <= self._local_bytes and len(operands) == 2:
            assert self._local is not None
            self._local.pair(target, operands[0], operands[1])
            return
        dtype, ufunc = self._dtype, self._ufunc
        out = target.view(dtype)
        views = [operand.view(dtype) for operand in operands]
        with np.errstate(all="ignore"):
            if self.wide:
                self._fold_wide(out, views)
                return
            ufunc(views[0], views[1], out=out)
            for view in views[2:]:
                ufunc(out, view, out=out)
        if self._padded:
            target.reshape(-1, 16)[:, 10:] = 0

    def _fold_wide(self, out: Any, views: Sequence[Any]) -> None:
        for low in range(0, out.size, WIDE_PIECE):
            piece = slice(low, low + WIDE_PIECE)
            total = views[0][piece].astype(np.float32)
            for view in views[1:]:
                self._ufunc(total, view[piece].astype(np.float32), out=total)
            if len(views) == self.mean_of:
                total /= np.float32(self.mean_of)
            out[piece] = total

    def _divide(self, result: Bytes, size: int) -> None:
        dtype = self._dtype
        with np.errstate(all="ignore"):
            if self.wide:
                values = result.view(dtype)
                values[:] = values.astype(np.float32) / np.float32(size)
            elif dtype.kind in "fc":
                # The parts of a complex number one by one: its division rounds twice.
                parts = result.view(dtype.char.lower())
                np.divide(parts, parts.dtype.type(size), out=parts)
            else:
                self._divide_integers(result.view(dtype), size)

    def _divide_integers(self, values: Any, size: int) -> None:
        """Truncate towards zero, as torch has it; floor division rounds down."""
        # A number of ranks need not fit into the type; nor are the types of ml_dtypes divided.
        fits = self._dtype.kind in "iu" and size <= np.iinfo(self._dtype).max
        wide = values if fits else values.astype(np.int64)
        divisor = wide.dtype.type(size)
        wide -= np.fmod(wide, divisor)
        wide //= divisor
        if not fits:
            values[:] = wide


class _HalfReducer:
    """Loops of `mpicoll.kernels`, for float16 and bfloat16."""

    def __init__(self, name: str, dtype: DType, half: kernels.Half, average: int) -> None:
        self.operator = "AVG" if average else name
        self.label = f"{self.operator} {dtype}"
        self.commutative = True
        self.item_bytes = 2
        self.wide = name in ("SUM", "PROD")
        self.mean_of = average
        self.finish: Callable[[Bytes, int], None] | None = self._divide if average else None
        self.loop: tuple[str, DType] | None = (name, dtype)
        self._name = name
        self._half = half

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        if len(operands) == self.mean_of:
            self._mean(target, operands)
        else:
            self._half.reduce(self._name, target, operands)

    def _mean(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        total = np.empty(min(WIDE_PIECE, target.size // 2), np.float32)
        for low in range(0, target.size, 2 * WIDE_PIECE):
            piece = slice(low, low + 2 * WIDE_PIECE)
            part = total[: target[piece].size // 2]
            self._half.widen(part, operands[0][piece])
            for operand in operands[1:]:
                self._half.accumulate(part, operand[piece])
            with np.errstate(all="ignore"):
                part /= np.float32(self.mean_of)
            self._half.narrow(target[piece], part)

    def _divide(self, result: Bytes, size: int) -> None:
        self._half.scale(result, result, size, divide=True)


class _NativeReducer:
    """The MPI's own loop, `Op.Reduce_local`: user operators, MINLOC, types NumPy lacks.

    A user operator that raises ends the job, as it does in mpi4py's own collectives; one of
    `create_op` ends the collective.
    """

    def __init__(self, op: MPI.Op, item: Item) -> None:
        assert item.datatype is not None
        self.operator = self.label = operator_name(op)
        if op.is_predefined and item.dtype is not None:
            self.label += f" {item.dtype.str}"
        self.commutative = op.Is_commutative()
        self.item_bytes = item.nbytes
        self.wide = False
        self.mean_of = 0
        self.finish: Callable[[Bytes, int], None] | None = None
        self.loop: tuple[str, DType] | None = None
        self._op = op
        self._item = item
        self._local = _Local(op, item.datatype, item.nbytes, swaps=False)

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        if not target.size:
            return
        armed, _CAUGHT.armed = _CAUGHT.armed, True
        try:
            self._reduce(target, operands)
        finally:
            _CAUGHT.armed = armed
            error, _CAUGHT.error = _CAUGHT.error, None
        if error is not None:
            raise error

    def _reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        if self._item.dense:
            self._local.fold(target, operands)
            return
        reach = max(abs(self._item.extent), self.item_bytes)
        step = max(1, LAID_OUT_BYTES // reach) * self.item_bytes
        for low in range(0, target.size, step):
            self._fold(target[low : low + step], [one[low : low + step] for one in operands])

    def _fold(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold in scratch, where the items lie as the datatype has them."""
        count = target.size // self.item_bytes
        running, inout = self._scratch(count), self._scratch(count)
        piece = Piece(0, count, self._item)
        running.unpack(piece, operands[0])
        for operand in operands[1:]:
            inout.unpack(piece, operand)
            self._op.Reduce_local(self._spec(running, count), self._spec(inout, count))
            running, inout = inout, running
        running.pack(piece, target)

    def _spec(self, memory: Memory, count: int) -> list[Any]:
        return [MPI.memory.fromaddress(memory.address, 1), count, self._item.datatype]

    def _scratch(self, count: int) -> Memory:
        """Return memory for ``count`` items, aligned.

        A user operator may touch all of ``count`` extents, mpi4py shows it that much, so
        gaps are there, and zero; data may begin before an item or end behind it.
        """
        low, high = Piece(0, count, self._item).reach()
        low, high = min(0, low), max(high, count * self._item.extent)
        scratch = np.zeros(high - low + _ALIGNMENT, np.uint8)
        begin = MPI.Get_address(cast(Any, scratch)) - low
        begin += -begin % _ALIGNMENT
        return Memory(begin, None, False, (scratch,))


#: Items of one call into MPI. Divides what executors cut, and is below 32 bits.
COUNT_LIMIT = 1 << 30

#: Scratch for items with gaps; longer vectors are reduced in pieces of it.
LAID_OUT_BYTES = 1 << 22

_ALIGNMENT = 64


class _Caught(threading.local):
    """What a user's function raised on this thread, while one of our reductions runs it."""

    armed = False
    error: BaseException | None = None


_CAUGHT = _Caught()


def create_op(function: Callable[[Any, Any, MPI.Datatype], None], commute: bool = False) -> MPI.Op:
    """Make a user operator as `MPI.Op.Create` does, one that may raise.

    An exception of ``function`` ends the collective and not the job: it is raised on this
    rank, and PeerError on the ranks whose results depend on it. In collectives of the
    MPI's own it ends the job, as with `MPI.Op.Create`.
    """

    def guarded(left: Any, inout: Any, datatype: MPI.Datatype) -> None:
        if not _CAUGHT.armed:
            function(left, inout, datatype)
        elif _CAUGHT.error is None:
            try:
                function(left, inout, datatype)
            except BaseException as error:
                _CAUGHT.error = error

    return MPI.Op.Create(guarded, commute)


def operator_name(op: object) -> str:
    """Return what to call an operator; the same on all ranks for the same one."""
    if isinstance(op, MPI.Op):
        return _names().get(op.handle, "a user operator")
    return "AVG" if isinstance(op, AverageOp) else type(op).__name__


@cache
def _names() -> dict[int, str]:
    return {
        op.handle: name
        for name in dir(MPI)
        if isinstance(op := getattr(MPI, name), MPI.Op) and op != MPI.OP_NULL
    }


def reducer(op: MPI.Op | AverageOp, item: Item, size: int = 1) -> Reducer:
    """Return ``op`` for items; an operator that the type does not allow raises ERR_OP.

    ``size`` is the number of ranks, by which AVG divides.
    """
    if isinstance(op, AverageOp):
        if item.dtype is None or item.dtype.kind == "b":
            raise CallError(MPI.ERR_OP, f"{op} has no meaning for {item.name}")
        return _bound(MPI.SUM.handle, *_key(item), size)
    if not isinstance(op, MPI.Op):
        raise TypeError(
            f"expected an MPI.Op such as MPI.SUM, or mpicoll.AVG, got {type(op).__name__}"
        )
    if item.datatype is None or (op.is_predefined and item.datatype.is_predefined):
        return _bound(op.handle, *_key(item), 0)
    _ask(op, item)
    return _NativeReducer(op, item)


def _key(item: Item) -> tuple[int | None, DType | None]:
    """Return what identifies a type for ever; used for predefined ones only."""
    return (None if item.datatype is None else item.datatype.handle), item.dtype


@lru_cache(maxsize=1024)
def _bound(op_handle: int, type_handle: int | None, dtype: DType | None, average: int) -> Reducer:
    op = MPI.Op.fromhandle(op_handle)
    name, ufunc, kinds = _BY_HANDLE.get(op_handle, ("", None, ""))
    if type_handle is None:
        assert dtype is not None
        if ufunc is None or dtype.kind not in kinds:
            raise CallError(MPI.ERR_OP, f"the operator is not defined for {dtype}")
    else:
        item = describe(MPI.Datatype.fromhandle(type_handle))
        _ask(op, item)
        if name == "PROD" and dtype in (np.complex64, np.complex128):
            local = _Local(op, MPI.Datatype.fromhandle(type_handle), item.nbytes, swaps=True)
            return ProductReducer(dtype, local.fold)
        if ufunc is None or dtype is None or dtype.kind not in kinds:
            return _NativeReducer(op, item)
    half = kernels.half(dtype) if name in kernels.OPERATORS else None
    if half is not None:
        return _HalfReducer(name, dtype, half, average)
    made = _NumpyReducer(name, ufunc, dtype, name in ("SUM", "PROD") and _narrow(dtype), average)
    if type_handle is not None:
        made.prefer(op, MPI.Datatype.fromhandle(type_handle))
    return made


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
        [MPI.memory.fromaddress(MPI.Get_address(cast(Any, array)) - low, 1), 1, item.datatype]
        for array in scratch
    )
    try:
        op.Reduce_local(one, other)
    except MPI.Exception as error:
        name, _, _ = _BY_HANDLE.get(op.handle, ("the operator", None, ""))
        raise CallError(
            error.Get_error_class(), f"{name} is not defined for {item.name} by this MPI"
        ) from None

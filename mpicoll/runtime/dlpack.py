"""DLPack: memory that another library lends, on the host or on a device.

Its capsules are read here and nowhere else. A capsule is kept, unused as the protocol calls
it, for as long as its memory may be touched. When it is dropped its own destructor gives
the memory back: so that happens once, whatever becomes of a call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

DType: TypeAlias = np.dtype[Any]

#: Numbers of device kinds whose memory is the host's: CPU, and page-locked by the two drivers.
HOST = (1, 3, 11)
#: Those whose memory is a GPU's, of either driver, or is managed by one.
DEVICES = (2, 10, 13)

#: The version of the protocol that is asked for; a later minor one reads the same.
_VERSION = (1, 0)

#: Flags of a lender: the memory is read-only; it is a copy, and what is written to it lost.
_READ_ONLY, _COPIED = 1, 2

#: NumPy's letters by the number of a type.
_LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}

#: Names in ml_dtypes by number and bits of a type; an older one may lack some.
_NAMES = {
    (4, 16): "bfloat16",
    (5, 32): "complex32",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack's C header; in a capsule without a version it comes first."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# A function of our own: those of ctypes.pythonapi are shared with all who set their types.
_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Lent(NamedTuple):
    """Memory that a capsule lends; ``strides`` are in bytes, None for C order.

    ``kind`` and ``number`` say the device. ``dtype`` is a void of the item's size where
    NumPy has no such type.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    kind: int
    number: int
    readonly: bool
    capsule: object


def place(data: Any) -> tuple[int, int] | None:
    """Return kind and number of the device that an object says it is on; None if it does not."""
    said = getattr(data, "__dlpack_device__", None)
    if said is None:
        return None
    try:
        kind, number = said()
    except (BufferError, RuntimeError, ValueError) as error:
        raise _refusal(data, error) from error
    return int(kind), int(number)


def borrow(data: Any, *, typed: bool = False, on_device: bool = False) -> Lent:
    """Ask an object with ``__dlpack__`` for its memory.

    What is queued on a device is not waited for: that order is the caller's business. Raises
    BufferError where the object lends no memory, or lends what cannot be read; and for items
    that NumPy and ml_dtypes have no type for, unless ``typed`` says that the caller names
    the MPI datatype.
    """
    negated = getattr(data, "is_neg", None)
    if callable(negated) and negated():
        # torch lends these as if they were not; the others of its lazy views it refuses.
        raise _refusal(data, "it is a view with the sign changed; pass x.resolve_neg()")
    try:
        capsule = _asked(data, {"stream": -1} if on_device else {})
    except (BufferError, RuntimeError, ValueError) as error:
        raise _refusal(data, error) from error
    tensor, readonly = _read(data, capsule)
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    size = -(-bits * lanes // 8)
    dtype = _dtype(code, bits, lanes)
    if dtype is None:
        if not typed:
            raise BufferError(
                f"message: no MPI datatype for items of DLPack type {code} ({bits} bits, {lanes} "
                "lanes); name one, such as [x, MPI.BYTE], to move them as that"
            )
        dtype = np.dtype((np.void, size))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = None
    if tensor.strides:
        strides = tuple([stride * size for stride in tensor.strides[: tensor.ndim]])
    address = (tensor.data or 0) + tensor.byte_offset
    return Lent(address, shape, strides, dtype, tensor.kind, tensor.number, readonly, capsule)


def _read(data: object, capsule: object) -> tuple[Any, bool]:
    """Return the `_Tensor` in a capsule, and whether writing to it is ruled out."""
    try:
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
    except ValueError:  # it has another name
        try:
            # Without a version it cannot say that it is read-only; as in mpi4py it then is not.
            return _Tensor.from_address(_pointer(capsule, b"dltensor")), False
        except ValueError:
            what = f"it gave {capsule!r}, expected a capsule named dltensor"
            raise _refusal(data, what) from None
    if managed.major != _VERSION[0]:
        version = f"version {managed.major}.{managed.minor} of DLPack"
        raise _refusal(data, f"it has {version}, expected version {_VERSION[0]}")
    return managed.tensor, bool(managed.flags & (_READ_ONLY | _COPIED))


def _asked(data: Any, stream: dict[str, int]) -> object:
    """Return a capsule, with a version where the lender knows of versions."""
    try:
        return data.__dlpack__(**stream, max_version=_VERSION, copy=False)
    except TypeError:
        return data.__dlpack__(**stream)


def _refusal(data: object, why: object) -> BufferError:
    return BufferError(f"message: {type(data).__name__} does not lend its memory: {why}")


@cache
def _dtype(code: int, bits: int, lanes: int) -> DType | None:
    """Return the dtype of items; None for those that NumPy and ml_dtypes lack."""
    if lanes != 1:
        return None
    named = getattr(ml_dtypes, _NAMES.get((code, bits), ""), None)
    try:
        found: DType = np.dtype(named or f"{_LETTERS[code]}{bits // 8}")
    except (KeyError, TypeError):
        return None
    return found if found.itemsize * 8 == bits else None


# -- on the host ------------------------------------------------------------------------------


class _Window:
    """What NumPy makes an array of; the array keeps it, and so the capsule."""

    __slots__ = ("__array_interface__", "_capsule")

    def __init__(self, lent: Lent) -> None:
        # Void, since those of ml_dtypes have no letters that NumPy reads.
        self.__array_interface__ = {
            "data": (lent.address, lent.readonly),
            "shape": lent.shape,
            "strides": lent.strides,
            "typestr": f"|V{lent.dtype.itemsize}",
            "version": 3,
        }
        self._capsule = lent.capsule


def array(lent: Lent) -> npt.NDArray[Any]:
    """Return an array on lent memory of the host, which it keeps for as long as it lives."""
    if lent.kind not in HOST:
        raise BufferError(
            f"message: memory on a device of DLPack's kind {lent.kind}; known are the host "
            f"{HOST} and GPUs {DEVICES}, so copy it there"
        )
    if 0 in lent.shape:  # the address may then be null, and NumPy would take memory of its own
        empty = np.empty(lent.shape, lent.dtype)
        empty.flags.writeable = not lent.readonly
        return empty
    return np.asarray(_Window(lent)).view(lent.dtype)

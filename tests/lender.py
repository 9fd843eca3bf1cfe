"""A library that lends memory by DLPack in any dtype, version and state, and counts returns.

The structures are those of DLPack's C header, written down once more: a test that shared
them with mpicoll would not see one that is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
#: Number, bits and lanes of a type.
Type: TypeAlias = tuple[int, int, int]

READ_ONLY, COPIED = 1, 2
CPU, CUDA, METAL = 1, 2, 8

#: What is left of memory that was given back, where a lender is asked to spoil it.
SPOILED = 0x5A


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NAMES = (b"dltensor", b"dltensor_versioned")


def _function(name: str, *types: Any) -> Callable[..., Any]:
    made: Any = ctypes.PYFUNCTYPE(*types)((name, ctypes.pythonapi))
    return made  # type: ignore[no-any-return]


# A capsule that is about to go has no references: it may only be passed on as an address.
_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_new = _function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)

#: What was ever lent, by its address: a second return is counted, not a crash.
_LENT: dict[int, tuple[Lender, tuple[Any, ...]]] = {}


@_DELETER
def _deleter(managed: int) -> None:
    lender, _ = _LENT[managed]
    lender.returned += 1
    if lender.spoils:
        lender.array.view(np.uint8)[...] = SPOILED


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destructor(capsule: int) -> None:
    """Give memory back that nobody has taken over, as the protocol wants it."""
    for name, kind in zip(_NAMES, (Managed, Versioned), strict=True):
        if _is_valid(capsule, name):
            managed = kind.from_address(_pointer(capsule, name))
            _DELETER(managed.deleter)(ctypes.addressof(managed))


class Lender:
    """An array that only DLPack shows; ``lent`` and ``returned`` count."""

    def __init__(
        self,
        array: Array,
        *,
        type: Type | None = None,
        version: tuple[int, int] | None = (1, 0),
        flags: int | None = None,
        kind: int = CPU,
        number: int = 0,
        null_strides: bool = False,
        spoils: bool = False,
        refusal: Exception | None = None,
    ) -> None:
        """Take the array's memory; ``version`` None is the protocol before there were any."""
        self.array = array
        self.type = type_of(array.dtype) if type is None else type
        self.version = version
        self.flags = (0 if array.flags.writeable else READ_ONLY) if flags is None else flags
        self.kind, self.number = kind, number
        self.null_strides, self.spoils, self.refusal = null_strides, spoils, refusal
        self.lent = self.returned = 0
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.number

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked.append(keywords)
        if self.version is None and keywords.keys() - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        if self.refusal is not None:
            raise self.refusal
        managed: Any = Managed() if self.version is None else Versioned()
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        if self.version is not None:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        kept = self._describe(managed.tensor)
        address = ctypes.addressof(managed)
        _LENT[address] = self, (managed, *kept)
        self.lent += 1
        name = _NAMES[self.version is not None]
        return _new(address, name, ctypes.cast(_destructor, ctypes.c_void_p))

    def _describe(self, tensor: Any) -> tuple[Any, ...]:
        array = self.array
        tensor.device_type, tensor.device_id = self.kind, self.number
        tensor.code, tensor.bits, tensor.lanes = self.type
        tensor.ndim = array.ndim
        if array.size:  # libraries have a null pointer where there is nothing
            tensor.data, tensor.byte_offset = array.__array_interface__["data"][0] - 64, 64
        if not array.ndim:
            return ()
        shape = np.array(array.shape, np.int64)
        strides = np.array(array.strides, np.int64) // array.itemsize
        tensor.shape = shape.ctypes.data
        if not self.null_strides:
            tensor.strides = strides.ctypes.data
        return shape, strides


def type_of(dtype: np.dtype[Any]) -> Type:
    """Return DLPack's words for a dtype."""
    named = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12, "float8_e8m0fnu": 14}
    named["complex32"] = 5  # to NumPy these are void, some of them
    code = named.get(dtype.name, "iuf__cb".find(dtype.kind))
    assert code >= 0, dtype
    return code, dtype.itemsize * 8, 1


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

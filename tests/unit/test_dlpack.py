"""DLPack: what a capsule says is read rightly or refused, and its memory given back once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lender import BFLOAT16, COPIED, CUDA, METAL, READ_ONLY, Array, Lender

from mpicoll.runtime import dlpack

DTYPES = [*"?bhilqBHILQefdgFD", *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")]
if hasattr(ml_dtypes, "complex32"):
    DTYPES.append("complex32")
VERSIONS = [None, (1, 0), (1, 7)]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def sample(dtype: np.dtype[Any], shape: tuple[int, ...] = (2, 3)) -> Array:
    """Return distinct bytes as an array."""
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype.kind == "b":
        return (np.arange(count) % 2 == 1).reshape(shape)
    return np.arange(count, dtype=np.uint8).view(dtype).reshape(shape)


def shown(lender: Lender, **keywords: Any) -> Array:
    return dlpack.array(dlpack.borrow(lender, **keywords))


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str, version: tuple[int, int] | None) -> None:
    data = sample(dtype_of(name))
    array = shown(Lender(data, version=version))
    assert (array.dtype, array.shape) == (data.dtype, data.shape)
    assert array.tobytes() == data.tobytes()
    data.view(np.uint8)[...] = 0
    assert not array.view(np.uint8).any()
    assert array.flags.writeable


@pytest.mark.parametrize("dtype", [np.dtype("f8"), BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[::-1],
        lambda x: x[0, 0, ...],
        lambda x: x[:0],
        lambda x: x[:0, ::2],
        lambda x: np.broadcast_to(x[:, :1], x.shape),
    ],
    ids=["C", "Fortran", "columns", "reversed", "0-d", "empty", "empty, strided", "repeated"],
)
def test_layouts(form: Callable[[Array], Array], dtype: np.dtype[Any]) -> None:
    data = form(sample(dtype, (4, 6)))
    array = shown(Lender(data))
    assert (array.dtype, array.shape) == (data.dtype, data.shape)
    assert array.tobytes() == data.tobytes()
    if data.size:
        assert array.strides == data.strides
        assert np.shares_memory(array, data)


def test_no_strides_are_those_of_c_order() -> None:
    data = sample(BFLOAT16, (2, 3, 4))
    lent = dlpack.borrow(Lender(data, null_strides=True))
    assert lent.strides is None
    assert dlpack.array(lent).tobytes() == data.tobytes()


def test_numpy_lends_by_version() -> None:
    knows = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    data = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(shown(Only(data)), data)
    assert ("versioned" in repr(dlpack.borrow(Only(data)).capsule)) == knows
    data.flags.writeable = False
    if knows:
        assert not shown(Only(data)).flags.writeable
    else:
        with pytest.raises(BufferError, match=r"Only does not lend its memory: .*readonly"):
            shown(Only(data))


def test_numpy_lends_without_a_version() -> None:
    data = np.arange(6.0).reshape(2, 3).T
    array = shown(Old(data))
    assert np.shares_memory(array, data)
    np.testing.assert_array_equal(array, data)
    assert "versioned" not in repr(dlpack.borrow(Old(data)).capsule)


class Only:
    """A NumPy array that only DLPack shows."""

    def __init__(self, data: Array) -> None:
        self.data = data

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.data.__dlpack__(**keywords)


class Old(Only):
    """The same before there were versions."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self.data.__dlpack__()


# -- who may write ------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [READ_ONLY, COPIED, READ_ONLY | COPIED, 4, 0])
@pytest.mark.parametrize("shape", [(3,), (0,)])
def test_flags(flags: int, shape: tuple[int, ...]) -> None:
    array = shown(Lender(np.zeros(shape), flags=flags))
    assert array.flags.writeable == (flags & (READ_ONLY | COPIED) == 0)


# -- what is asked ------------------------------------------------------------------------


def test_what_is_asked_of_a_lender() -> None:
    new, old = Lender(np.zeros(3)), Lender(np.zeros(3), version=None)
    dlpack.borrow(new)
    dlpack.borrow(old)
    assert new.asked == [{"max_version": (1, 0), "copy": False}]
    assert old.asked == [{"max_version": (1, 0), "copy": False}, {}]
    new.asked.clear()
    old.asked.clear()
    dlpack.borrow(new, on_device=True)
    dlpack.borrow(old, on_device=True)
    assert new.asked == [{"stream": -1, "max_version": (1, 0), "copy": False}]
    assert old.asked[-1] == {"stream": -1}


def test_device() -> None:
    data = np.zeros((4, 5), BFLOAT16).T
    lender = Lender(data, kind=CUDA, number=3)
    lent = dlpack.borrow(lender, on_device=True)
    assert dlpack.place(lender) == (CUDA, 3)
    assert (lent.kind, lent.number) == (CUDA, 3)
    assert lent.address == data.ctypes.data
    assert (lent.shape, lent.strides, lent.dtype) == ((5, 4), (2, 10), BFLOAT16)
    assert dlpack.place(object()) is None


@pytest.mark.parametrize("kind", [CUDA, METAL])
def test_memory_that_is_not_the_hosts_is_never_an_array(kind: int) -> None:
    with pytest.raises(BufferError, match=f"on a device of DLPack's kind {kind}; known are"):
        shown(Lender(np.zeros(3), kind=kind))


# -- refused ------------------------------------------------------------------------------

UNKNOWN = {
    "two lanes": (2, 32, 2),
    "no lanes": (2, 32, 0),
    "packed float4": (17, 4, 2),
    "float6": (15, 6, 1),
    "int4": (0, 4, 1),
    "no bits": (0, 0, 1),
    "float of 8 bits": (2, 8, 1),
    "complex of 16 bits": (5, 16, 1),
    "bool of 16 bits": (6, 16, 1),
    "wide bfloat": (4, 32, 1),
    "a handle": (3, 64, 1),
    "of the future": (99, 16, 1),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_items_without_a_type(what: str) -> None:
    code, bits, lanes = kind = UNKNOWN[what]
    lender = Lender(np.zeros(3, np.uint8), type=kind)
    says = rf"DLPack type {code} \({bits} bits, {lanes} lanes\); name one"
    with pytest.raises(BufferError, match=says):
        dlpack.borrow(lender)
    gc.collect()
    assert lender.returned == lender.lent == 1
    # Who names the MPI datatype needs the size alone; mpi4py rounds it up per item, too.
    lent = dlpack.borrow(lender, typed=True)
    assert lent.dtype.itemsize == (bits * lanes + 7) // 8
    assert lent.dtype.kind == "V"


@pytest.mark.parametrize("kind", [BufferError, RuntimeError, ValueError])
def test_a_refusal_is_handed_on(kind: type[Exception]) -> None:
    """torch words it so; older versions of it raise RuntimeError."""
    says = "Can't export tensors that require gradient, use tensor.detach()"
    with pytest.raises(BufferError, match=r"Lender does not lend its memory: .*detach\(\)") as got:
        dlpack.borrow(Lender(np.zeros(3), refusal=kind(says)))
    assert isinstance(got.value.__cause__, kind)


def test_a_device_without_a_number_is_refused() -> None:
    class Meta(Lender):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("Unknown device type meta for Dlpack")

    with pytest.raises(BufferError, match=r"Meta does not lend its memory: .* meta for Dlpack"):
        dlpack.place(Meta(np.zeros(3)))


def test_a_mistake_of_the_lender_is_not_hidden() -> None:
    with pytest.raises(TypeError, match="stream must be int"):
        dlpack.borrow(Lender(np.zeros(3), refusal=TypeError("stream must be int")))


def test_another_version_is_refused() -> None:
    lender = Lender(np.zeros(3), version=(2, 1))
    with pytest.raises(BufferError, match=r"version 2\.1 of DLPack, expected version 1"):
        dlpack.borrow(lender)
    gc.collect()
    assert lender.returned == lender.lent == 1


def test_what_is_no_capsule_is_refused() -> None:
    class Wrong(Lender):
        def __dlpack__(self, **keywords: Any) -> Any:
            return "a capsule"

    with pytest.raises(BufferError, match="it gave 'a capsule', expected a capsule"):
        dlpack.borrow(Wrong(np.zeros(3)))


def test_a_lazy_change_of_sign_is_not_overlooked() -> None:
    class Negated(Lender):
        negated = True

        def is_neg(self) -> bool:
            return self.negated

    lender = Negated(np.ones(3))
    with pytest.raises(BufferError, match=r"pass x\.resolve_neg\(\)"):
        dlpack.borrow(lender)
    lender.negated = False
    assert shown(lender).tolist() == [1, 1, 1]


# -- given back ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("dtype", [np.dtype("f8"), BFLOAT16], ids=str)
def test_given_back_once_and_not_before(
    dtype: np.dtype[Any], version: tuple[int, int] | None
) -> None:
    lender = Lender(np.ones(8, dtype), version=version, spoils=True)
    array = shown(lender)
    part = array.reshape(2, 4).T[1:]
    del array
    gc.collect()
    assert lender.returned == 0
    assert part.tobytes() == np.ones((3, 2), dtype).tobytes()
    del part
    assert lender.returned == lender.lent == 1


def test_given_back_when_nothing_was_made_of_it() -> None:
    lender = Lender(np.ones(3))
    lent = dlpack.borrow(lender)
    assert lender.returned == 0
    del lent
    assert lender.returned == lender.lent == 1


def test_each_loan_is_its_own() -> None:
    lender = Lender(np.ones(3))
    arrays = [shown(lender) for _ in range(5)]
    for count in range(1, 6):
        arrays.pop()
        assert lender.returned == count
    assert lender.lent == 5


def test_empty_memory_is_given_back_at_once() -> None:
    lender = Lender(np.ones(0))
    array = shown(lender)
    assert array.size == 0
    assert lender.returned == lender.lent == 1

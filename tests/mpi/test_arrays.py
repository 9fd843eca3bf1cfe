"""Array functions: any shape, order and dtype in; the same shape and dtype out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import fake_torch
import ml_dtypes
import numpy as np
import pytest
from fake_torch import Tensor
from mpi4py import MPI

import mpicoll
from mpicoll import arrays

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 4)]
DTYPES = [np.int8, np.int64, np.float16, np.float32, np.complex128, ml_dtypes.bfloat16]


def of_rank(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return what ``rank`` passes: small integers, exact in every dtype."""
    count = int(np.prod(shape))
    return (np.arange(count) % 5 + rank).reshape(shape).astype(dtype)


def strided(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``x`` as every other column of something larger, last axis reversed."""
    if x.ndim == 0:
        return x
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::-2] = x
    return wide[..., ::-2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("form", [np.array, np.asfortranarray, strided])
def test_values_shape_and_dtype(shape: tuple[int, ...], dtype: Any, form: Any) -> None:
    inputs = [of_rank(rank, shape, dtype) for rank in range(SIZE)]
    x = form(inputs[RANK]).reshape(shape)  # NumPy makes 0-d arrays in Fortran order 1-d
    before = x.copy()
    total = sum(one.astype(np.complex128) for one in inputs)
    root = SIZE - 1

    results = {
        "allreduce": (mpicoll.allreduce(x), np.asarray(total)),
        "broadcast": (mpicoll.broadcast(x, root), inputs[root]),
        "allgather": (mpicoll.allgather(x), np.stack(inputs)),
    }
    reduced, gathered = mpicoll.reduce(x, root=root), mpicoll.gather(x, root)
    assert (reduced is None) == (gathered is None) == (root != RANK)
    if root == RANK:
        results["reduce"] = (reduced, np.asarray(total))
        results["gather"] = (gathered, np.stack(inputs))
    for name, (result, expected) in results.items():
        assert result.dtype == x.dtype, name
        assert result.shape == expected.shape, name
        np.testing.assert_array_equal(result.astype(np.complex128), expected, err_msg=name)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", SIZE * (SIZE + 1) / 2),
        ("prod", float(np.prod(np.arange(1, SIZE + 1)))),
        ("max", SIZE),
        ("min", 1),
        ("mean", (SIZE + 1) / 2),
        (mpicoll.AVG, (SIZE + 1) / 2),
        (MPI.SUM, SIZE * (SIZE + 1) / 2),
    ],
    ids=["sum", "prod", "max", "min", "mean", "AVG", "MPI.SUM"],
)
def test_operators(op: Any, expected: float) -> None:
    assert mpicoll.allreduce(float(RANK + 1), op=op) == expected


def test_scalar_comes_back_as_a_scalar() -> None:
    result = mpicoll.allreduce(2)
    assert isinstance(result, np.integer)
    assert result == 2 * SIZE


def test_mean_of_integers_truncates_towards_zero() -> None:
    assert mpicoll.allreduce(np.int32(-1 if RANK == 0 else 0), op="mean") == (
        -1 if SIZE == 1 else 0
    )


@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_reduce_scatter_cuts_rows_unevenly(rows: int) -> None:
    x = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3) * (RANK + 1)
    counts = [rows // SIZE + (rank < rows % SIZE) for rank in range(SIZE)]
    start = sum(counts[:RANK])
    result = mpicoll.reduce_scatter(x)
    whole = np.arange(rows * 3.0).reshape(rows, 3) * (SIZE * (SIZE + 1) // 2)
    np.testing.assert_array_equal(result, whole[start : start + counts[RANK]])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_uneven_alltoall(dtype: Any) -> None:
    splits = [(RANK + 2 * peer) % 3 for peer in range(SIZE)]
    x = np.full((sum(splits), 2), RANK, dtype)
    x[:, 1] = np.repeat(np.arange(SIZE), splits)
    result, counts = mpicoll.alltoall(x, splits)
    assert counts == [(peer + 2 * RANK) % 3 for peer in range(SIZE)]
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result[:, 0].astype(int), np.repeat(np.arange(SIZE), counts))
    assert (result[:, 1].astype(int) == RANK).all()


def test_alltoall_cuts_evenly_by_itself() -> None:
    result, counts = mpicoll.alltoall(np.arange(SIZE * 2) + 100 * RANK)
    assert counts == [2] * SIZE
    np.testing.assert_array_equal(result[::2], np.arange(SIZE) * 100 + 2 * RANK)


def test_wrong_splits() -> None:
    with pytest.raises(ValueError, match=rf"expected {SIZE} counts that add up to {SIZE}"):
        mpicoll.alltoall(np.zeros(SIZE), [2] * SIZE)


@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_scatter(root: int) -> None:
    x = np.arange(SIZE * 6, dtype=np.int16).reshape(SIZE, 2, 3)
    result = mpicoll.scatter(np.asfortranarray(x) if root == RANK else None, root)
    assert result.dtype == np.int16
    np.testing.assert_array_equal(result, x[RANK])


@pytest.mark.parametrize(
    "wrong", [None, np.zeros(SIZE + 1), np.float64(3)], ids=["None", "rows", "0-d"]
)
def test_scatter_fails_on_all_ranks_alike(wrong: Any) -> None:
    with pytest.raises(ValueError, match="scatter: root 0"):
        mpicoll.scatter(wrong if RANK == 0 else None)


@pytest.mark.parametrize("kind", ["wrapped", "plain", "part"])
def test_communicators(kind: str) -> None:
    comm: MPI.Intracomm = MPI.COMM_WORLD
    if kind == "wrapped":
        comm = mpicoll.Comm(MPI.COMM_WORLD)
    if kind == "part":
        comm = MPI.COMM_WORLD.Split(RANK % 2, -RANK)
    assert mpicoll.allreduce(1, comm=comm) == comm.size
    np.testing.assert_array_equal(
        mpicoll.allgather(np.int64(comm.rank), comm=comm), np.arange(comm.size)
    )
    mpicoll.barrier(comm)
    if kind == "part":
        comm.Free()


def test_unknown_operator() -> None:
    with pytest.raises(ValueError, match="unknown operator 'avg'; known: sum, prod"):
        mpicoll.allreduce(1.0, op="avg")


def test_mean_of_float16_does_not_overflow() -> None:
    """The sum of these is beyond float16, not beyond the float32 that it is divided in.

    bfloat16 reaches as far as float32 does, so its sums have no such room.
    """
    x = np.full(1000, np.finfo(np.float16).max / 2, np.float16)
    for result in (mpicoll.allreduce(x, op="mean"), mpicoll.reduce(x, op="mean")):
        assert result is None or (result == x).all()
    assert (mpicoll.reduce_scatter(x, op="mean") == x[0]).all()


# -- torch --------------------------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `fake_torch` be torch, in place of one that may be there."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch.MODULE)
    arrays._torch.cache_clear()
    yield
    arrays._torch.cache_clear()


TORCH_DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.complex64, np.int64]
TENSORS: dict[str, Any] = {
    "plain": lambda x: Tensor(x),
    "strided": lambda x: Tensor(strided(x)),
    "requires grad": lambda x: Tensor(x, requires_grad=True),
    "conjugated": lambda x: Tensor(fake_torch.conjugate(x), conj=True),
    "negated": lambda x: Tensor(fake_torch.negative(x), neg=True),
    "of another class": lambda x: fake_torch.Subclass(x),
}


@pytest.mark.parametrize("shape", [(), (0,), (4 * SIZE, 3)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("form", TENSORS)
def test_tensors(form: str, dtype: Any, shape: tuple[int, ...], torch: None) -> None:
    inputs = [of_rank(rank, shape, dtype) for rank in range(SIZE)]
    x = TENSORS[form](inputs[RANK])
    before = x.array.copy()
    total = sum(one.astype(np.complex128) for one in inputs)
    root = SIZE - 1
    results = {
        "allreduce": (mpicoll.allreduce(x), np.asarray(total)),
        "broadcast": (mpicoll.broadcast(x, root), inputs[root]),
        "allgather": (mpicoll.allgather(x), np.stack(inputs)),
    }
    reduced, gathered = mpicoll.reduce(x, root=root), mpicoll.gather(x, root)
    assert (reduced is None) == (gathered is None) == (root != RANK)
    if root == RANK:
        results["reduce"] = (reduced, np.asarray(total))
        results["gather"] = (gathered, np.stack(inputs))
    if shape:
        own = np.array_split(np.asarray(total), SIZE)[RANK]
        parts = [np.array_split(one, SIZE)[RANK] for one in inputs]
        results["reduce_scatter"] = (mpicoll.reduce_scatter(x), own)
        exchanged, counts = mpicoll.alltoall(x)
        results["alltoall"] = (exchanged, np.concatenate(parts))
        assert counts == [len(one) for one in parts]
    for name, (result, expected) in results.items():
        assert isinstance(result, Tensor), name
        assert not result.requires_grad, name
        assert (result.dtype, result.shape) == (x.dtype, expected.shape), name
        found = result.resolve_conj().resolve_neg().array.astype(np.complex128)
        np.testing.assert_array_equal(found, expected, err_msg=name)
    np.testing.assert_array_equal(x.array, before)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_rows_of_a_tensor(dtype: Any, torch: None) -> None:
    rows = of_rank(0, (SIZE, 2, 3), dtype)
    like = Tensor(np.zeros(0, dtype))
    result = mpicoll.scatter(Tensor(rows) if RANK == 0 else like)
    assert isinstance(result, Tensor)
    np.testing.assert_array_equal(result.array, rows[RANK])
    result = mpicoll.scatter(Tensor(rows) if RANK == 0 else None)
    found = result.array if isinstance(result, Tensor) else result
    assert isinstance(result, Tensor) == (RANK == 0)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, rows[RANK])


def test_a_tensor_that_the_root_cannot_scatter_fails_on_all_ranks(torch: None) -> None:
    class Sparse(Tensor):
        def detach(self) -> Tensor:
            raise RuntimeError("sparse tensors have no strides")

    class Quantised(Tensor):
        def contiguous(self) -> Tensor:
            self.dtype = "torch.quint8"
            return self

    for x, says in ((Sparse(np.zeros(SIZE)), "no strides"), (Quantised(np.zeros(SIZE)), "quint8")):
        with pytest.raises(ValueError, match=f"scatter: root 0: .*{says}"):
            mpicoll.scatter(x if RANK == 0 else None)
    assert mpicoll.allreduce(1) == SIZE

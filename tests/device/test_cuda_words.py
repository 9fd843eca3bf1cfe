"""What mpicoll asks of CuPy, on a module that stands in for it: devices, streams, kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cases
import cuda_words
import deferred
import ml_dtypes
import numpy as np
import pytest
import quirks
from cases import attempt, cover
from cuda_words import PER_THREAD, ndarray
from deferred import BACKEND, POLICIES, array, empty, host
from device_exchange import DeviceExchange, Image
from harness import Ranks
from lender import CUDA, Lender
from mpi4py import MPI
from skips import compiler

import mpicoll
from mpicoll import Comm
from mpicoll.runtime import device, device_support

ITEMS = 700
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

protocols = pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])


@pytest.fixture(autouse=True)
def cupy(deferred_device: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, and mpicoll's own backend on top of it."""
    if not compiler():
        pytest.skip("no C compiler")
    made = cuda_words.module()
    monkeypatch.setitem(sys.modules, "cupy", made)
    backend = device.CupyBackend()
    monkeypatch.setattr(device, "_cupy", lambda: backend)
    monkeypatch.setattr(backend, "direct", lambda: BACKEND.takes_pointers)
    return made


def of_cupy(made: deferred.Array) -> ndarray:
    """Return an array as CuPy's."""
    return ndarray(
        made.address, made.shape, made.dtype, made.strides, owner=made, device=made.device
    )


def up(data: Any, where: int) -> ndarray:
    """Return an array of CuPy's that a copy is queued for."""
    return of_cupy(array(data, where))


#: Operators, and types that they are folded for on the device.
FOLDS: list[tuple[Any, Any]] = [
    (MPI.SUM, np.float32),
    (MPI.SUM, np.float16),
    (mpicoll.AVG, BFLOAT16),
    (MPI.PROD, np.float64),
    (MPI.MAX, np.int32),
    (MPI.MIN, BFLOAT16),
    (MPI.LXOR, np.bool_),
    (MPI.BXOR, np.uint16),
    (MPI.SUM, np.complex64),
    (mpicoll.AVG, np.complex128),
    (mpicoll.AVG, np.int8),
    (MPI.PROD, np.complex64),
    (MPI.PROD, np.complex128),
    (MPI.SUM, ml_dtypes.float8_e4m3fn),
    (MPI.PROD, ml_dtypes.float8_e3m4),
    (MPI.MIN, ml_dtypes.float8_e4m3fnuz),
    (mpicoll.AVG, ml_dtypes.float8_e5m2),
    (MPI.LOR, ml_dtypes.float8_e5m2),
]


@protocols
@pytest.mark.parametrize(("op", "dtype"), FOLDS)
def test_folds_have_the_bits_of_the_host(
    op: Any, dtype: Any, pointers: bool, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng([5, world.rank])
    x = (rng.standard_normal(ITEMS) * 3).astype(dtype)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * x[::-1].astype(dtype)
        x = x.astype(dtype)
    expected = np.empty_like(x)
    for policy in POLICIES:
        BACKEND.use(policy, pointers)
        for algorithm in ("ring", "direct"):
            world.Allreduce(x, expected, op, algorithm=algorithm)
            where = 1 + world.rank % 2  # and 0 is the current device
            result = of_cupy(empty(x.shape, x.dtype, where))
            world.Iallreduce(up(x, where), result, op, algorithm=algorithm).Wait()
            assert host(result).tobytes() == expected.tobytes()
            assert BACKEND.device == 0
    assert BACKEND.folds or world.size == 1


class CupyImage(Image):
    """A memory of the host, and its place on a device, as an array of CuPy's."""

    def of(self, array: Any) -> Any:
        made = super().of(array)
        return ndarray(
            made.address, made.shape, made.dtype, made.strides, readonly=made.readonly, owner=self
        )


class CupyExchange(DeviceExchange):
    """An exchange of such arrays."""

    image = CupyImage


@protocols
@pytest.mark.parametrize("method", ["Allgather", "Alltoallw", "Bcast", "Scatterv"])
def test_matrix_of_what_only_moves(
    method: str, pointers: bool, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Derived datatypes among it: what the kernels gather and scatter."""
    monkeypatch.setattr(cases, "Exchange", CupyExchange)
    monkeypatch.setattr(quirks, "native", lambda case, size: False)  # as in the whole matrix
    failures = []
    for case in cover(method, world.size, ranks.seed):
        BACKEND.use(POLICIES[case.number % 3], pointers)
        wrong, _ = attempt(case, world, ranks.seed)
        if wrong:
            failures.append(f"{BACKEND.policy}: {case}: {wrong}")
    assert not failures, "\n".join(failures[:12])


class Tensor(deferred.Array):
    """A tensor of torch's."""

    __module__ = "torch"


class OwnTensor(Tensor):
    """One of a class that a user has derived."""


class Named(deferred.Array):
    """An array whose interface names a stream, as Numba's may."""

    handle = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "stream": self.handle}


def lent(memory: Any, where: int) -> Lender:
    """Return a tensor of torch's that has DLPack alone."""
    kind = type("Tensor", (Lender,), {"__module__": "torch"})
    found: Lender = kind(memory, kind=CUDA, number=where)
    return found


@protocols
@pytest.mark.parametrize("how", ["own", "per thread", "named", "torch", "derived", "lent"])
def test_work_is_seen_on_the_stream_of_the_library(
    how: str, pointers: bool, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current one of the library that an array is of; that of CuPy has nothing to do."""
    torch: Any = cuda_words.torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    BACKEND.use("late", pointers)
    where, value = 1, np.full(ITEMS, 1.0 + world.rank)
    memory = BACKEND.poison(value.nbytes, where).view(np.float64)
    queue: Any = BACKEND.new_stream(where)
    if how == "per thread":
        BACKEND.per_thread(where)
        queue = deferred.PerThread(where)
    elif how == "own":
        with cuda_words.Device(where):
            queue = cuda_words.Stream(non_blocking=True).use().queue
    elif how != "named":
        queue = torch.cuda.current_stream(where).queue
        BACKEND.new_stream(where)
    else:
        with cuda_words.Device(where):
            made = cuda_words.Stream(non_blocking=True)
        queue, Named.handle = made.queue, made.ptr
        BACKEND.new_stream(where)

    def write() -> None:
        memory[:] = value

    kinds: dict[str, Callable[..., Any]] = {"named": Named, "torch": Tensor, "derived": OwnTensor}
    if how == "lent":
        x: Any = lent(memory, where)
    else:
        kind = kinds.get(how, ndarray)
        x = kind(deferred.address_of(memory), (ITEMS,), np.float64, device=where)
    assert device._cupy().current((x, None) if how == "lent" else x, where).device == where
    BACKEND._add(queue, write)
    result = of_cupy(empty((ITEMS,), np.float64, where))
    world.Allreduce(x, result)
    assert (host(result) == world.size * (world.size + 1) / 2).all()


def test_the_default_streams_are_those_of_the_arrays_device(world: Comm) -> None:
    """Handles 0 and 2 mean those of the current device, so it has to be the array's."""
    for prepare in (lambda: None, lambda: BACKEND.per_thread(2)):
        BACKEND.use("late", True)
        prepare()
        x = up(np.full(ITEMS, 1.0 + world.rank), 2)
        handle = device._cupy().current(x, 2).handle
        assert handle == (0 if BACKEND.current(x, 2) == BACKEND._default(0, 2) else PER_THREAD)
        result = of_cupy(empty((ITEMS,), np.float64, 2))
        world.Allreduce(x, result)
        assert (host(result) == world.size * (world.size + 1) / 2).all()


def test_the_driver_knows_the_device_of_an_address(world: Comm) -> None:
    """For arrays that say nothing of it themselves."""
    BACKEND.use("late", True)
    x, result = array(np.full(ITEMS, 2.0), 3), empty((ITEMS,), np.float64, 3)

    class Bare:
        def __init__(self, shown: deferred.Array) -> None:
            self.__cuda_array_interface__ = shown.__cuda_array_interface__

    found = device.recognised(Bare(x))
    assert found is not None
    assert found.device == 3
    BACKEND.over(BACKEND.record(BACKEND.current(x, 3)), True)  # they name no stream
    world.Allreduce(Bare(x), Bare(result))
    assert (host(result) == 2.0 * world.size).all()


def test_few_layouts_are_kept(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    BACKEND.use("late", True)
    monkeypatch.setattr(device, "_LAYOUTS", 2)
    for number in range(1, 7):
        each = MPI.DOUBLE.Create_vector(2, 1, number + 1).Commit()
        data = np.arange(100.0) if world.rank == 0 else np.zeros(100)
        x = up(data, number % 2)
        world.Bcast([x, 3, each])
        moved = np.zeros(100)
        for item in range(3):
            first = item * (number + 2)
            moved[[first, first + number + 1]] = [first, first + number + 1]
        np.testing.assert_array_equal(host(x), data if world.rank == 0 else moved)
        each.Free()
    assert all(len(kept) <= 2 for kept in device._cupy()._layouts.values())


@pytest.mark.parametrize("how", ["launcher", "communicator"])
def test_a_device_is_bound(
    how: str, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's current one and torch's, by the rank on the node."""
    torch: Any = cuda_words.torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    BACKEND.use("late", True)
    for name in device_support.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    local, given = ranks.rank, world
    if how == "launcher":
        local, given = 5 - ranks.rank, None
        monkeypatch.setenv(device_support.LOCAL_RANKS[ranks.rank], str(local))
    assert mpicoll.bind_device(given) == local % 2
    assert (BACKEND.device, torch.device) == (local % 2, local % 2)
    x = np.full(ITEMS, float(ranks.rank))
    result = of_cupy(empty((ITEMS,), np.float64, local % 2))
    world.Allreduce(up(x, local % 2), result)
    assert (host(result) == ranks.size * (ranks.size - 1) / 2).all()


def test_without_cupy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match="needs CuPy"):
        device.CupyBackend()

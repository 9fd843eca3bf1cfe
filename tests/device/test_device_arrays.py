"""Device arrays where callers meet them: arrays in and out, specifications, refusals, order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deferred
import ml_dtypes
import numpy as np
import pytest
from deferred import BACKEND, POLICIES, Array, array, empty, host
from harness import Ranks
from lender import BFLOAT16, CUDA, READ_ONLY, Lender
from mpi4py import MPI

import mpicoll
from mpicoll import Comm, arrays
from mpicoll.runtime import device, device_run, link, staging


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make deferred arrays known to the array functions."""
    made = arrays._Library(
        lambda x: x,
        lambda x: array(host(x)),
        lambda shape, like: empty(shape, like.dtype),
    )
    monkeypatch.setitem(arrays._LIBRARIES, "deferred", lambda: made)
    monkeypatch.setattr(Array, "__module__", "deferred")


@pytest.mark.parametrize("pointers", [True, False])
def test_arrays_come_out_in_their_library(pointers: bool, world: Comm, library: None) -> None:
    BACKEND.use("late", pointers)
    size, rank = world.size, world.rank
    x = np.arange(6, dtype=np.float32).reshape(2, 3) + rank
    total = sum(np.arange(6, dtype=np.float32).reshape(2, 3) + peer for peer in range(size))
    result = mpicoll.allreduce(array(x), comm=world)
    assert isinstance(result, Array)
    assert result.shape == (2, 3)
    np.testing.assert_array_equal(host(result), total)
    np.testing.assert_array_equal(host(mpicoll.allreduce(array(x), "mean", world)), total / size)
    np.testing.assert_array_equal(host(mpicoll.allgather(array(x), world))[rank], x, strict=True)
    np.testing.assert_array_equal(host(mpicoll.broadcast(array(x), 0, world)), x - rank)
    rows, counts = mpicoll.alltoall(array(np.full((size, 2), rank)), comm=world)
    np.testing.assert_array_equal(host(rows), np.repeat(np.arange(size), 2).reshape(size, 2))
    assert counts == [1] * size
    part = mpicoll.reduce_scatter(array(np.ones((size, 4))), comm=world)
    np.testing.assert_array_equal(host(part), np.full((1, 4), size))
    rows = np.arange(2 * size).reshape(size, 2)
    mine = mpicoll.scatter(array(rows if rank == 0 else rows[:1]), 0, world)
    np.testing.assert_array_equal(host(mine), rows[rank])


def test_halves_accumulate_wide_and_divide_before_rounding(world: Comm) -> None:
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        for pointers in (True, False):
            BACKEND.use("late", pointers)
            x = np.full(3000, 40000.0).astype(dtype)
            result = empty((3000,), dtype)
            world.Allreduce(array(x), result, mpicoll.AVG)
            assert (host(result) == x).all()
            assert BACKEND.folds or world.size == 1


@pytest.mark.parametrize("pointers", [True, False])
def test_folds_stay_on_the_device(pointers: bool, world: Comm) -> None:
    BACKEND.use("late", pointers)
    x = array(np.ones(5000))
    staging._POOLS.clear()
    world.Allreduce(x, empty((5000,), np.float64), algorithm="ring")
    assert (BACKEND.folds > 0) == (world.size > 1)
    assert (staging.pool_of(BACKEND).held > 0) == (world.size > 1 and not pointers)
    BACKEND.use("late", pointers)
    world.Allreduce(array(np.ones(5000)), empty((5000,), np.float64), algorithm="direct")
    assert BACKEND.folds == (world.size > 1)  # one kernel for the operands of all ranks


FLOAT8, OTHER_FLOAT8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (MPI.PROD, np.complex64),
        (MPI.PROD, np.complex128),
        (MPI.SUM, FLOAT8),
        (mpicoll.AVG, FLOAT8),
        (MPI.MAX, OTHER_FLOAT8),
        (MPI.LXOR, OTHER_FLOAT8),  # MPIs refuse logic of the floats that they know
    ],
)
def test_the_rare_ones_fold_there_too(op: Any, dtype: Any, world: Comm) -> None:
    rng = np.random.default_rng([6, world.rank])
    x = rng.integers(-2, 3, 4000).astype(dtype)
    if np.dtype(dtype).kind == "c":
        x += (1j * rng.uniform(-1, 1, 4000)).astype(dtype)
    expected, result = np.empty_like(x), empty(x.shape, x.dtype)
    for pointers in (True, False):
        BACKEND.use("late", pointers)
        for algorithm in ("ring", "direct"):
            world.Allreduce(x, expected, op, algorithm=algorithm)
            before = BACKEND.folds
            world.Allreduce(array(x), result, op, algorithm=algorithm)
            assert host(result).tobytes() == expected.tobytes()
            assert (BACKEND.folds > before) == (world.size > 1)


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "chain"])
def test_copies_down_run_ahead_of_their_step(
    algorithm: str, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While messages travel, what is sent next is copied, unless it is on its way here."""
    size, rank, early = world.size, world.rank, []
    queue = device_run.Staged._look_ahead

    def look_ahead(self: device_run.Staged, recvs: Any) -> None:
        queue(self, recvs)
        early.append(len(self._ahead))

    monkeypatch.setattr(device_run.Staged, "_look_ahead", look_ahead)
    n = 512 * size
    for policy in POLICIES:
        BACKEND.use(policy, False)
        x, out = array(np.arange(n) + 1.0 * rank), empty((n,), np.float64)
        if algorithm == "pairwise":
            world.Alltoall(x, out, algorithm=algorithm)
            mine = np.arange(n)[512 * rank :][:512]
            expected = np.concatenate([mine + peer for peer in range(size)])
        elif algorithm == "ring":
            world.Allreduce(x, out, algorithm=algorithm, segment=1024)
            expected = size * np.arange(n) + size * (size - 1) / 2
        else:
            out = x
            world.Bcast(out, algorithm=algorithm, segment=0)
            expected = np.arange(n) + 0.0
        np.testing.assert_array_equal(host(out), expected)
    if size > 2:  # else there is one step, or each waits for the one before
        assert any(early) == (algorithm != "chain")


@pytest.mark.parametrize("op", ["MINLOC", "user", "long double", "compress"])
def test_what_has_no_kernel_goes_through_the_host(op: str, world: Comm) -> None:
    BACKEND.use("late", True)
    options: dict[str, Any] = {}
    operator: Any = MPI.SUM
    x: Any = np.full(4000, 2.0 + world.rank)
    if op == "user":
        operator = MPI.Op.Create(
            lambda a, b, _: np.add(np.frombuffer(a), out := np.frombuffer(b), out=out),
            commute=True,
        )
    expected: Any = sum(np.full(4000, 2.0 + peer) for peer in range(world.size))
    if op == "long double":
        x, expected = x.astype(np.longdouble), expected.astype(np.longdouble)
    if op == "compress":
        x, options = x.astype(np.float32), {"compress": "bf16"}
    spec: Any = array(x)
    target: Any = empty(x.shape, x.dtype)
    result = target
    if op == "MINLOC":
        operator = MPI.MINLOC
        x = np.zeros(4000, np.dtype("f8,i4", align=True))
        x["f0"], x["f1"] = 1.0, world.rank
        result = empty((x.nbytes,), np.uint8)
        spec = [array(x.view(np.uint8).reshape(-1)), 4000, MPI.DOUBLE_INT]
        target = [result, 4000, MPI.DOUBLE_INT]
    world.Allreduce(spec, target, operator, **options)
    assert BACKEND.folds == 0
    if op == "MINLOC":
        assert (host(result).view(x.dtype)["f1"] == 0).all()
    else:
        np.testing.assert_array_equal(host(result), expected)
    if op == "user":
        operator.Free()


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.float64), BFLOAT16], ids=str)
def test_dlpack_alone_is_enough(
    dtype: Any, version: Any, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device._BACKENDS, Lender, BACKEND)
    BACKEND.use("late", True)
    memory = (np.arange(600) % 50).reshape(20, 30).astype(dtype)
    given = Lender(memory, version=version, kind=CUDA, number=0)
    found = device.recognised(given)
    assert found is not None
    assert (found.address, found.length) == (deferred.address_of(memory), memory.nbytes)
    assert (found.dtype, found.readonly) == (dtype, False)
    assert given.asked[-1]["stream"] == -1
    assert given.returned == 0
    result = empty((20, 30), dtype)
    world.Allreduce(given, result)
    np.testing.assert_array_equal(host(result), memory * dtype.type(world.size))
    del found
    gc.collect()
    assert given.returned == given.lent == 2


def test_dlpack_says_what_is_read_only(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device._BACKENDS, Lender, BACKEND)
    given = Lender(np.zeros(600), kind=CUDA, flags=READ_ONLY)
    with pytest.raises(BufferError, match="not writable"):
        world.Allreduce(array(np.zeros(600)), given)
    with pytest.raises(BufferError, match="DLPack type 17"):
        world.Bcast(Lender(np.zeros(8, np.uint8), kind=CUDA, type=(17, 4, 2)))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Array(4096, (4, 4), "f8", (64, 8)), BufferError, "not contiguous"),
        (lambda: Array(4096, (4,), "f8", readonly=True), BufferError, "not writable"),
        (lambda: Array(4096, (4,), "f4,i4"), KeyError, "cannot map"),
        (lambda: Array(4096, (4,), ">f8"), KeyError, "cannot map"),
    ],
)
def test_refused_before_anything_is_sent(
    make: Callable[[], Array], error: type[Exception], words: str, world: Comm
) -> None:
    before = world.stats.total.bytes_sent
    with pytest.raises(error, match=words):
        world.Allreduce(MPI.IN_PLACE, make())
    assert world.stats.total.bytes_sent == before
    world.Barrier()


def test_two_devices_in_one_call_are_refused(world: Comm) -> None:
    with pytest.raises(ValueError, match="device 0 and receive buffer on device 1"):
        world.Allreduce(array(np.ones(4)), empty((4,), np.float64, device=1))
    world.Barrier()


def test_protocol_by_setting_then_by_the_library(
    world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    for name in ("Direct", "Staged"):
        kind = getattr(device_run, name)

        def made(*args: Any, kind: Any = kind) -> Any:
            used.append(kind.__name__)
            return kind(*args)

        monkeypatch.setattr(link, name, made)
    for setting, says, expected in (
        (None, True, "Direct"),
        (None, False, "Staged"),
        (True, False, "Direct"),
        (False, True, "Staged"),
    ):
        BACKEND.use("late", says)
        changed = replace(world._link.settings, cuda_aware=setting)
        monkeypatch.setattr(world._link, "settings", changed)
        world.Allreduce(array(np.ones(9)), empty((9,), np.float64))
        assert used[-1] == expected


@pytest.mark.parametrize("fault", ["copy", "fold"])
def test_a_fault_of_the_device_is_raised_and_hangs_nobody(
    fault: str, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    BACKEND.use("late", False)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device fell off")

    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(BACKEND, fault, broken)
        caught: Exception | None = None
        try:
            world.Allreduce(array(np.ones(999)), empty((999,), np.float64), algorithm="ring")
        except Exception as error:
            caught = error
    if world.size > 1:
        assert isinstance(caught, RuntimeError if world.rank == 0 else mpicoll.PeerError)
    result = empty((999,), np.float64)
    world.Allreduce(array(np.ones(999)), result)
    assert (host(result) == world.size).all()


class Fault:
    """Lets a call of the device fail, once: the ``number``-th of those that are counted."""

    def __init__(self, name: str, number: int, patch: pytest.MonkeyPatch) -> None:
        """Stand before a method of the device."""
        self.left = number
        self._method = getattr(BACKEND, name)
        patch.setattr(BACKEND, name, self)

    def __call__(self, *args: Any) -> Any:
        """Do what the method does, or raise."""
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("the device has had enough")
        return self._method(*args)


@pytest.mark.parametrize("name", ["allocate", "copy", "fold", "over", "pinned", "record", "wait"])
def test_a_fault_loses_no_pinned_memory(
    name: str, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the device fails, the pool has every segment again when the call is over."""
    BACKEND.use("late", False)
    staging._POOLS.clear()
    pool = staging.pool_of(BACKEND)
    for number in range(1000):
        x, result = array(np.ones(999)), empty((999,), np.float64)
        with monkeypatch.context() as patch:
            fault = Fault(name, number, patch) if world.rank == 0 else None
            caught: Exception | None = None
            try:
                world.Allreduce(x, result, algorithm="ring")
            except Exception as error:
                caught = error
        told = f"{name} number {number}"
        assert isinstance(caught, (RuntimeError, mpicoll.PeerError) if caught else type(None))
        raised = max(ranks.comm.allgather(caught is not None))
        assert raised or (host(result) == world.size).all(), told
        free = [segment for group in pool._free.values() for segment in group]
        assert sum(segment.memory.size for segment in free) == pool.held, told
        assert len({id(segment) for segment in free}) == len(free), told
        world.Allreduce(x, result)
        assert (host(result) == world.size).all(), told
        if not ranks.comm.bcast(fault is not None and fault.left < 0):
            break
    else:
        raise AssertionError("there was no end of calls")


def test_memory_that_is_not_pinned_gives_way_to_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    BACKEND.use("late", False)
    pool = staging.Pool(BACKEND)
    with monkeypatch.context() as patch:
        patch.setattr(BACKEND, "pinned", lambda nbytes: {}[nbytes])  # there is none
        first = pool.take(5000)
        assert (first.pinned, first.memory.size, pool.held) == (False, 8192, 8192)
        pool.give(first)
        assert pool.take(5000) is first  # still none
    array(np.ones(9))
    pool.give(first, BACKEND.record(BACKEND.stream))
    other = pool.take(5000)
    assert (other.pinned, pool.held) == (True, 16384)  # a copy may use the first one still
    third = pool.take(5000)  # asked once more, it says that it is over
    assert (third.pinned, pool.held) == (True, 16384)
    assert third.memory is not first.memory
    for segment in (other, third):
        pool.give(segment)
    kept = [segment for group in pool._free.values() for segment in group]
    assert all(segment.pinned for segment in kept)
    assert sum(segment.memory.size for segment in kept) == pool.held


def test_nothing_is_kept_over_many_calls(world: Comm) -> None:
    BACKEND.use("late", False)
    x, result = array(np.ones(999)), empty((999,), np.float64)
    for _ in range(3):
        world.Allreduce(x, result)
    held, made = staging.pool_of(BACKEND).held, len(BACKEND._streams)
    for _ in range(20):
        world.Allreduce(x, result)
    assert staging.pool_of(BACKEND).held == held
    assert len(BACKEND._streams) == made


def test_several_in_flight_on_several_streams(world: Comm) -> None:
    for pointers in (True, False):
        BACKEND.use("by chance", pointers)
        given = []
        for number in range(4):
            BACKEND.new_stream()
            x, result = array(np.full(700, float(number))), empty((700,), np.float64)
            given.append((world.Iallreduce(x, result), x, result, number))
        for request, _, result, number in reversed(given):
            request.Wait()
            BACKEND.new_stream()
            assert (host(result) == number * world.size).all()

"""The same matrix on a real device, and the order of streams there: ``-m gpu``."""

from __future__ import annotations

from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
from cases import attempt, cover
from deferred import POISON, Array, address_of
from device_exchange import DeviceExchange
from exchange import METHODS
from harness import Ranks
from skips import has_cuda

import mpicoll
from mpicoll import Comm
from mpicoll.runtime import device_support, staging

pytestmark = pytest.mark.gpu

SHOWN = 12


@pytest.fixture(autouse=True)
def cupy(deferred_device: None) -> Any:
    """CuPy, with a device of this rank's; skips where there is none."""
    if not has_cuda():
        pytest.skip("no device")
    import cupy

    local = device_support.local_rank() or 0
    cupy.cuda.Device(local % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


class Shown(Array):
    """Device memory by its interface alone, of dtypes that CuPy has not, too."""


class GpuImage:
    """A memory of the host, and its place on the device."""

    def __init__(self, memory: Any) -> None:
        import cupy

        self.cupy = cupy
        self.memory, self.before, self.passed = memory, memory.copy(), False
        raw = cupy.full(memory.size + 64, POISON, cupy.uint8)
        skip = (address_of(memory) - raw.data.ptr) % 64
        self.inside = raw[skip : skip + memory.size]
        cupy.cuda.get_current_stream().synchronize()

    def up(self) -> None:
        self.inside.set(self.before)

    def down(self) -> None:
        found = self.inside.get()
        if self.memory.flags.writeable:
            self.memory[:] = found

    def holds(self, array: Any) -> bool:
        start = address_of(array) - address_of(self.memory)
        return start >= 0 and start + array.nbytes <= self.memory.size

    def of(self, array: Any) -> Array:
        self.passed = True
        return Shown(
            self.inside.data.ptr + address_of(array) - address_of(self.memory),
            array.shape,
            array.dtype,
            None if array.flags.c_contiguous else array.strides,
            readonly=not array.flags.writeable,
            owner=self,
            device=self.inside.device.id,
        )


class GpuExchange(DeviceExchange):
    """An exchange of real device arrays."""

    image = GpuImage

    def new_stream(self) -> None:
        import cupy

        cupy.cuda.Stream(non_blocking=True).use()


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize("method", METHODS)
def test_gpu_matrix(
    method: str, pointers: bool, world: Comm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpicoll.runtime import device

    if pointers and not device_support.takes_device_pointers():
        pointers = False  # then it is tried twice
    monkeypatch.setattr(cases, "Exchange", GpuExchange)
    monkeypatch.setattr(device._cupy(), "direct", lambda: pointers)
    failures = []
    for case in cover(method, world.size, ranks.seed):
        hosted = (case.number + ranks.rank) % 7 == 0
        monkeypatch.setattr(staging, "SMALL_BYTES", 1 << 20 if hosted else 0)
        wrong, _ = attempt(case, world, ranks.seed)
        if wrong:
            failures.append(f"{case}: {wrong}")
    assert not failures, f"MPICOLL_TEST_SEED={ranks.seed}: {len(failures)}\n" + "\n".join(
        failures[:SHOWN]
    )


_SLOW = """
extern "C" __global__ void slow(double *x, long long count, double value) {
    long long begin = clock64();
    while (clock64() - begin < 50000000) {}
    for (long long i = 0; i < count; i++) x[i] = value;
}
"""


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
def test_work_queued_before_the_call_is_seen(form: str, world: Comm, cupy: Any) -> None:
    slow = cupy.RawKernel(_SLOW, "slow")
    count = 5000
    x, result = cupy.zeros(count), cupy.zeros(count)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        plan = world.Allreduce_init(x, result) if form == "persistent" else None
        slow((1,), (1,), (x, np.int64(count), np.float64(3)))
        if form == "blocking":
            world.Allreduce(x, result)
        else:
            request = world.Iallreduce(x, result) if plan is None else plan
            if plan is not None:
                plan.Start()
            request.Wait()
    with cupy.cuda.Stream(non_blocking=True):
        assert bool((result == 3 * world.size).all())
    if plan is not None:
        plan.Free()


def test_libraries_keep_their_arrays(world: Comm, cupy: Any) -> None:
    for dtype in (np.float32, np.float16, np.dtype(ml_dtypes.bfloat16)):
        x = cupy.asarray(np.full((3, 4000), 1 + world.rank, dtype))
        total = mpicoll.allreduce(x, comm=world)
        assert isinstance(total, cupy.ndarray)
        assert total.dtype == x.dtype
        assert float(total[0, 0]) == world.size * (world.size + 1) / 2


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
def test_training_layer(
    pointers: bool, world: Comm, ranks: Ranks, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the deferred device shows of mpicoll.parallel, with CuPy in the stand-in's place."""
    import sharded_there
    import test_parallel_data_device as data
    import test_parallel_experts_device as experts
    import test_parallel_sharded_device as sharded
    import test_parallel_statistics_device as statistics

    from mpicoll.runtime import device

    if pointers and not device_support.takes_device_pointers():
        pointers = False
    for module in (sharded_there, data, experts, sharded, statistics):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(device._cupy(), "direct", lambda: pointers)
    monkeypatch.setattr(sharded, "_EXPECTED", {})
    # On all ranks, and where others have theirs on the host.
    for place in ("device", "one rank"):
        for compress in (None, "bf16"):
            data.test_bits_are_those_of_the_host(compress, place, "late", pointers, world, ranks)
    for place in ("device", "even ranks"):
        for dtype in (np.float32, np.dtype(ml_dtypes.bfloat16)):
            rng = np.random.default_rng([ranks.seed, world.rank])
            given = dtype, place, "late", pointers, world, rng
            experts.test_bits_are_those_of_the_host(*given)
            statistics.test_bits_are_those_of_the_host(*given)
            statistics.test_features(*given)
    for stage in (1, 2, 3):
        sharded.test_bits_are_those_of_the_host(stage, "device", "late", pointers)

"""DataParallel with arrays of the device: the bits that it gives on the host, and no others."""

from __future__ import annotations

from typing import Any

import like_cupy as cupy
import ml_dtypes
import numpy as np
import pytest
from deferred import BACKEND, POLICIES
from harness import Ranks
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.parallel import DataParallel

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Arrays = dict[str, Any]

#: Names, shapes and dtypes in order of use.
FORMS: list[tuple[str, tuple[int, ...], Any]] = [
    ("embedding", (50, 4), np.float32),
    ("scale", (), np.float64),
    ("nothing", (0, 7), np.float32),
    ("half", (9,), np.float16),
    ("brain", (2, 5), BFLOAT16),
    ("phase", (6,), np.complex64),
    ("bias", (700,), np.float32),
    ("head", (4, 4), np.float64),
]


def made(rng: np.random.Generator) -> Arrays:
    """Return small whole numbers, whose sums are exact in any order."""
    return {name: rng.integers(-8, 9, shape).astype(dtype) for name, shape, dtype in FORMS}


def placed(arrays: Arrays, names: Any) -> Arrays:
    """Return copies, those of some names on the device."""
    return {
        name: cupy.asarray(one) if name in names else one.copy() for name, one in arrays.items()
    }


def train(params: Arrays, steps: list[Arrays], names: Any, comm: Comm, **options: Any) -> Any:
    """Train, and return all that comes out, as arrays of the host."""
    found = []
    parallel = DataParallel(params, comm, 600, **options)
    for number, grads in enumerate(steps):
        given = placed(grads, names)
        if number == 1:  # two batches in one step
            with parallel.no_sync():
                for name in given:
                    parallel.ready(name, given[name])
        for name in reversed(list(given)):
            if (number, name) != (2, "bias"):  # unused in one step
                parallel.ready(name, given[name])
        means = parallel.finish()
        for name, mean in means.items():
            params[name] -= mean
        found.append({name: cupy.asnumpy(one).tobytes() for name, one in means.items()})
        parallel.verify()
    parallel.free()
    return found, {name: cupy.asnumpy(one).tobytes() for name, one in params.items()}


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["device", "some", "one rank"])
@pytest.mark.parametrize("compress", [None, "bf16", "fp16"])
def test_bits_are_those_of_the_host(
    compress: Any, where: str, policy: Any, pointers: bool, world: Comm, ranks: Ranks
) -> None:
    BACKEND.use(policy, pointers)
    names = {
        "device": [name for name, *_ in FORMS],
        "some": ["embedding", "brain", "head"],
        "one rank": [name for name, *_ in FORMS] * (world.rank == 0),
    }[where]
    rng = np.random.default_rng([ranks.seed, world.rank])
    start, steps = made(rng), [made(rng) for _ in range(3)]
    options = {"compress": compress}
    expected, last = train(placed(start, []), steps, [], world, **options)
    params = placed(start, names)
    found, ended = train(params, steps, names, world, **options)
    assert all(type(params[name]) is cupy.ndarray for name in names)
    assert found == expected
    assert ended == last


@pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
def test_clip(pointers: bool, world: Comm, ranks: Ranks) -> None:
    BACKEND.use("late", pointers)
    grads = made(np.random.default_rng([ranks.seed, world.rank]))
    results = []
    for names in ([], list(grads)):
        parallel = DataParallel(placed(grads, names), world)
        for name, grad in placed(grads, names).items():
            parallel.ready(name, grad)
        parallel.finish()
        norm = parallel.clip(2.0)
        assert norm > 2
        assert parallel.clip(2.0) == pytest.approx(2, rel=1e-2)
        means = {name: cupy.asnumpy(one) for name, one in parallel.gradients.items()}
        results.append((norm, means))
        parallel.free()
    (norm, means), (norm_there, means_there) = results
    # Squares are added in another order.
    assert norm_there == pytest.approx(norm, rel=1e-12)
    for name, mean in means.items():
        eps = float(ml_dtypes.finfo(mean.dtype).eps)
        np.testing.assert_allclose(means_there[name].astype("D"), mean.astype("D"), rtol=2 * eps)


def test_gradients_written_in_place_stay_on_the_device(world: Comm) -> None:
    BACKEND.use("late", True)
    parallel = DataParallel({"a": cupy.zeros(1000, np.float32)}, world)
    copies = BACKEND.copies
    parallel.gradients["a"][...] = world.rank + 1
    parallel.ready("a")
    mean = parallel.finish()["a"]
    assert type(mean) is cupy.ndarray
    assert cupy.asnumpy(mean).tolist() == [(world.size + 1) / 2] * 1000
    assert BACKEND.copies == copies or world.size > 1
    parallel.free()


def test_gradients_of_another_place_are_refused(world: Comm) -> None:
    BACKEND.use("late", True)
    parallel = DataParallel({"a": cupy.zeros(3), "b": np.zeros(3)}, world)
    with pytest.raises(ValueError, match="gradient of 'a' is on host; expected device 0"):
        parallel.ready("a", np.zeros(3))
    with pytest.raises(ValueError, match="gradient of 'b' is on device 0; expected host"):
        parallel.ready("b", cupy.zeros(3))
    assert not cupy.asnumpy(parallel.finish()["a"]).any()
    parallel.free()


def test_places_that_divide_differently_are_refused(world: Comm) -> None:
    BACKEND.use("late", True)
    other = world.rank == world.size - 1 > 0
    params = {"a": cupy.zeros(3), "b": np.zeros(3) if other else cupy.zeros(3)}
    if world.size > 1:
        with pytest.raises(ValueError, match=f"rank {world.size - 1} .* not where the first one"):
            DataParallel(params, world)
    far = cupy.zeros(3)
    far.device.id = 1
    if other or world.size == 1:
        params = {"a": cupy.zeros(3), "b": far}
    with pytest.raises(ValueError, match="device 0 and device 1; expected those of one device"):
        DataParallel(params, world)
    assert MPI.COMM_WORLD.allreduce(1) == world.size

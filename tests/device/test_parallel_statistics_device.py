"""Batch norm, features, metrics and samples with arrays of the device, against the host's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import like_cupy as cupy
import ml_dtypes
import numpy as np
import pytest
from deferred import BACKEND, POLICIES
from mpi4py import MPI
from test_parallel_experts_device import differing, here, on_host, side, waits
from test_parallel_statistics import COUNTS, batches, roundings, same_everywhere

from mpicoll import Comm
from mpicoll.parallel import (
    Moments,
    SyncBatchNorm,
    average_metrics,
    broadcast_object,
    gather_features,
    scatter_dataset,
)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["f2", BFLOAT16, "f4", "f8"]
SIDES = ["device", "even ranks", "odd ranks"]

Array = Any
Move = Callable[[Array], Array]

both_protocols = pytest.mark.parametrize("pointers", [True, False], ids=["pointers", "staged"])
all_policies = pytest.mark.parametrize("policy", POLICIES)


# -- batch normalisation ----------------------------------------------------------------


def normalise(case: Any, x_to: Move, weight_to: Move, world: Comm) -> dict[str, Array]:
    """Go forwards and backwards; return all that comes out, by name."""
    x, grad, weight, bias = case
    norm = SyncBatchNorm(3, world, eps=0.25, momentum=0.5)
    there, weights = x_to(x), weight_to(weight)
    y, moments = norm.forward(there, weights, x_to(bias))
    back = norm.backward(x_to(grad), there, moments, weights)
    # Of means that are whole numbers, so that sums are exact in any order.
    whole = Moments(moments.count, np.array([1.0, -2.0, 3.0]), moments.deviation)
    other = norm.backward(x_to(grad), there, whole)
    sums = norm.backward_sums(x_to(grad), there, whole)
    inferred = norm.infer(there, weights)
    places = [("x", (y, back.x, other.x, other.weight, other.bias, inferred), there)]
    places.append(("weight", (back.weight, back.bias), weights))
    for name, arrays, like in places:
        assert {type(one) for one in arrays} == {type(like)}, name
    return {
        "y": y,
        "inferred": inferred,
        "by x": back.x,
        "by weight": back.weight,
        "by bias": back.bias,
        "by x, whole": other.x,
        "by weight, whole": other.weight,
        "by bias, whole": other.bias,
        "sums": sums,
        "mean": moments.mean,
        "deviation": moments.deviation,
        "running mean": norm.running_mean,
        "running variance": norm.running_variance,
    }


@both_protocols
@all_policies
@pytest.mark.parametrize("where", SIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_host(
    dtype: Any, where: str, policy: Any, pointers: bool, world: Comm, rng: np.random.Generator
) -> None:
    """Of small whole numbers, and counts that are powers of two or none: local sums are exact."""
    BACKEND.use(policy, pointers)
    move = side(where)
    for n in (8, 4 * (RANK % 2) + 4 * (SIZE < 2), 2**RANK):
        x, grad = rng.integers(-4, 5, (2, n, 3, 2)).astype(dtype)
        case = x, grad, rng.standard_normal(3).astype(dtype), rng.standard_normal(3)
        expected = normalise(case, here, here, world)
        for weight_to in (cupy.asarray, here):
            found = normalise(case, move, weight_to, world)
            # Deviations from the mean of all ranks are rounded, and so are their sums.
            assert set(differing(found, expected)) <= {"by x", "by weight"}
            host = on_host(found)
            for name in ("by x", "by weight"):
                # At most 16 terms of at most 4 * 8, each sum in some order; scale and weight.
                eps = float(ml_dtypes.finfo(host[name].dtype).eps)
                a, b = host[name].astype(float), expected[name].astype(float)
                atol = 2.0**-53 * 2 * 16 * 16 * 32 * 8
                np.testing.assert_allclose(a, b, rtol=2 * eps, atol=atol)
            same_everywhere(found["mean"], found["running variance"], found["sums"])


@pytest.mark.parametrize("counts", COUNTS)
def test_any_numbers_keep_the_bound(counts: str, world: Comm, rng: np.random.Generator) -> None:
    """Each order of sums is within the bound of tests/mpi; two of them within twice that."""
    BACKEND.use("late", False)
    every, grads = batches(rng, counts), batches(rng, counts)
    case = every[RANK], grads[RANK], rng.standard_normal(3), rng.standard_normal(3)
    expected = normalise(case, here, here, world)
    found = normalise(case, side("even ranks"), cupy.asarray, world)
    total = sum(map(len, every)) * 2
    most = max(float(np.abs(one).max(initial=0)) for one in (*every, *grads))
    # The largest terms: gradients, and products with deviations twice over.
    bound = 2 * roundings(total) * (2 + 25) * max(1, most) * total
    for name, one in on_host(found).items():
        np.testing.assert_allclose(one, expected[name], rtol=0, atol=bound, err_msg=name)
    names = "mean", "deviation", "running mean", "running variance", "sums"
    same_everywhere(*(found[name] for name in names))


@pytest.mark.parametrize(("axis", "shape"), [(1, (4, 3)), (-1, (2, 4, 3)), (0, (3, 8))])
def test_axes(axis: int, shape: tuple[int, ...], world: Comm, rng: np.random.Generator) -> None:
    BACKEND.use("late", True)
    x = rng.integers(-4, 5, shape).astype(np.float32)
    norm = SyncBatchNorm(3, world, axis=axis)
    expected, _ = norm.forward(x)
    for given in (cupy.asarray(x), cupy.asarray(np.repeat(x, 2, axis=-1))[..., ::2]):
        found, _ = norm.forward(given)
        assert not differing({"y": found}, {"y": expected})


def test_the_host_waits_once(world: Comm) -> None:
    BACKEND.use("late", True)
    norm = SyncBatchNorm(3, world)
    x, weight = cupy.ones((4, 3), np.float32), cupy.ones(3)
    with waits(1):
        _, moments = norm.forward(x, weight, weight)
    with waits(1):
        norm.backward(x, x, moments, weight)
    with waits(1):
        norm.backward_sums(x, x, moments)
    with waits(0):
        norm.infer(x, weight, np.ones(3))
    with waits(0):
        norm.statistics(x[:0])


def test_inputs_of_the_device_that_are_refused(world: Comm) -> None:
    BACKEND.use("late", True)
    x, moments = cupy.ones((4, 2)), Moments(4, np.zeros(2), np.ones(2))
    norm, wide = SyncBatchNorm(2, world), SyncBatchNorm(2, world, dtype=np.longdouble)
    for call, words in [
        (lambda: wide.statistics(x), "x is on device 0, where statistics in .* pass dtype=float"),
        (lambda: wide.infer(x), "x is on device 0, where statistics"),
        (lambda: norm.backward(np.ones((4, 2)), x, moments), "grad is on host; expected device 0"),
        (lambda: norm.backward_sums(x, np.ones((4, 2)), moments), "grad is on device 0; expected"),
        (lambda: norm.statistics(cupy.ones((4, 2), int)), "x is of int64; expected a NumPy or"),
        (lambda: norm.statistics(cupy.ones((4, 3))), r"x has shape \(4, 3\); expected 2 channels"),
        (lambda: norm.forward(x, cupy.ones(3)), r"weight has shape \(3,\); expected \(2,\)"),
    ]:
        with pytest.raises(ValueError, match=f"SyncBatchNorm on rank {RANK}: {words}"):
            call()
    # What is of the host may come with a weight of the device, long doubles too.
    y = wide.infer(np.ones((4, 2), np.longdouble), cupy.ones(2), [1.0, 2.0])
    assert y.dtype == np.longdouble


# -- features ---------------------------------------------------------------------------


@both_protocols
@all_policies
@pytest.mark.parametrize("where", SIDES)
@pytest.mark.parametrize("dtype", ["f2", BFLOAT16, "f4", "c8"], ids=str)
def test_features(
    dtype: Any, where: str, policy: Any, pointers: bool, world: Comm, rng: np.random.Generator
) -> None:
    """Of small whole numbers, exact in every dtype and order."""
    BACKEND.use(policy, pointers)
    move = side(where)
    for counts, shape in [("uneven", (3,)), ("some empty", (2, 2)), ("even", (2, 0))]:
        rows = rng.integers(-4, 5, (COUNTS[counts](RANK), *shape)).astype(dtype)
        expected = gather_features(rows, world)
        found = gather_features(move(rows), world)
        grad = rng.integers(-4, 5, expected.features.shape).astype(dtype)
        given = move(grad)
        back = found.backward(given)
        assert type(found.features) is type(back) is type(given)
        assert (found.counts, found.own) == (expected.counts, expected.own)
        assert not differing(
            {"features": found.features, "gradient": back},
            {"features": expected.features, "gradient": expected.backward(grad)},
        )


def test_features_that_are_strided(world: Comm) -> None:
    BACKEND.use("late", True)
    x = np.arange(24.0).reshape(6, 4) + RANK
    found = gather_features(cupy.asarray(x)[::2, ::-1], world)
    assert cupy.asnumpy(found.features[found.own]).tolist() == x[::2, ::-1].tolist()
    back = found.backward(cupy.ones((4, 3 * SIZE)).T)
    assert cupy.asnumpy(back).tolist() == np.full((3, 4), float(SIZE)).tolist()


def test_gradient_of_features_of_another_place(world: Comm) -> None:
    BACKEND.use("late", True)
    for given, grad, words in [
        (cupy.ones((2, 3)), np.ones((2 * SIZE, 3)), "on host; expected .* on device 0"),
        (np.ones((2, 3)), cupy.ones((2 * SIZE, 3)), "on device 0; expected .* on host"),
    ]:
        gathered = gather_features(given, world)
        with pytest.raises(ValueError, match=f"backward on rank {RANK}: grad is of .* {words}"):
            gathered.backward(grad)


# -- metrics ----------------------------------------------------------------------------


@all_policies
def test_metrics(policy: Any, world: Comm) -> None:
    BACKEND.use(policy, True)
    loss = cupy.full((4,), RANK, np.float32).mean()
    weight = cupy.asarray(RANK + 1) if RANK % 2 else RANK + 1
    with waits(2 + RANK % 2):
        means = average_metrics({"loss": loss, "half": cupy.asarray(0.5)}, weight, world)
    weights = range(1, SIZE + 1)
    expected = sum(rank * (rank + 1) for rank in range(SIZE)) / sum(weights)
    assert means == ({"loss": expected, "half": 0.5} if RANK == 0 else None)


def test_metrics_that_are_no_numbers(world: Comm) -> None:
    BACKEND.use("late", True)
    wrong = cupy.ones(2) if RANK == LAST else 1.0
    with pytest.raises(ValueError, match=f"rank {LAST} passed 'a' of type ndarray; expected a"):
        average_metrics({"a": wrong}, 1, world)


# -- samples ----------------------------------------------------------------------------


@both_protocols
@all_policies
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("root", [0, LAST])
def test_scatter_dataset(
    root: int, seed: int | None, policy: Any, pointers: bool, world: Comm
) -> None:
    BACKEND.use(policy, pointers)
    for count in (0, SIZE - 1, 29):
        x = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
        half = np.arange(count).astype(BFLOAT16)
        dataset = [np.asfortranarray(x), np.arange(count), half, x[:, :, :0], x[:, 0] > 5]
        expected = scatter_dataset(dataset if root == RANK else None, world, root=root, seed=seed)
        # Labels stay on the host.
        given = [one if at == 1 else cupy.asarray(one) for at, one in enumerate(dataset)]
        found = scatter_dataset(given if root == RANK else None, world, root=root, seed=seed)
        kinds = [np.ndarray if at == 1 else cupy.ndarray for at in range(len(dataset))]
        assert list(map(type, found)) == kinds
        names = list(map(str, range(len(dataset))))
        assert not differing(
            dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True))
        )


@pytest.mark.parametrize("lack", ["library", "memory"])
def test_a_rank_that_can_not_hold_them(
    lack: str, world: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks say so, before any rows are sent."""
    BACKEND.use("late", True)
    arrays = [cupy.ones((4, 3)), np.ones(4)] if RANK == 0 else None
    if lack == "library" and SIZE == 1:
        return  # the root has it

    def nothing(*_: Any) -> Any:
        raise MemoryError("no room")

    def nothing_sent(*_: Any) -> Any:
        raise AssertionError("rows were sent")

    if RANK == LAST and lack == "library":
        monkeypatch.setitem(sys.modules, cupy.__name__, None)
    elif RANK == LAST:
        monkeypatch.setattr(cupy, "empty", nothing)
    monkeypatch.setattr(Comm, "Scatterv", nothing_sent)
    words = {"library": "ModuleNotFoundError: .*", "memory": "MemoryError: no room"}[lack]
    match = f"on rank {RANK}: rank {LAST} can not hold arrays of like_cupy, which rank 0 .*{words}"
    with pytest.raises(ValueError, match=match):
        scatter_dataset(arrays, world)
    assert world.allgather(RANK) == list(range(SIZE))


def test_arrays_on_two_devices_are_refused(world: Comm) -> None:
    BACKEND.use("late", True)
    far = cupy.ones(3)
    far.device.id = 1
    with pytest.raises(ValueError, match="rank 0 passed arrays on device 0 and device 1"):
        scatter_dataset([cupy.ones(3), far] if RANK == 0 else None, world)


@all_policies
def test_objects(policy: Any, world: Comm) -> None:
    BACKEND.use(policy, True)
    made = cupy.full((3,), RANK, BFLOAT16)
    given = broadcast_object({"rate": 0.5, "table": made} if RANK == LAST else None, world, LAST)
    assert type(given["table"]) is cupy.ndarray
    assert cupy.asnumpy(given["table"]).tolist() == [LAST] * 3

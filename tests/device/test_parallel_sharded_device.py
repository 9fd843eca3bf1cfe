"""Sharded training with arrays of the device: the bits of the host, and no others."""

from __future__ import annotations

from typing import Any

import like_cupy as cupy
import numpy as np
import pytest
import sharding_cases as cases
from deferred import BACKEND, POLICIES
from mpi4py import MPI
from sharded_there import (
    COMM,
    EVERY,
    PLACES,
    RANK,
    SIZE,
    Arrays,
    Names,
    Training,
    by_protocol,
    by_stage,
    grads,
    in_places,
    on_host,
    placed,
)

from mpicoll.parallel import SGD, Adam, ShardedOptimizer, ShardedParameters
from mpicoll.parallel.optimizers import PIECE


def multiples(step: int) -> Arrays:
    """Return gradients whose means are whole, so that all sums of squares are exact."""
    return {name: one * one.dtype.type(SIZE) for name, one in grads(step, whole=True).items()}


def trained(stage: int, names: Names, **options: Any) -> list[Any]:
    """Train, and return all that comes out: values after each step, norms, memory."""
    found: list[Any] = []
    one = Training(stage, names, **options)
    with one.sharded as sharded:
        one.hand_over(grads(0))
        found += sharded.step(), one.values()
        one.hand_over(multiples(1))
        one.accumulate()
        one.hand_over(multiples(2))
        found += sharded.step(max_norm=1.5, loss_scale=4.0), one.values()
        one.hand_over(grads(3), skip="half")  # whose gradients count as zero
        found += sharded.step(missing="zero"), one.values()
        found += sharded.memory(), sharded.memory(peak=True)
    return found


_EXPECTED: dict[str, list[Any]] = {}


def expected(stage: int, **options: Any) -> list[Any]:
    """Return what comes out on the host, where nothing depends on the device."""
    key = f"{stage} {options!r}"
    if key not in _EXPECTED:
        _EXPECTED[key] = trained(stage, (), **options)
    return _EXPECTED[key]


# -- the trajectory ---------------------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("policy", POLICIES)
@in_places
@by_stage
def test_bits_are_those_of_the_host(stage: int, where: str, policy: Any, pointers: bool) -> None:
    BACKEND.use(policy, pointers)
    options = {"order": "rank"} | ({} if where == "some" else {"bucket_bytes": 60})
    *steps, memory, peak = trained(stage, PLACES[where], **options)
    *steps_there, memory_there, peak_there = expected(stage, **options)
    assert steps == steps_there
    assert steps[2] > 1.5  # so that it was clipped
    if where != "some":  # more groups, and each has padding
        assert (memory, peak) == (memory_there, peak_there)


@pytest.mark.parametrize("wire", [None, "float32"])
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.25),
        SGD(0.1, momentum=0.9, weight_decay=0.01),
        SGD(0.1, momentum=0.5, nesterov=True),
        Adam(0.01, weight_decay=0.1, decoupled=False),
    ],
    ids=["sgd", "momentum", "nesterov", "adam_l2"],
)
@by_stage
def test_optimizers_and_wires(stage: int, optimizer: Any, wire: Any) -> None:
    BACKEND.use("late", True)
    options = {"optimizer": optimizer, "wire": wire, "order": "rank"}
    assert trained(stage, EVERY, **options) == expected(stage, **options)


@by_protocol
@pytest.mark.parametrize("policy", POLICIES)
def test_buckets_in_different_orders(policy: Any, pointers: bool) -> None:
    """Each rank brings gradients in an order of its own, and each parameter is a bucket."""
    BACKEND.use(policy, pointers)
    values = []
    for names in (EVERY, ()):
        one = Training(2, names, bucket_bytes=1)
        with one.sharded as sharded:
            for step in range(2):
                given = placed(grads(step, whole=True), names)
                for at in np.random.default_rng([RANK, step]).permutation(len(given)):
                    sharded.ready([*given][at], given[[*given][at]])
                sharded.step()
            values.append(one.values())
    assert values[0] == values[1]


def test_dtypes_that_a_gradient_may_have() -> None:
    """What the wire's dtype holds exactly is converted on the device."""
    BACKEND.use("late", True)
    results = []
    for move in (cupy.asarray, np.copy):
        params = {"x": move(np.ones(5, np.float32)), "y": move(np.ones(3, np.complex128))}
        given = {"x": move(np.arange(5, dtype=np.float16)), "y": move(np.full(3, 2j, "F"))}
        with ShardedOptimizer(params, SGD(0.5), stage=1) as one:
            for name, gradient in given.items():
                one.ready(name, gradient)
            one.accumulate()
            one.step({**given, "x": move(np.arange(5, dtype=np.int8))})
        results.append(on_host(params))
    assert results[0] == results[1]


# -- where it is, and when it is waited for ---------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), Adam(weight_decay=0.1)],
    ids=["sgd", "adam"],
)
def test_an_update_is_queued_as_a_whole(optimizer: Any, dtype: Any) -> None:
    """As many launches for any length, nothing waited for, and the bits of the host."""
    rng = np.random.default_rng(4)
    launches = set()
    for length in (1, 100, 3 * PIECE + 5):
        BACKEND.use("late", True)
        value, gradient = rng.standard_normal((2, length)).astype(dtype)
        host = {"value": value.copy(), "gradient": gradient.copy()}
        host |= {slot: np.full(length, 0.25, dtype) for slot in optimizer.slots}
        device = {name: cupy.asarray(one) for name, one in host.items()}
        for arrays in (host, device):
            queued, done = BACKEND.stream.queued, BACKEND.stream.done
            optimizer.update(arrays["value"], arrays["gradient"], arrays, 3)
            assert BACKEND.stream.done == done
        launches.add(BACKEND.stream.queued - queued)
        del host["gradient"], device["gradient"]
        assert on_host(device) == on_host(host)
    assert len(launches) == 1
    empty = {slot: cupy.zeros(0, dtype) for slot in optimizer.slots}
    optimizer.update(cupy.zeros(0, dtype), cupy.zeros(0, dtype), empty, 1)


@by_stage
def test_an_optimizer_of_ones_own_gets_dense_arrays_of_the_device(stage: int) -> None:
    BACKEND.use("late", True)
    seen = []

    class Own(SGD):
        @property
        def slots(self) -> tuple[str, ...]:
            return ("kept",)

        def update(self, value: Any, gradient: Any, state: Arrays, step: int) -> None:
            for one in (value, gradient, state["kept"]):
                assert type(one) is cupy.ndarray
                assert one.flags.c_contiguous
                assert (one.shape, one.dtype) == (value.shape, value.dtype)
            seen.append(value.dtype)
            value -= gradient
            state["kept"] += 1

    one = Training(stage, EVERY, optimizer=Own(1.0))
    with one.sharded as sharded:
        one.hand_over(grads(0))
        sharded.step()
    assert set(seen) == {np.dtype(np.float32), np.dtype(np.float64)}


@by_stage
def test_memory_falls_as_one_by_the_ranks(stage: int) -> None:
    """Slots, masters and gradients; stage 3 has values too. Up to an element of padding each."""
    BACKEND.use("late", True)
    totals = []
    for comm in (MPI.COMM_SELF, COMM):
        params = {"x": cupy.zeros((100, 7), np.float32), "y": cupy.ones(1001, cases.BF16)}
        one: Any
        if stage == 3:
            one = ShardedParameters({"a": params}, Adam(), comm)
        else:
            one = ShardedOptimizer(params, Adam(), comm, stage=stage)
        with one:
            if stage == 3:
                one.ready("a", params)
                one.step()
            else:
                one.step(params)
            kept, peak = one.memory(), one.memory(peak=True)
        total = kept["optimizer"] + kept["master"]
        total += peak["gradients"] * (stage > 1) + kept["parameters"] * (stage == 3)
        totals.append(total)
    alone, shared = totals
    gradients, values = (700 + 1001) * 4 * (stage > 1), (700 * 4 + 1001 * 2) * (stage == 3)
    assert alone == (700 + 1001) * 4 * 2 + 1001 * 4 + gradients + values
    assert alone / SIZE <= shared < alone / SIZE + 2 * 4 * 5


def test_values_of_the_root_and_layers_gathered_ahead() -> None:
    """The other ranks bring shapes; what is theirs lies where those do."""
    BACKEND.use("by chance", True)
    root = SIZE - 1
    for shapes_on_device in (True, False):
        library: Any = cupy if shapes_on_device or root == RANK else np
        zero = library.zeros((), np.float32)
        layers = {f"l{n}": {"w": library.broadcast_to(zero, (5, 3))} for n in range(3)}
        values = {f"l{n}": np.full((5, 3), n + 1, np.float32) for n in range(3)}
        if root == RANK:
            layers = {layer: {"w": cupy.asarray(one)} for layer, one in values.items()}
        with ShardedParameters(layers, SGD(1.0), root=root) as params:
            for layer in params.layers:
                with params.gather(layer) as arrays:
                    assert type(arrays["w"]) is library.ndarray
                    assert cupy.asnumpy(arrays["w"]).tolist() == values[layer].tolist()
                    ahead = 1 if layer == "l2" else 2
                    assert len(params._gathered) == ahead
                    if library is np:
                        assert not arrays["w"].flags.writeable
        assert root != RANK or cupy.asnumpy(layers["l1"]["w"]).tolist() == values["l1"].tolist()


def test_all_start_from_the_root() -> None:
    BACKEND.use("late", True)
    x = cupy.full((3, 2), RANK, np.float32).T
    with ShardedOptimizer({"x": x}, SGD(1.0), root=SIZE - 1):
        assert (cupy.asnumpy(x) == SIZE - 1).all()


@by_stage
def test_norm_that_is_not_finite(stage: int) -> None:
    """One element on one rank stops all, and the next step goes on as if nothing was."""
    BACKEND.use("late", True)
    results = []
    for names in (EVERY, ()):
        one = Training(stage, names, order="rank")
        with one.sharded as sharded:
            before, given = one.values(), grads(0)
            if RANK == SIZE - 1:
                given["half.weight"][0] = np.nan
            one.hand_over(given)
            with pytest.raises(FloatingPointError, match="norm of the gradients is nan"):
                sharded.step(max_norm=1.0)
            assert one.values() == before
            one.hand_over(grads(1))
            sharded.step()
            results.append(one.values())
    assert results[0] == results[1]


def test_norms_of_both_places_add_up() -> None:
    BACKEND.use("late", True)
    model = {"h": np.zeros(3), "d": cupy.zeros(3), "f": cupy.zeros(5, np.float32)}
    given = {
        "h": np.full(3, 2.0),
        "d": cupy.full(3, 2.0),
        "f": cupy.full(5, 2.0, np.float32),
    }
    for stage in (1, 2):
        with ShardedOptimizer(model, SGD(0.0), stage=stage) as one:
            assert one.step(given, max_norm=np.inf) == 44**0.5


# -- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_another_place_are_refused(stage: int) -> None:
    BACKEND.use("late", True)
    params = {"d": cupy.zeros(3), "h": np.zeros(3), "s": cupy.zeros(())}
    good = {"d": cupy.ones(3), "h": np.ones(3), "s": cupy.ones(())}
    wrong = [
        ("d", np.ones(3), "the gradient of 'd' on host, expected device 0, as the parameter"),
        ("h", cupy.ones(3), "the gradient of 'h' on device 0, expected host, as the parameter"),
        ("s", np.float64(1), "the gradient of 's' on host, expected device 0"),
        ("d", [1.0] * 3, "the gradient of 'd' as list, expected a NumPy or CuPy array"),
    ]
    with ShardedOptimizer(params, SGD(1.0), stage=stage) as one:
        for name, gradient, text in wrong:
            if RANK == SIZE - 1:
                with pytest.raises(ValueError, match=f"ready on rank {RANK}: {text}"):
                    one.ready(name, gradient)
            with pytest.raises(ValueError, match=f"step on rank {RANK}: rank {SIZE - 1} .*{text}"):
                one.step(good)
        assert not any(cupy.asnumpy(value).any() for value in params.values())
        one.step(good)
        assert all((cupy.asnumpy(value) == -1).all() for value in params.values())


def test_gradients_of_a_layer_in_another_place_are_refused() -> None:
    BACKEND.use("late", True)
    with ShardedParameters({"a": {"w": cupy.zeros(3)}}, SGD(1.0)) as params:
        text = "the gradient of 'a.w' on host, expected device 0"
        if RANK == SIZE - 1:
            with pytest.raises(ValueError, match=f"ready on rank {RANK}: {text}"):
                params.ready("a", {"w": np.ones(3)})
        else:
            params.ready("a", {"w": cupy.ones(3)})
        with pytest.raises(ValueError, match=f"rank {SIZE - 1} passed {text}"):
            params.step()
        params.ready("a", {"w": cupy.ones(3)})
        params.step()
        with params.gather("a") as arrays:
            assert (cupy.asnumpy(arrays["w"]) == -1).all()


def far(*shape: int) -> Any:
    made = cupy.zeros(shape)
    made.device.id = 1
    return made


def tied() -> Arrays:
    x = cupy.zeros(3)
    return {"x": x, "y": x}


WRONG: dict[str, tuple[Any, str]] = {
    "devices": (
        lambda: {"x": cupy.zeros(3), "y": far(3), "z": np.zeros(2)},
        "parameters on device 0 and device 1, expected those of one device",
    ),
    "tied": (tied, "parameters 'x' and 'y' that share memory"),
    "repeats": (
        lambda: {"x": cupy.broadcast_to(cupy.zeros(3), (2, 3))},
        "parameter 'x' that is read-only",
    ),
    "integers": (lambda: {"x": cupy.zeros(3, np.int32)}, "parameter 'x' of dtype int32; cast it"),
    "deferred": (lambda: {"x": BACKEND}, "parameter 'x' of type Deferred, expected a NumPy or Cu"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameters_of_one_rank_raise_on_all(what: str) -> None:
    BACKEND.use("late", True)
    wrong, text = WRONG[what]
    params = wrong() if RANK == SIZE - 1 else {"x": cupy.zeros(3), "y": cupy.zeros(3)}
    with pytest.raises(ValueError, match=f"rank {RANK}: rank {SIZE - 1} passed {text}"):
        ShardedOptimizer(params, SGD(1.0))
    if what == "devices":
        with pytest.raises(ValueError, match=f"rank {SIZE - 1} passed {text}"):
            ShardedParameters({"a": params}, SGD(1.0))


@by_stage
def test_places_that_divide_differently_are_refused(stage: int) -> None:
    """Groups are cut by place, and all ranks have to cut the same ones."""
    BACKEND.use("late", True)

    def begin(params: Arrays) -> Any:
        if stage == 3:
            return ShardedParameters({"a": params}, SGD(1.0))
        return ShardedOptimizer(params, SGD(1.0), stage=stage)

    other = RANK == SIZE - 1 > 0
    params = {"b": cupy.zeros(3), "a": np.zeros(3), "c": np.zeros(3) if other else cupy.zeros(3)}
    if SIZE == 1:
        begin(params).free()
        return
    text = rf"rank {SIZE - 1} has parameter '(a\.)?c', where the first one is where rank 0 has "
    with pytest.raises(ValueError, match=text):
        begin(params)
    swapped = [cupy.zeros, np.zeros] if other else [np.zeros, cupy.zeros]
    begin({"a": swapped[0](3), "b": swapped[1](3)}).free()  # cut alike

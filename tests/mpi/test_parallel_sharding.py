"""Sharded training: the bits of one process, memory that falls, errors on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import sharding_cases as cases
from mpi4py import MPI
from sharding_cases import Alone, Arrays

import mpicoll
from mpicoll.parallel.optimizers import SGD, Adam
from mpicoll.parallel.sharding import ShardedOptimizer, ShardedParameters

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.25),
    "momentum": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: SGD(0.1, momentum=0.5, nesterov=True),
    "adam": lambda: Adam(0.01),
    "adamw": lambda: Adam(0.01, weight_decay=0.1),
    "adam_l2": lambda: Adam(0.01, weight_decay=0.1, decoupled=False),
}
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
#: 1 puts every parameter into a bucket of its own.
by_bucket = pytest.mark.parametrize("bucket_bytes", [1, 50, 1 << 20])


class Stage:
    """One way to train the model of the cases, so that all ways are tested alike."""

    def __init__(self, stage: int, optimizer: Any, comm: Any = None, **options: Any) -> None:
        self.stage = stage
        self.model = cases.layers()
        if stage == 3:
            options.pop("bucket_bytes", None)
            self.sharded: Any = ShardedParameters(
                self.model, optimizer, comm, frozen=cases.FROZEN, **options
            )
        else:
            self.params = cases.flat(self.model)
            self.sharded = ShardedOptimizer(
                self.params, optimizer, comm, stage=stage, frozen=cases.FROZEN, **options
            )

    def hand_over(self, gradients: Arrays) -> None:
        """Bring the gradients, last layer first."""
        if self.stage < 3:
            for name in reversed(gradients):
                self.sharded.ready(name, gradients[name])
            return
        for layer in reversed(self.model):
            cut = len(layer) + 1
            own = {k[cut:]: g for k, g in gradients.items() if k.startswith(f"{layer}.")}
            with self.sharded.gather(layer):
                self.sharded.ready(layer, own)

    def values(self) -> Arrays:
        """Return all parameters, whole, as this rank sees them."""
        if self.stage < 3:
            return self.params
        found = {}
        for layer in self.sharded.layers:
            with self.sharded.gather(layer) as arrays:
                for name in self.model[layer]:
                    found[f"{layer}.{name}"] = arrays[name].copy()
        return found


@contextmanager
def staged(*args: Any, **options: Any) -> Iterator[Stage]:
    stage = Stage(*args, **options)
    with stage.sharded:
        yield stage


def alike(values: Arrays, comm: MPI.Intracomm = COMM) -> None:
    """Raise AssertionError unless all ranks have the same bits."""
    own = {name: np.array(value, order="C").tobytes() for name, value in values.items()}
    for name, data in comm.bcast(own, root=0).items():
        assert own[name] == data, name


# -- the trajectory ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@by_optimizer
def test_bits_of_one_process(stage: int, optimizer: str) -> None:
    """Summed in rank order, a sharded training has the bits of one on whole arrays."""
    with staged(stage, OPTIMIZERS[optimizer](), order="rank", bucket_bytes=60) as one:
        alone = Alone(cases.flat(cases.layers()), OPTIMIZERS[optimizer]())
        for step in range(4):
            one.hand_over(cases.gradients(alone.params, RANK, step))
            assert one.sharded.step() is None
            alone.step(cases.means(alone.params, SIZE, step))
            cases.same(one.values(), alone.params)
        assert one.sharded.steps == 4


@pytest.mark.parametrize("stage", [1, 2, 3])
@by_bucket
def test_exact_sums_in_flight(stage: int, bucket_bytes: int) -> None:
    """Whole numbers add up exactly, so the order of a non-blocking sum does not show."""
    with staged(stage, Adam(0.01), bucket_bytes=bucket_bytes) as one:
        alone = Alone(cases.flat(cases.layers()), Adam(0.01))
        for step in range(3):
            one.hand_over(cases.gradients(alone.params, RANK, step, whole=True))
            one.sharded.step()
            alone.step(cases.means(alone.params, SIZE, step, whole=True))
            cases.same(one.values(), alone.params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bound_of_any_order(stage: int) -> None:
    """SGD on float32, whatever the order of the sums, to a derived bound.

    Both trajectories round: P - 1 additions and a division per mean m, a product and a
    difference per step. With u = 2**-24 and γ(k) = k u / (1 - k u), one is off the exact by
    at most  Σ_t lr γ(P + 1) mean|g_t| + γ(T) (|x| + Σ_t lr mean|g_t|);  two by twice that.
    """
    steps, lr, u = 5, 0.125, 2.0**-24
    rng = np.random.default_rng(3)
    given = rng.standard_normal((steps, SIZE, 301)).astype(np.float32)
    start = rng.standard_normal(301).astype(np.float32)
    x = start.copy()
    params: Any
    if stage == 3:
        params = ShardedParameters({"a": {"x": x}}, SGD(lr))
    else:
        params = ShardedOptimizer({"x": x}, SGD(lr), stage=stage)
    expected = start.astype(np.float64)
    with params:
        for step in range(steps):
            if stage == 3:
                params.ready("a", {"x": given[step, RANK]})
                params.step()
            else:
                params.step({"x": given[step, RANK]})
            expected -= lr * given[step].astype(np.float64).mean(axis=0)
        if stage == 3:
            with params.gather("a") as arrays:
                x = arrays["x"].copy()
    alike({"x": x})
    weight = lr * np.abs(given.astype(np.float64)).mean(axis=1).sum(axis=0)
    gamma = [k * u / (1 - k * u) for k in (SIZE + 1, steps + 1)]
    bound = gamma[0] * weight + gamma[1] * (np.abs(start) + weight)
    assert (np.abs(x - expected) <= bound).all()


@pytest.mark.parametrize("stage", [1, 2])
@by_bucket
def test_gradients_in_different_orders(stage: int, bucket_bytes: int) -> None:
    """Each rank brings them in an order of its own; the caller's collectives go between."""
    with staged(stage, SGD(0.5), mpicoll.Comm(COMM), bucket_bytes=bucket_bytes) as one:
        alone = Alone(one.params, SGD(0.5))
        for step in range(3):
            given = cases.gradients(alone.params, RANK, step, whole=True)
            order = np.random.default_rng([RANK, step, 7]).permutation(len(given))
            for at in order:
                name = list(given)[at]
                one.sharded.ready(name, given[name])
            one.sharded.step()
            alone.step(cases.means(alone.params, SIZE, step, whole=True))
            cases.same(one.values(), alone.params)


def test_callers_collectives_between() -> None:
    """One bucket per call of ready, on the duplicate, and the caller's on its own."""
    comm = mpicoll.Comm(COMM)
    with staged(2, SGD(0.5), comm, bucket_bytes=1) as one:
        alone = Alone(one.params, SGD(0.5))
        given = cases.gradients(alone.params, RANK, 0, whole=True)
        for name in reversed(given):
            one.sharded.ready(name, given[name])
            assert mpicoll.allreduce(1, comm=comm) == SIZE
        one.sharded.step()
        alone.step(cases.means(alone.params, SIZE, 0, whole=True))
        cases.same(one.values(), alone.params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulated_batches_add_up(stage: int) -> None:
    """Whole multiples of the number of ranks, whose means are whole: all sums are exact."""
    with staged(stage, SGD(0.5), bucket_bytes=60) as one:
        alone = Alone(cases.flat(cases.layers()), SGD(0.5))
        total: Arrays = {name: np.zeros_like(work) for name, work in alone.work.items()}
        for batch in range(3):
            given = cases.gradients(alone.params, RANK, batch, whole=True)
            one.hand_over({name: value * value.dtype.type(SIZE) for name, value in given.items()})
            if stage < 3 and batch < 2:
                one.sharded.accumulate()
            for name, mean in cases.means(alone.params, SIZE, batch, whole=True).items():
                total[name] += np.rint(mean.astype(total[name].dtype) * SIZE)
        one.sharded.step()
        alone.step(total)
        cases.same(one.values(), alone.params)


def test_halves_on_a_float32_wire() -> None:
    """Means of 16-bit gradients are not rounded when they are sent in float32."""
    start = np.zeros(10, np.float16)
    given = [np.full(10, 1 + rank * 2.0**-10, np.float16) for rank in range(SIZE)]
    with ShardedOptimizer({"x": start}, SGD(1.0), wire="float32") as one:
        one.step({"x": given[RANK].astype(np.float32)})
        exact = np.float32(cases.mean(given, "float32")[0])
        assert one._shards[0].master is not None
        real = max(0, min(10, one._shards[0].high) - one._shards[0].low)
        assert (one._shards[0].master[:real] == -exact).all()
    assert (start == np.float16(-exact)).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, SIZE - 1, SIZE, SIZE + 1])
def test_few_elements(stage: int, count: int) -> None:
    """Ranks that own nothing but padding, or nothing at all."""
    model = {"a": {"x": np.arange(count, dtype=np.float32)}, "b": {}}
    grads = {"x": np.full(count, 2.0, np.float32)}
    if stage == 3:
        with ShardedParameters(model, SGD(1.0)) as params:
            params.ready("a", grads)
            assert params.step(max_norm=np.inf) == pytest.approx(2 * count**0.5)
            with params.gather("a") as arrays, params.gather("b") as nothing:
                assert nothing == {}
                assert (arrays["x"] == np.arange(count) - 2).all()
    else:
        with ShardedOptimizer(model["a"], SGD(1.0), stage=stage) as one:
            assert one.step(grads, max_norm=np.inf) == pytest.approx(2 * count**0.5)
            assert (model["a"]["x"] == np.arange(count) - 2).all()


def test_no_parameters_at_all() -> None:
    with ShardedOptimizer({}, SGD(1.0)) as one:
        assert one.step({}) is None
    with ShardedParameters({}, SGD(1.0)) as params:
        params.step()
        assert params.layers == ()


@pytest.mark.parametrize("kind", ["plain", "wrapped", "part"])
def test_communicators(kind: str) -> None:
    comm: MPI.Intracomm = COMM
    if kind == "wrapped":
        comm = mpicoll.Comm(COMM)
    if kind == "part":
        comm = COMM.Split(RANK % 2, -RANK)
    with staged(2, Adam(0.01), comm, order="rank") as one:
        alone = Alone(one.params, Adam(0.01))
        one.sharded.step(cases.gradients(alone.params, comm.rank, 0))
        alone.step(cases.means(alone.params, comm.size, 0))
        cases.same(one.values(), alone.params)
    if kind == "part":
        comm.Free()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_start_from_the_root(stage: int) -> None:
    root = SIZE - 1
    x = np.full((3, 2), RANK, np.float32)
    if stage == 3:
        given = x if root == RANK else np.broadcast_to(np.float32(0), (3, 2))
        with (
            ShardedParameters({"a": {"x": given}}, SGD(1), root=root) as params,
            params.gather("a") as arrays,
        ):
            assert (arrays["x"] == root).all()
        assert (x == RANK).all()
    else:
        with ShardedOptimizer({"x": x}, SGD(1), stage=stage, root=root):
            assert (x == root).all()


# -- norm -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_norm_and_clipping(stage: int, scale: float) -> None:
    with staged(stage, SGD(0.5), order="rank") as one:
        alone = Alone(cases.flat(cases.layers()), SGD(0.5))
        given = cases.gradients(alone.params, RANK, 0)
        mean = cases.means(alone.params, SIZE, 0)
        one.hand_over(given)
        norm = one.sharded.step(max_norm=0.75, loss_scale=scale)
        assert len(set(COMM.allgather(norm.hex()))) == 1
        every = np.concatenate([value.astype(np.float64) for value in mean.values()]) / scale
        # At most one rounding per square, and per addition of any order; half for the root.
        count = every.size + 2
        expected = float(np.sqrt(np.square(every).sum()))
        assert abs(norm - expected) <= expected * count * 2.0**-52
        assert norm > 0.75 or scale > 1
        factor = 1 / scale * (0.75 / norm if norm > 0.75 else 1)
        alone.step(mean, factor)
        cases.same(one.values(), alone.params)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_norm_that_is_not_finite(stage: int, bad: float) -> None:
    """One element on one rank stops all, and the next step goes on as if nothing was."""
    with staged(stage, Adam(0.01), order="rank") as one:
        alone = Alone(cases.flat(cases.layers()), Adam(0.01))
        before = {name: value.copy() for name, value in one.values().items()}
        given = cases.gradients(alone.params, RANK, 0)
        if RANK == SIZE - 1:
            given["rows.bias"][0] = bad
        one.hand_over(given)
        with pytest.raises(FloatingPointError, match="norm of the gradients is"):
            one.sharded.step(max_norm=1.0)
        cases.same(one.values(), before)
        assert one.sharded.memory()["gradients"] == one.sharded.steps == 0
        one.hand_over(cases.gradients(alone.params, RANK, 1))
        one.sharded.step()
        alone.step(cases.means(alone.params, SIZE, 1))
        cases.same(one.values(), alone.params)


# -- memory -----------------------------------------------------------------------------


def ceil(count: int, size: int) -> int:
    return -(-count // size)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 1000, 4096])
def test_memory_by_formula(stage: int, half: bool, count: int) -> None:
    """Layers of one vector each: what is kept, and what there is at most."""
    dtype, width = (cases.BF16, 2) if half else (np.dtype(np.float32), 4)
    shards = [ceil(count, SIZE), ceil(2 * count, SIZE)]
    model = {
        "a": {"x": np.zeros(count, dtype)},
        "b": {"x": np.zeros(2 * count, dtype)},
    }
    own = sum(shards)
    one: Any
    if stage == 3:
        one = ShardedParameters(model, Adam())
    else:
        one = ShardedOptimizer(cases.flat(model), Adam(), stage=stage, bucket_bytes=1)
    with one:
        for layer in ("b", "a"):
            given = np.ones_like(model[layer]["x"])
            if stage == 3:
                one.ready(layer, {"x": given})
            else:
                one.ready(f"{layer}.x", given)
        if stage == 1:
            assert one.memory()["gradients"] == own * SIZE * width
        one.step()
        expected = {
            "parameters": own * width if stage == 3 else 3 * count * width,
            "master": own * 4 * half,
            "optimizer": 2 * own * 4,
            "gradients": 0,
            "gathered": 0,
            "buffers": 0,
        }
        assert one.memory() == expected
        peak = one.memory(peak=True)
        assert {**peak, "gradients": 0, "gathered": 0, "buffers": 0} == expected
        # Two groups, which may both travel at a time, with the shards that they arrive in.
        assert own * width <= peak["buffers"] <= own * (SIZE + 1) * width
        if stage > 1:
            assert peak["gradients"] == own * 4
        if stage == 3:
            with one.gather("a", prefetch=None):
                assert one.memory()["gathered"] == shards[0] * SIZE * width
            with one.gather("a", prefetch="b"):
                assert one.memory()["gathered"] == own * SIZE * width
            with one.gather("b", prefetch=None):
                assert one.memory()["gathered"] == shards[1] * SIZE * width
            assert one.memory()["gathered"] == 0


def test_memory_falls_as_one_by_the_ranks() -> None:
    """All that stage 3 keeps, on 1 rank and on all: a P-th, up to the padding."""
    model = {f"l{n}": {"w": np.zeros((100 + n, 7), np.float32)} for n in range(5)}
    totals = []
    for comm in (MPI.COMM_SELF, COMM):
        with ShardedParameters(model, Adam(), comm) as params:
            for layer, arrays in model.items():
                params.ready(layer, arrays)
            params._step([], [], None, 1.0)
            kept = params.memory()
            peak = params.memory(peak=True)
            totals.append(kept["parameters"] + kept["optimizer"] + peak["gradients"])
    alone, shared = totals
    assert alone == 4 * 4 * sum(one["w"].size for one in model.values())
    padding = 5 * 4 * 4  # less than one element per layer and kind, rounded up
    assert alone / SIZE <= shared < alone / SIZE + padding


def test_buckets_in_flight_are_bounded() -> None:
    """Stage 2 holds no more than the bucket that fills and two that travel."""
    params = {f"p{n}": np.zeros(64, np.float32) for n in range(20)}
    with ShardedOptimizer(params, SGD(1.0), bucket_bytes=256) as one:
        one.step({name: params[name] for name in reversed(params)})
        share = ceil(64, SIZE)
        assert one.memory(peak=True)["buffers"] <= 3 * 4 * share * (SIZE + 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 1000])
def test_bytes_sent_per_step(stage: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard to each other rank per reduce-scatter and allgather, and 24 bytes to agree.

    So it is with algorithms that send no byte twice; for short vectors others are faster.
    """
    monkeypatch.setenv("MPICOLL_REDUCE_SCATTER", "pairwise")
    monkeypatch.setenv("MPICOLL_ALLGATHER", "ring")
    comm = mpicoll.Comm(MPI.COMM_WORLD.Dup())
    model = {"a": {"x": np.zeros(count, np.float32)}}
    gradient = {"x": ones(count)}
    one: Any
    if stage == 3:
        one = ShardedParameters(model, SGD(1.0), comm)
    else:
        one = ShardedOptimizer(model["a"], SGD(1.0), comm, stage=stage)
    with one:
        before = one.comm.stats.total.bytes_sent
        if stage == 3:
            for _ in "forward", "backward":
                with one.gather("a"):
                    pass
            one.ready("a", gradient)
            one.step()
        else:
            one.step(gradient)
        sent = one.comm.stats.total.bytes_sent - before
        shards = 3 if stage == 3 else 2
        assert sent == (SIZE - 1) * (shards * 4 * ceil(count, SIZE) + 24)
    comm.Free()


# -- gather -----------------------------------------------------------------------------


def chain(count: int = 4, comm: Any = None) -> ShardedParameters:
    model = {f"l{n}": {"w": np.full(5, n, np.float32)} for n in range(count)}
    return ShardedParameters(model, SGD(1.0), comm)


def held(params: ShardedParameters) -> list[str]:
    return sorted(params._gathered)


def test_prefetch_follows_forward_and_backward() -> None:
    with chain() as params:
        for _ in range(2):
            seen = []
            for layer in [*params.layers, *reversed(params.layers)]:
                with params.gather(layer) as arrays:
                    assert (arrays["w"] == int(layer[1])).all()
                    seen.append([name for name in held(params) if name != layer])
            ahead = ["l1", "l2", "l3", None, "l2", "l1", "l0", None]
            assert seen == [[] if name is None else [name] for name in ahead]
            assert held(params) == []


def test_each_layer_is_sent_once_per_use() -> None:
    """Eight uses of four layers are eight allgathers: what is prefetched is not sent again."""
    with chain() as params:
        before = gathers(params)
        for layer in [*params.layers, *reversed(params.layers)]:
            with params.gather(layer):
                pass
        assert gathers(params) - before == 8


def gathers(params: ShardedParameters) -> int:
    stats = params.comm.stats
    return sum(stats[key].calls for key in stats if "allgather" in key[0].lower())


def test_prefetch_that_is_passed_over() -> None:
    with chain() as params:
        with params.gather("l0", prefetch="l3"):
            assert held(params) == ["l0", "l3"]
        assert held(params) == ["l3"]
        with params.gather("l1", prefetch=None) as arrays:
            assert held(params) == ["l1"]
            assert (arrays["w"] == 1).all()
        with params.gather("l2", prefetch="l2"):
            assert held(params) == ["l2"]
        with params.gather("l0"):
            pass
        assert held(params) == ["l1"]  # and free() completes it


def test_nested_gathers() -> None:
    with chain() as params:
        with params.gather("l1", prefetch=None) as outer:
            with params.gather("l1", prefetch=None) as inner:
                assert inner["w"] is outer["w"]
            assert held(params) == ["l1"]
            with params.gather("l3", prefetch=None), params.gather("l0", prefetch="l1") as third:
                assert held(params) == ["l0", "l1", "l3"]
                assert (third["w"] == 0).all()
            assert (outer["w"] == 1).all()
            assert held(params) == ["l1"]
        assert held(params) == []


def test_exception_within_gather() -> None:
    """On one rank even: leaving sends nothing, so nobody waits."""
    with chain() as params:
        layer = params.layers[0]
        try:
            with params.gather(layer):
                if RANK == SIZE - 1:
                    raise ZeroDivisionError("the caller's own")
        except ZeroDivisionError:
            pass
        assert layer not in held(params)
        with params.gather("l1") as arrays:
            assert (arrays["w"] == 1).all()
            assert params.memory()["gathered"] == 2 * 4 * ceil(5, SIZE) * SIZE


def test_gathered_arrays_are_read_only() -> None:
    with (
        chain() as params,
        params.gather("l0") as arrays,
        pytest.raises(ValueError, match="read-only"),
    ):
        arrays["w"][0] = 1


def test_step_drops_what_was_gathered_ahead() -> None:
    """It holds values of before the step."""
    with chain(2) as params:
        with params.gather("l0"):
            assert held(params) == ["l0", "l1"]
        for layer in params.layers:
            params.ready(layer, {"w": np.ones(5, np.float32)})
        params.step()
        assert held(params) == []
        with params.gather("l1") as arrays:
            assert (arrays["w"] == 0).all()


# -- what is refused --------------------------------------------------------------------


def optimizer_of(params: Any, optimizer: Any = None, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(params, optimizer or SGD(1.0), **options)


def parameters_of(layers: Any, **options: Any) -> ShardedParameters:
    return ShardedParameters(layers, SGD(1.0), **options)


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def read_only() -> Any:
    array = ones(2)
    array.flags.writeable = False
    return array


X = {"x": np.ones(2, np.float32)}
WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "not a mapping": (
        lambda: optimizer_of(X),
        lambda: optimizer_of([1]),
        "parameters of type list, expected arrays by name",
    ),
    "not an array": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": 1.0}),
        "parameter 'x' of type float, expected a NumPy or CuPy array",
    ),
    "name": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"": ones(2)}),
        "parameter name '', expected a string",
    ),
    "integers": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": ones(2, dtype=np.int32)}),
        "parameter 'x' of dtype int32; cast it to one of float16, bfloat16, float32",
    ),
    "byte order": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": ones(2, dtype=">f4")}),
        "parameter 'x' of dtype >f4, expected native byte order",
    ),
    "objects": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": np.array([None])}, frozen=["x"]),
        "parameter 'x' of dtype object, expected numbers",
    ),
    "read-only": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": read_only()}),
        "parameter 'x' that is read-only",
    ),
    "tied": (
        lambda: optimizer_of(X),
        lambda: optimizer_of({"x": X["x"], "y": X["x"]}),
        "parameters 'x' and 'y' that share memory",
    ),
    "frozen": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, frozen=["z"]),
        "frozen='z', which is no parameter",
    ),
    "stage": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, stage=3),
        "stage=3, expected 1 or 2; stage 3 is ShardedParameters",
    ),
    "bucket_bytes": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, bucket_bytes=0),
        "bucket_bytes=0, expected 1 byte or more",
    ),
    "wire": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, wire="int8"),
        "wire='int8', expected None or 'float32'",
    ),
    "order": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, order="any"),
        "order='any', expected None or 'rank'",
    ),
    "root": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, root=SIZE),
        f"root={SIZE}, expected a rank from 0 to {SIZE - 1}",
    ),
    "optimizer": (
        lambda: optimizer_of(X),
        lambda: optimizer_of(X, "sgd"),
        "optimizer of type str, expected SGD, Adam or a FlatOptimizer",
    ),
    "layers": (
        lambda: parameters_of({"a": X}),
        lambda: parameters_of([X]),
        "layers of type list, expected mappings by name",
    ),
    "layer": (
        lambda: parameters_of({"a": X}),
        lambda: parameters_of(X),
        "layer 'x' of type ndarray, expected arrays by name",
    ),
    "layer name": (
        lambda: parameters_of({"a": X}),
        lambda: parameters_of({"": X}),
        "layer name '', expected a string",
    ),
    "full name": (
        lambda: parameters_of({"a": X}),
        lambda: parameters_of({"a": {"b.x": ones(1)}, "a.b": X}),
        "two parameters of one full name 'a.b.x'",
    ),
    "no root": (
        lambda: parameters_of({"a": X}),
        lambda: parameters_of({"a": X}, root=None),
        "root=None, expected a rank",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_one_rank_raise_on_all(what: str) -> None:
    right, wrong, text = WRONG[what]
    with pytest.raises(ValueError, match=f"rank {RANK}: rank {SIZE - 1} passed {text}"):
        (wrong if RANK == SIZE - 1 else right)()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 1}, "stage"),
        ({"order": "rank"}, "order"),
        ({"optimizer": SGD(2.0)}, "lr"),
        ({"params": {"x": np.ones(3, np.float32)}}, "shape"),
        ({"params": {"x": np.ones(2)}}, "float64"),
        ({"params": {**X, "y": np.ones(2)}}, "'y'"),
        ({"frozen": ["x"]}, "frozen"),
    ],
    ids=["stage", "order", "optimizer", "shape", "dtype", "names", "frozen"],
)
def test_arguments_that_differ_raise_on_all(options: dict[str, Any], text: str) -> None:
    given = {"params": X, "optimizer": SGD(1.0), **(options if RANK == SIZE - 1 else {})}
    if SIZE == 1:
        ShardedOptimizer(**given).free()
        return
    with pytest.raises(ValueError, match=rf"rank {SIZE - 1} has .*{text}"):
        ShardedOptimizer(**given)


WRONG_GRADIENTS: dict[str, tuple[Any, str]] = {
    "z": (ones(2), "a gradient of 'z', which is no parameter"),
    "still": (ones(2), "a gradient of 'still', which is frozen"),
    "list": ([1.0, 2.0], "the gradient of 'list' as list, expected a NumPy or CuPy array"),
    "shape": (ones(3), r"the gradient of 'shape' of shape \(3,\), expected \(2,\)"),
    "dtype": (ones(2, dtype=np.float64), "of dtype float64, expected float32 or what it holds"),
    "complex": (ones(2, dtype=np.complex64), "of dtype complex64, expected float32"),
}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_wrong_gradient_on_one_rank(stage: int, name: str) -> None:
    """It raises at once there, at the step on all; nothing changes, and then one can go on."""
    names = ["still", "list", "shape", "dtype", "complex"]
    params = {one: ones(2) for one in names}
    one = ShardedOptimizer(params, SGD(1.0), stage=stage, frozen=["still"], bucket_bytes=1)
    wrong, text = WRONG_GRADIENTS[name]
    good = {key: ones(2) for key in names[1:]}
    with one:
        for key, gradient in good.items():
            if key == name and RANK == SIZE - 1:
                continue
            one.ready(key, gradient)
        if RANK == SIZE - 1:
            with pytest.raises(ValueError, match=f"ready on rank {RANK}: .*{text}"):
                one.ready(name, wrong)
        with pytest.raises(ValueError, match=f"step on rank {RANK}: rank {SIZE - 1} .*{text}"):
            one.step()
        assert all((value == 1).all() for value in params.values())
        with pytest.raises(ValueError, match=f"step on rank {RANK}: rank 0 .*{text}"):
            one.step({**good, name: wrong})
        one.step(good)
        assert all((params[key] == (key == "still")).all() for key in names)


def test_gradient_brought_twice() -> None:
    with ShardedOptimizer({"x": ones(2)}, SGD(1.0)) as one:
        one.ready("x", ones(2))
        with pytest.raises(ValueError, match="the gradient of 'x' twice; accumulate"):
            one.ready("x", ones(2))
        with pytest.raises(ValueError, match="the gradient of 'x' twice"):
            one.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_missing_gradient(stage: int) -> None:
    """Missing on one rank: refused on all, or taken for zero there."""
    params = {"x": np.zeros(3, np.float32), "y": np.zeros(2)}
    grads = {"x": ones(3), "y": ones(2, dtype=np.float64)}
    mine = {name: grads[name] for name in grads if name == "x" or RANK < SIZE - 1}
    one = ShardedOptimizer(params, SGD(1.0), stage=stage, bucket_bytes=1)
    with one:
        with pytest.raises(ValueError, match=f"rank {SIZE - 1} passed no gradient of 'y'"):
            one.step(mine)
        assert not params["x"].any()
        one.step(mine, missing="zero")
        assert (params["x"] == -1).all()
        assert (params["y"] == -(SIZE - 1) / SIZE).all()


def test_missing_layer() -> None:
    with chain(2) as params:
        params.ready("l0", {"w": ones(5)})
        with pytest.raises(ValueError, match="passed no gradient of 'l1'"):
            params.step()
        params.ready("l0", {"w": ones(5)})
        params.step(missing="zero")
        with params.gather("l0") as zero, params.gather("l1") as one:
            assert (zero["w"] == -1).all()
            assert (one["w"] == 1).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"w": np.ones(4, np.float32)}, r"the gradient of 'l0.w' of shape \(4,\)"),
        ({}, "no gradient of 'l0.w'"),
        ({"w": np.ones(5, np.float32), "v": np.ones(5)}, "a gradient of 'l0.v', which is no"),
    ],
)
def test_wrong_gradient_of_a_layer(given: Arrays, text: str) -> None:
    """The rank that is wrong takes part with zeros, so the next call is not mispaired."""
    with chain(2) as params:
        if RANK == SIZE - 1:
            with pytest.raises(ValueError, match=f"ready on rank {RANK}: {text}"):
                params.ready("l0", given)
        else:
            params.ready("l0", {"w": ones(5)})
        params.ready("l1", {"w": ones(5)})
        with pytest.raises(ValueError, match=f"rank {SIZE - 1} passed {text}"):
            params.step()
        for layer in params.layers:
            params.ready(layer, {"w": ones(5)})
        params.step()
        with params.gather("l1") as arrays:
            assert (arrays["w"] == 0).all()


def test_unknown_layers() -> None:
    with chain(2) as params:
        for call in (
            lambda: params.gather("l2").__enter__(),
            lambda: params.gather("l0", prefetch="l2").__enter__(),
        ):
            with pytest.raises(ValueError, match="unknown layer 'l2'; known: 'l0', 'l1'"):
                call()
        with pytest.raises(ValueError, match="unknown layer 'l2'"):
            params.ready("l2", {})
        with pytest.raises(ValueError, match="unknown layer 'l2'"):
            params.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 0.0}, "max_norm=0.0, expected a number above 0"),
        ({"max_norm": "1"}, "max_norm='1', expected"),
        ({"loss_scale": np.inf}, "loss_scale=inf, expected a finite number above 0"),
        ({"missing": "none"}, "missing='none', expected 'error' or 'zero'"),
    ],
)
def test_wrong_arguments_of_a_step(options: dict[str, Any], text: str) -> None:
    x = ones(2)
    with ShardedOptimizer({"x": x}, SGD(1.0)) as one:
        with pytest.raises(ValueError, match=f"rank {SIZE - 1} passed {text}"):
            one.step({"x": ones(2)}, **(options if RANK == SIZE - 1 else {}))
        assert (x == 1).all()


@pytest.mark.parametrize("what", ["max_norm", "loss_scale", "lr"])
def test_steps_that_differ(what: str) -> None:
    x = ones(2)
    with ShardedOptimizer({"x": x}, SGD(1.0)) as one:
        options: dict[str, Any] = {}
        if RANK == SIZE - 1:
            if what == "lr":
                one.optimizer.lr = 0.5
            else:
                options[what] = 2.0
        if SIZE == 1:
            one.step({"x": ones(2)}, **options)
            return
        with pytest.raises(ValueError, match=rf"rank {SIZE - 1} has .*{what}"):
            one.step({"x": ones(2)}, **options)
        assert (x == 1).all()
        one.optimizer.lr = 0.5
        one.step({"x": ones(2)})
        assert (x == 0.5).all()


def test_step_while_a_layer_is_in_use() -> None:
    with chain(1) as params:
        params.ready("l0", {"w": ones(5)})
        with params.gather("l0") as arrays:
            with pytest.raises(ValueError, match=r"step\(\) while layer 'l0' is in use"):
                params.step()
            assert (arrays["w"] == 0).all()


def test_free_within_a_step() -> None:
    one = ShardedOptimizer({"x": ones(2)}, SGD(1.0))
    one.ready("x", ones(2))
    with pytest.raises(RuntimeError, match="within a step; call step"):
        one.free()
    one.step()
    one.free()


def test_slots_that_are_taken() -> None:
    class Own(SGD):
        @property
        def slots(self) -> tuple[str, ...]:
            return ("value",)

    with pytest.raises(ValueError, match="a slot 'value' or 'master'"):
        ShardedOptimizer({"x": ones(2)}, Own(1.0))

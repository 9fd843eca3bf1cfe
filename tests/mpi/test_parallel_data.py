"""DataParallel: means within their bound, the same bits on all ranks, and no rank left waiting."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.parallel import DataParallel, HalfWire

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Array = np.ndarray[Any, np.dtype[Any]]

#: Names, shapes and dtypes in order of use.
FORMS: list[tuple[str, tuple[int, ...], Any]] = [
    ("embedding", (5, 4), np.float32),
    ("scale", (), np.float64),
    ("kernel", (3, 2, 2), np.float32),
    ("nothing", (0, 7), np.float32),
    ("half", (9,), np.float16),
    ("brain", (2, 5), BFLOAT16),
    ("phase", (6,), np.complex64),
    ("long", (4,), np.longdouble),
    ("bias", (7,), np.float32),
    ("waves", (3,), np.complex128),
    ("head", (4, 4), np.float64),
]


def made(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return normal numbers of a dtype."""
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def gradients(rng: np.random.Generator) -> list[dict[str, Array]]:
    """Return those of all ranks, which every rank knows."""
    return [{name: made(rng, shape, dtype) for name, shape, dtype in FORMS} for _ in range(SIZE)]


def zeros() -> dict[str, Array]:
    return {name: np.zeros(shape, dtype) for name, shape, dtype in FORMS}


def small(**values: Any) -> dict[str, Array]:
    """Return float64 parameters."""
    return {name: np.array(value, np.float64) for name, value in values.items()}


def parts(array: Array) -> Array:
    """Return long doubles, complex numbers as two."""
    return np.stack([array.real, array.imag]) if array.dtype.kind == "c" else array


def gamma(steps: int, unit: float) -> float:
    return steps * unit / (1 - steps * unit)


#: By size in bytes of the real type: its unit roundoff, and what underflow may cost.
UNITS = {
    np.dtype(np.float16): (2.0**-11, 2.0**-24),
    BFLOAT16: (2.0**-8, 2.0**-133),
}
REFERENCE = float(np.finfo(np.longdouble).eps) / 2


def held_to_bound(name: str, result: Array, terms: list[Array], *, mean: bool = True) -> None:
    """Hold a sum or mean of ``terms`` to its bound: P - 1 additions and a division.

    A real or complex sum is within gamma(P - 1) of the sum of magnitudes, part by part, and the
    division is one rounding more. 16-bit floats do that in float32 and round once more. The
    reference is computed by the same formula in long double.
    """
    count = len(terms) if mean else 1
    wide = [parts(term.astype("G" if term.dtype.kind == "c" else "g")) for term in terms]
    exact = sum(wide) / count
    size = sum(np.abs(one) for one in wide) / count
    dtype = result.dtype
    if dtype in UNITS:
        unit, least = UNITS[dtype]
        bound = unit * np.abs(exact) + (1 + unit) * gamma(len(terms), 2.0**-24) * size + least
    else:
        bound = gamma(len(terms), float(np.finfo(dtype).eps) / 2) * size
    error = np.abs(parts(result.astype("G" if dtype.kind == "c" else "g")) - exact)
    assert (error <= bound + gamma(len(terms), REFERENCE) * size).all(), (name, error, bound)


def same_everywhere(arrays: dict[str, Array]) -> None:
    """Show that all ranks hold the same bits, of long doubles the same values."""
    plain = {
        name: repr(array) if array.dtype.char in "gG" else array.tobytes()
        for name, array in arrays.items()
    }
    for rank, other in enumerate(MPI.COMM_WORLD.allgather(plain)):
        for name, data in plain.items():
            assert other[name] == data, f"{name} of rank {rank}"


@contextmanager
def parallel(params: Any, *args: Any, **keywords: Any) -> Iterator[DataParallel]:
    """Make and, in any case, free."""
    made = DataParallel(params, *args, **keywords)
    try:
        yield made
    finally:
        made.comm.Free()


def step(data_parallel: DataParallel, grads: dict[str, Array], order: Any = None) -> Any:
    for name in reversed(list(grads)) if order is None else order:
        data_parallel.ready(name, grads[name])
    return data_parallel.finish()


# -- means ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("order", ["as used", "reversed", "another on each rank"])
def test_gradients(
    op: str, bucket_bytes: int, order: str, rng: np.random.Generator, world: Comm
) -> None:
    names = [name for name, *_ in FORMS]
    orders = {
        "as used": names,
        "reversed": names[::-1],
        "another on each rank": np.random.default_rng(RANK).permutation(names).tolist(),
    }
    with parallel(zeros(), world, bucket_bytes, op=op) as data_parallel:
        for _ in range(3):
            terms = gradients(rng)
            results = step(data_parallel, terms[RANK], orders[order])
            assert list(results) == names
            for name, result in results.items():
                assert result.shape == terms[0][name].shape
                assert result.dtype == terms[0][name].dtype
                every = [one[name] for one in terms]
                held_to_bound(name, result, every, mean=op == "mean")
            same_everywhere(dict(results))


def test_mean_of_16_bit_floats_does_not_overflow(world: Comm) -> None:
    params = {"a": np.zeros(3, np.float16)}
    with parallel(params, world) as data_parallel:
        means = step(data_parallel, {"a": np.full(3, 60000, np.float16)})
        assert means["a"].tolist() == [60000] * 3


def test_training_equals_a_single_process(world: Comm) -> None:
    """Integers are exact whatever their order, so a sum over shares has the bits of the whole."""
    rng = np.random.default_rng(5)
    x, y = rng.integers(-4, 5, (19, 6)).astype(float), rng.integers(-9, 9, (19, 2)).astype(float)

    def backward(params: dict[str, Array], rows: Any) -> dict[str, Array]:
        error = x[rows] @ params["weight"] + params["bias"] - y[rows]
        return {"weight": x[rows].T @ error, "bias": error.sum(axis=0)}

    params = small(weight=np.full((6, 2), RANK), bias=np.zeros(2))
    single = small(weight=np.zeros((6, 2)), bias=np.zeros(2))
    share = np.arange(19)[RANK::SIZE]  # uneven
    with parallel(params, world, 8, op="sum") as data_parallel:
        for _ in range(3):
            grads = step(data_parallel, backward(params, share))
            whole = backward(single, np.arange(19))
            for name in params:
                assert grads[name].tobytes() == whole[name].tobytes()
                # Halves and quarters keep the parameters exact, too
                params[name] -= np.floor(grads[name] / 2**10)
                single[name] -= np.floor(whole[name] / 2**10)
        data_parallel.verify()
    same_everywhere(params)
    assert any(single[name].any() for name in single)


# -- parameters at the start ------------------------------------------------------------


def test_parameters_are_those_of_rank_0(world: Comm, rng: np.random.Generator) -> None:
    values = gradients(rng)
    params = {name: np.asfortranarray(value) for name, value in values[RANK].items()}
    params = {name: param.reshape(values[0][name].shape) for name, param in params.items()}
    wide = np.full((4, 6), float(RANK))
    params["strided"] = wide[::2, ::-3]
    with parallel(params, world) as data_parallel:
        for name, value in values[0].items():
            np.testing.assert_array_equal(params[name], value)
        assert (params["strided"] == 0).all()
        assert (wide[1] == RANK).all()
        data_parallel.verify()
        assert not any(array.any() for array in data_parallel.gradients.values())
        params["head"][...] = RANK
        data_parallel.broadcast(SIZE - 1)
        assert (params["head"] == SIZE - 1).all()


def test_verify_names_what_differs(world: Comm) -> None:
    params = small(a=[1, 2], b=[3, 4], c=[5])
    with parallel(params, world) as data_parallel:
        if RANK == SIZE - 1:
            params["b"][1] = np.nextafter(4, 5)
            params["c"][0] = 0
        if SIZE > 1:
            with pytest.raises(ValueError, match=f"verify.*rank {SIZE - 1} has parameter 'b'"):
                data_parallel.verify()
        else:
            data_parallel.verify()


def test_zero_parameters(world: Comm) -> None:
    with parallel({}, world) as data_parallel:
        assert dict(data_parallel.finish()) == {}
        assert data_parallel.clip(1.0) == 0
        data_parallel.verify()


@pytest.mark.parametrize("kind", ["self", "plain", "part", "none"])
def test_communicators(kind: str, world: Comm, sub: Comm) -> None:
    comms = {"self": MPI.COMM_SELF, "plain": MPI.Intracomm(world), "part": sub, "none": None}
    comm = comms[kind]
    ranks = world.allgather(None if comm is None else comm.rank)
    size = SIZE if comm is None else comm.size
    assert len(ranks) == SIZE
    params = small(a=[0, 0])
    with parallel(params, comm) as data_parallel:
        rank = data_parallel.comm.rank
        means = step(data_parallel, small(a=[size * rank, 1]))
        assert means["a"].tolist() == [size * (size - 1) / 2, 1]


# -- the order of buckets ---------------------------------------------------------------


def test_buckets_start_in_order(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket k has k + 1 elements, so that the calls tell which was started."""
    params = small(**{name: np.zeros(at + 1) for at, name in enumerate("dcba")})
    started: list[int] = []
    native = Comm.Iallreduce

    def spy(self: Comm, send: Any, recv: Array, *args: Any, **keywords: Any) -> Any:
        started.append(recv.size)
        return native(self, send, recv, *args, **keywords)

    with parallel(params, world, 1) as data_parallel:
        monkeypatch.setattr(Comm, "Iallreduce", spy)
        grads = {name: np.ones_like(param) for name, param in params.items()}
        for name, expected in zip("abcd", (1, 2, 3, 4), strict=True):
            data_parallel.ready(name, grads[name])
            assert len(started) == expected
        data_parallel.finish()
        assert started == [4, 3, 2, 1]

        # Early ones wait for their turn, and what never comes is started by finish.
        started.clear()
        for name, expected in (("d", 0), ("b", 0), ("a", 2)) if RANK % 2 else ():
            data_parallel.ready(name, grads[name])
            assert len(started) == expected
        data_parallel.finish()
        assert started == [4, 3, 2, 1]
        np.testing.assert_array_equal(data_parallel.gradients["b"], SIZE // 2 / SIZE)
        assert not data_parallel.gradients["c"].any()


def test_collectives_of_the_caller_in_between(world: Comm) -> None:
    """On even ranks they come before the gradients, on odd ones after: own communicator."""
    params = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float16)}
    with parallel(params, world, 1) as data_parallel:
        for name in ("b", "a"):
            if RANK % 2:
                data_parallel.ready(name, np.ones_like(params[name]))
            total = np.ones(1)
            world.Allreduce(MPI.IN_PLACE, total)
            assert total[0] == SIZE
            if not RANK % 2:
                data_parallel.ready(name, np.ones_like(params[name]))
        assert all((mean == 1).all() for mean in data_parallel.finish().values())


def test_memory_is_reused(world: Comm) -> None:
    params = {"a": np.zeros(1 << 16, np.float32), "b": np.zeros(1 << 16, np.float32)}
    grads = {name: np.ones_like(param) for name, param in params.items()}
    with parallel(params, world) as data_parallel:
        first = dict(step(data_parallel, grads))
        tracemalloc.start()
        second = dict(step(data_parallel, grads))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert all(first[name] is second[name] for name in params)
        # One bucket: the scratch of its allreduce is kept between calls, too.
        assert peak < params["a"].nbytes // 4


def test_gradient_written_in_place(world: Comm) -> None:
    with parallel(small(a=[0, 0]), world) as data_parallel:
        for value in (1, 5):
            data_parallel.gradients["a"][...] = value + RANK
            data_parallel.ready("a", data_parallel.gradients["a"] if value == 5 else None)
            mean = data_parallel.finish()["a"]
            assert mean.tolist() == [value + (SIZE - 1) / 2] * 2


# -- accumulation and unused parameters -------------------------------------------------


def test_accumulation(world: Comm) -> None:
    """The sum over the steps is what is averaged, as in torch."""
    with parallel(small(a=[0, 0], b=[0], c=[0]), world, 8) as data_parallel:
        for _ in range(2):
            before = data_parallel.comm.stats.total.calls
            with data_parallel.no_sync():
                for value in (1, 10):
                    data_parallel.ready("a", np.full(2, value + RANK * 1.0))
                    data_parallel.ready("b", np.full(1, value * 2.0))
                    sums = data_parallel.finish()
            assert data_parallel.comm.stats.total.calls == before
            assert sums["a"].tolist() == [11 + 2 * RANK] * 2
            data_parallel.ready("a", np.full(2, 100.0 + RANK))
            means = data_parallel.finish()
            assert means["a"].tolist() == [111 + 3 * (SIZE - 1) / 2] * 2
            assert means["b"].tolist() == [22]
            assert means["c"].tolist() == [0]


def test_rank_with_nothing_ready(world: Comm) -> None:
    with parallel(small(a=[0, 0], b=[0]), world, 1) as data_parallel:
        if RANK == 0:
            data_parallel.ready("a", np.full(2, SIZE * 3.0))
        means = data_parallel.finish()
        assert means["a"].tolist() == [3, 3]
        assert means["b"].tolist() == [0]
        # What was there before is gone.
        assert not any(mean.any() for mean in data_parallel.finish().values())


# -- clipping ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16, np.complex64])
def test_clip(dtype: Any, world: Comm) -> None:
    params = {"a": np.zeros((2, 3), dtype), "b": np.zeros(5, dtype), "c": np.zeros(1, np.float64)}
    with parallel(params, world, 1) as data_parallel:
        grads = {name: np.zeros_like(param) for name, param in params.items()}
        grads["a"][1, 2], grads["b"][0], grads["c"][0] = 3, 4, 12
        means = step(data_parallel, grads)
        assert data_parallel.clip(13) == 13
        assert [means["a"][1, 2], means["b"][0], means["c"][0]] == [3, 4, 12]
        assert data_parallel.clip(6.5) == 13
        assert [means["a"][1, 2], means["b"][0], means["c"][0]] == [1.5, 2, 6]
        assert data_parallel.clip(6.5) == 6.5


def test_clip_of_any_numbers_has_the_same_bits(world: Comm, rng: np.random.Generator) -> None:
    terms = gradients(rng)
    with parallel(zeros(), world, 100) as data_parallel:
        means = step(data_parallel, terms[RANK])
        norm = data_parallel.clip(0.5)
        assert len(set(MPI.COMM_WORLD.allgather(norm))) == 1
        same_everywhere(dict(means))
        # The squares are rounded, their count of additions too; 16-bit ones when scaled.
        elements = sum(2 * mean.size for mean in means.values())
        assert data_parallel.clip(100) == pytest.approx(0.5, rel=2.0**-8 + elements * 2.0**-53)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_clip_of_what_is_not_finite(bad: float, world: Comm) -> None:
    with parallel(small(a=[0, 0]), world) as data_parallel:
        mean = step(data_parallel, small(a=[1, bad if RANK == SIZE - 1 else 0]))["a"]
        np.testing.assert_equal(data_parallel.clip(1), bad)
        np.testing.assert_array_equal(mean, [0, np.nan] if np.isinf(bad) else [1 / 1, np.nan])


# -- compression ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unit", "least"), [("bf16", 2.0**-8, 2.0**-133), ("fp16", 2.0**-11, 2.0**-24)]
)
def test_compression(
    name: str, unit: float, least: float, world: Comm, rng: np.random.Generator
) -> None:
    """The bound is that of mpicoll.parallel.compression; float64 is not touched."""
    count = 500
    params = {"a": np.zeros(count, np.float32), "b": np.zeros(count, np.float64)}
    terms = rng.standard_normal((SIZE, count)) * np.exp2(rng.uniform(-20, 8, count))
    terms = terms.astype(np.float32).astype(np.float64)
    with parallel(params, world, compress=name) as data_parallel:
        data_parallel.ready("a", terms[RANK].astype(np.float32))
        data_parallel.ready("b", terms[RANK])
        means = data_parallel.finish()
        wide, size = terms.astype(np.longdouble).mean(axis=0), np.abs(terms).mean(axis=0)
        growth = gamma(SIZE, 2.0**-24)
        bound = unit * np.abs(wide)
        bound += (1 + unit) * (unit * size + least + growth * ((1 + unit) * size + least)) + least
        assert means["a"].dtype == np.float32
        error = np.abs(means["a"].astype(np.longdouble) - wide)
        assert (error <= bound).all()
        assert (error > 2.0**-22 * size).any(), "nothing was compressed"
        held_to_bound("b", means["b"], list(terms))
        same_everywhere(dict(means))


def test_compressed_gradients_have_half_the_bytes(world: Comm) -> None:
    sent = []
    for compress in (None, "bf16"):
        with parallel({"a": np.zeros(64, np.float32)}, world, compress=compress) as data_parallel:
            bucket = data_parallel._buckets[0]
            sent.append(bucket.message.nbytes)
            step(data_parallel, {"a": np.ones(64, np.float32)})
    assert sent == [256, 128]


def test_accumulation_is_not_compressed(world: Comm) -> None:
    """Sums on a rank are in float32, rounded once when they are sent: 256 + 1 is not 256."""
    with parallel({"a": np.zeros(1, np.float32)}, world, compress="bf16") as data_parallel:
        with data_parallel.no_sync():
            data_parallel.ready("a", np.full(1, 256, np.float32))
            data_parallel.ready("a", np.full(1, 1, np.float32))
        data_parallel.ready("a", np.full(1, 1, np.float32))
        assert data_parallel.finish()["a"].tolist() == [258]


def test_range_of_compression(world: Comm) -> None:
    for name, expected in (("fp16", np.inf), ("bf16", 2.0**17)):
        with parallel({"a": np.zeros(1, np.float32)}, world, compress=name) as data_parallel:
            assert step(data_parallel, {"a": np.full(1, 2**17, np.float32)})["a"][0] == expected


class Doubled(HalfWire):
    """A hook of a user: sends twice the values."""

    def __init__(self) -> None:
        super().__init__("fp16")
        self.name = "doubled"

    def compress(self, wire: Array, bucket: Array) -> None:
        np.multiply(bucket, 2, out=wire, casting="same_kind")


def test_hook_of_a_user(world: Comm) -> None:
    with parallel({"a": np.zeros(3, np.float32)}, world, compress=Doubled()) as data_parallel:
        means = step(data_parallel, {"a": np.full(3, RANK, np.float32)})
        assert means["a"].tolist() == [SIZE - 1.0] * 3


# -- errors within a step ---------------------------------------------------------------


def test_wrong_gradients(world: Comm) -> None:
    """Nothing is sent, nothing changes; the step goes on as if they had not been."""
    wrong: list[tuple[str, Any, str]] = [
        ("c", np.zeros(2), "unknown parameter 'c'; known: 'a', 'b'"),
        ("a", np.zeros(3), r"'a' has shape \(3,\) and dtype float64; expected \(2,\) and float64"),
        ("a", np.zeros(2, np.float32), "'a' has shape .* dtype float32; expected .* and float64"),
        ("a", [1, 2], "'a' is of type list; expected a NumPy or CuPy array"),
    ]
    with parallel(small(a=[0, 0], b=[0]), world, 1) as data_parallel:
        for name, grad, words in wrong if RANK == SIZE - 1 else []:
            with pytest.raises(ValueError, match=f"DataParallel on rank {RANK}: .*{words}"):
                data_parallel.ready(name, grad)
        data_parallel.ready("a", np.full(2, 1.0 + RANK))
        with pytest.raises(ValueError, match="'a' is ready for the second time"):
            data_parallel.ready("a", np.full(2, 100.0))
        means = data_parallel.finish()
        assert means["a"].tolist() == [(SIZE + 1) / 2] * 2
        assert means["b"].tolist() == [0]
        with data_parallel.no_sync(), pytest.raises(ValueError, match="shape"):
            data_parallel.ready("a", np.zeros(3))
        assert not data_parallel.finish()["a"].any()


def test_calls_within_a_step(world: Comm) -> None:
    with parallel(small(a=[0], b=[0]), world, 1) as data_parallel:
        data_parallel.ready("b", np.ones(1))
        with (
            pytest.raises(RuntimeError, match="no_sync within a step; call finish first"),
            data_parallel.no_sync(),
        ):
            pass
        for call in (data_parallel.broadcast, lambda: data_parallel.clip(1), data_parallel.free):
            with pytest.raises(RuntimeError, match=f"on rank {RANK}: .* within a step"):
                call()
        assert data_parallel.finish()["b"].tolist() == [1]
        for norm in (0, -1, np.nan):
            with pytest.raises(ValueError, match=r"max_norm .*; expected a number above 0"):
                data_parallel.clip(norm)


class Failing:
    """A request that completes, and raises like one whose time is over."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def Wait(self) -> None:
        self._request.Wait()
        raise TimeoutError("no end")

    def Test(self) -> bool:
        return False


def test_allreduce_that_fails(world: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    native = Comm.Iallreduce
    with parallel(small(a=[0]), world) as data_parallel:
        monkeypatch.setattr(Comm, "Iallreduce", lambda *args, **ops: Failing(native(*args, **ops)))
        data_parallel.ready("a", np.ones(1))
        with pytest.raises(TimeoutError, match="no end"):
            data_parallel.finish()
        for call in (data_parallel.finish, lambda: data_parallel.ready("a", np.ones(1))):
            with pytest.raises(RuntimeError, match=f"on rank {RANK}: an allreduce failed before"):
                call()


def test_context(world: Comm) -> None:
    with DataParallel(small(a=[0]), world) as data_parallel:
        comm = data_parallel.comm
    assert comm == MPI.COMM_NULL
    with pytest.raises(KeyError), DataParallel(small(a=[0]), world) as data_parallel:
        raise KeyError("of the caller")
    assert data_parallel.comm != MPI.COMM_NULL
    data_parallel.free()


# -- refused by the constructor, on all ranks -------------------------------------------


def of(rank: int, own: Any, others: Any) -> Any:
    return own if rank == RANK else others


LAST = SIZE - 1
DIFFER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shape": (
        {"a": np.zeros(1), "b": np.zeros((2, of(LAST, 4, 3)))},
        {},
        f"rank {LAST} has parameter 'b' of shape \\(2, 4\\) and dtype float64 where rank 0 has "
        "parameter 'b' of shape \\(2, 3\\)",
    ),
    "dtype": (
        {"a": np.zeros(1, of(LAST, "f4", "f8"))},
        {},
        "'a' of shape .* float32 where .* float64",
    ),
    "name": ({of(LAST, "b", "a"): np.zeros(1)}, {}, "parameter 'b' .* where .* parameter 'a'"),
    "more": (
        {"a": np.zeros(1)} | of(LAST, {"b": np.zeros(1)}, {}),
        {},
        "parameter 'b' .* where rank 0 has nothing more",
    ),
    "order": (
        dict(of(LAST, reversed, list)([("a", np.zeros(1)), ("b", np.zeros(1))])),
        {},
        "'b' .* where rank 0 has parameter 'a'",
    ),
    "bucket_bytes": ({}, {"bucket_bytes": of(LAST, 2, 1)}, "bucket_bytes=2 where .*=1"),
    "op": ({}, {"op": of(LAST, "sum", "mean")}, "op='sum' where .* op='mean'"),
    "compress": ({}, {"compress": of(LAST, "fp16", "bf16")}, "'fp16' where .*'bf16'"),
}


@pytest.mark.parametrize("case", DIFFER)
def test_what_differs(case: str, world: Comm) -> None:
    params, keywords, words = DIFFER[case]
    if SIZE == 1:  # one rank can not differ
        DataParallel(params, world, **keywords).free()
        return
    with pytest.raises(ValueError, match=f"DataParallel on rank {RANK}: .*{words}"):
        DataParallel(params, world, **keywords)


def read_only() -> Array:
    array = np.zeros(1)
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "list": ([np.zeros(1)], {}, "params of type list; expected arrays by name"),
    "name": ({3: np.zeros(1)}, {}, "name of type int; names are strings"),
    "scalar": ({"a": 1.0}, {}, "parameter 'a' of type float; expected a NumPy or CuPy array"),
    "integers": ({"a": np.zeros(1, int)}, {}, "parameter 'a' of dtype int64"),
    "byte order": ({"a": np.zeros(1, ">f8")}, {}, "parameter 'a' of dtype >f8"),
    "read-only": ({"a": read_only()}, {}, "parameter 'a' that is read-only"),
    "bucket_bytes": ({}, {"bucket_bytes": 0}, "bucket_bytes=0; expected"),
    "bytes": ({}, {"bucket_bytes": 1.5}, "bucket_bytes=1.5; expected"),
    "op": ({}, {"op": ["mean"]}, "op=\\['mean'\\]; known: mean, sum"),
    "compress": ({}, {"compress": "int8"}, "compress='int8'; known: bf16, fp16"),
    "hook": ({}, {"compress": 3}, "compress of type int; expected a Compression"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_one_rank_has_wrong(case: str, world: Comm) -> None:
    params, keywords, words = WRONG[case] if RANK == LAST else ({"a": np.zeros(1)}, {}, "")
    words = WRONG[case][2]
    with pytest.raises(ValueError, match=f"rank {RANK}: rank {LAST} passed .*{words}"):
        DataParallel(params, world, **keywords)

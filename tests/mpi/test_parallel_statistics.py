"""SyncBatchNorm, gather_features and average_metrics: exact references, the same bits on all."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Comm
from mpicoll.parallel import Moments, SyncBatchNorm, average_metrics, gather_features

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
UNIT = 2.0**-53
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Array = np.ndarray[Any, np.dtype[Any]]

#: Samples of each rank, by its number: uneven, and empty on every rank but the last in turn.
COUNTS = {
    "even": lambda rank: 4,
    "uneven": lambda rank: 1 + 3 * rank % 7,
    "some empty": lambda rank: 5 * (rank % 2) + (rank == LAST),
    "last alone": lambda rank: 6 * (rank == LAST),
    "first alone": lambda rank: 6 * (rank == 0),
}


def batches(
    rng: np.random.Generator, counts: str, shape: tuple[int, ...] = (3, 2), offset: float = 0
) -> list[Array]:
    """Return those of all ranks: shape (n, 3, 2), channels along axis 1."""
    return [rng.standard_normal((COUNTS[counts](rank), *shape)) + offset for rank in range(SIZE)]


def same_everywhere(*arrays: Any) -> None:
    own = [np.asarray(array).tobytes() for array in arrays]
    assert all(other == own for other in MPI.COMM_WORLD.allgather(own))


def exact(values: Array) -> tuple[Fraction, Fraction]:
    """Return mean and sum of squared deviations of numbers, without any rounding."""
    numbers = [Fraction(float(value)) for value in values.ravel()]
    mean = sum(numbers) / len(numbers)
    return mean, sum((number - mean) ** 2 for number in numbers)


def moments_bounds(values: Array, deviation: float) -> tuple[float, float]:
    """Return what mean and sum of squared deviations of one channel may be wrong by.

    Let M bound the magnitudes, n be the number of values, P that of ranks. A rank's mean is wrong
    by (n + 1) u M at most. A merge averages the errors of two means and adds those of
    apart * share: 2 M times three roundings, and one of the sum: 7 u M. So E = (n + 1 + 7 P) u M.

    Squared deviations of a rank: two passes, (n + 5) u D + n E^2. A merge adds terms that
    are not negative (5 roundings in all, of numbers of at most D), and apart^2 c, c = na nb / n,
    where apart is wrong by 2 E: 2 |apart| c 2 E, with |apart| sqrt(c) <= sqrt(D) and
    sqrt(c) <= sqrt(n) / 2: 2 sqrt(n D) E. What is quadratic in E is below (n + P) E^2. Terms of
    higher order are covered by one more unit each.
    """
    count, most = values.size, float(np.abs(values).max())
    mean = (count + 2 + 8 * SIZE) * UNIT * most
    merge = 8 * UNIT * deviation + 2 * math.sqrt(count * deviation) * mean
    squares = (count + 6) * UNIT * deviation + SIZE * merge + 4 * (count + SIZE) * mean**2
    return mean, squares


# -- batch normalisation: statistics ----------------------------------------------------


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(np.float64, 0), (np.float64, 1e6), (np.float32, 1e4), (np.float16, 9), (BFLOAT16, 0)],
    ids=str,
)
def test_statistics(
    counts: str, offset: float, dtype: Any, world: Comm, rng: np.random.Generator
) -> None:
    every = [batch.astype(dtype) for batch in batches(rng, counts, offset=offset)]
    merged = SyncBatchNorm(3, world).statistics(every[RANK])
    whole = np.concatenate(every).astype(np.float64)
    assert merged.count == whole.shape[0] * 2
    assert merged.mean.dtype == merged.deviation.dtype == np.float64
    for channel in range(3):
        values = whole[:, channel]
        mean, deviation = exact(values)
        bounds = moments_bounds(values, float(deviation))
        assert abs(Fraction(merged.mean[channel]) - mean) <= bounds[0]
        assert abs(Fraction(merged.deviation[channel]) - deviation) <= bounds[1]
    same_everywhere(merged.mean, merged.deviation, merged.count)
    np.testing.assert_array_equal(merged.variance, merged.deviation / merged.count)
    np.testing.assert_array_equal(merged.unbiased, merged.deviation / (merged.count - 1))


def test_sums_of_squares_would_not_do(rng: np.random.Generator) -> None:
    """The bound is tight enough to tell Chan's merge from the textbook's difference."""
    values = rng.standard_normal(50) + 1e6
    _, deviation = exact(values)
    naive = np.square(values).sum() - values.sum() ** 2 / values.size
    assert abs(Fraction(naive) - deviation) > moments_bounds(values, float(deviation))[1]


def test_merge_of_integers_is_exact() -> None:
    """Of counts that are powers of two, where nothing is rounded."""
    one = Moments(2, np.array([3.0]), np.array([8.0]))  # 1, 5
    other = Moments(2, np.array([7.0]), np.array([2.0]))  # 6, 8
    for merged in (one.merge(other), other.merge(one)):
        assert (merged.count, merged.mean[0], merged.deviation[0]) == (4, 5, 26)
    empty = Moments(0, np.zeros(1), np.zeros(1))
    assert one.merge(empty) is empty.merge(one) is one
    assert empty.variance[0] == empty.unbiased[0] == 0


def test_ranks_are_merged_in_rank_order(world: Comm, rng: np.random.Generator) -> None:
    every = batches(rng, "uneven")
    norm = SyncBatchNorm(3, world)
    merged = norm.local(every[0])
    for batch in every[1:]:
        merged = merged.merge(norm.local(batch))
    actual = norm.statistics(every[RANK])
    assert actual.mean.tobytes() == merged.mean.tobytes()
    assert actual.deviation.tobytes() == merged.deviation.tobytes()


def test_long_double(world: Comm, rng: np.random.Generator) -> None:
    """Beyond what float64 could hold, where a long double has more bits."""
    eps = np.finfo(np.longdouble).eps
    x = np.ones((2, 1), np.longdouble)
    x[1] += eps * 2
    moments = SyncBatchNorm(1, world, dtype=np.longdouble).statistics(x)
    assert moments.mean.dtype == np.longdouble
    assert abs(moments.mean[0] - (1 + eps)) <= 8 * SIZE * eps
    # With 64 bits of precision both are exact on any number of ranks: the means are equal
    if eps < 2.0**-60:
        assert moments.mean[0] == 1 + eps
        assert moments.deviation[0] == 2 * SIZE * eps**2


@pytest.mark.parametrize(
    ("axis", "shape"), [(1, (4, 3)), (-1, (2, 5, 3)), (0, (3, 4)), (2, (2, 2, 3, 2))]
)
def test_axes(axis: int, shape: tuple[int, ...], world: Comm) -> None:
    x = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    rows = np.moveaxis(x, axis, -1).reshape(-1, 3)
    norm = SyncBatchNorm(3, world, axis=axis)
    moments = norm.statistics(np.asfortranarray(x))
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=16 * SIZE * UNIT * len(rows))
    assert norm.forward(x)[0].shape == shape


# -- batch normalisation: forward and backward ------------------------------------------


def reference(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Normalise a whole batch; complex numbers too, for the derivative."""
    mean = x.mean(axis=(0, 2), keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=(0, 2), keepdims=True)
    wide = (slice(None), np.newaxis)
    return (x - mean) / np.sqrt(variance + eps) * weight[wide] + bias[wide]


def derivative(x: Array, grad: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Differentiate sum(grad * y) by every x with a complex step, which does not cancel."""
    result = np.empty_like(x)
    for at in np.ndindex(x.shape):
        moved = x.astype(np.complex128)
        moved[at] += 1e-40j
        result[at] = (grad * reference(moved, weight, bias, eps)).sum().imag / 1e-40
    return result


#: Roundings on the way of one element, of reference and result: each sums n values twice,
#: merges (moments_bounds, relative to M <= 5 standard deviations) and scales.
def roundings(count: int) -> float:
    return 16 * (count + 8 * SIZE + 8) * UNIT * 5


@pytest.mark.parametrize("counts", COUNTS)
def test_forward_and_backward(counts: str, world: Comm, rng: np.random.Generator) -> None:
    every, grads = batches(rng, counts), batches(rng, counts)
    weight, bias = rng.standard_normal(3), rng.standard_normal(3)
    norm = SyncBatchNorm(3, world, eps=0.25, momentum=0.5)
    x, grad = every[RANK], grads[RANK]
    y, moments = norm.forward(x, weight, bias)
    back = norm.backward(grad, x, moments, weight)

    whole, whole_grad = np.concatenate(every), np.concatenate(grads)
    start = sum(len(one) for one in every[:RANK])
    own = slice(start, start + len(x))
    bound = roundings(whole.size // 3)
    expected = reference(whole, weight, bias, 0.25)
    np.testing.assert_allclose(y, expected[own], rtol=0, atol=bound * (np.abs(expected).max() + 4))
    expected = derivative(whole, whole_grad, weight, bias, 0.25)
    # The terms that cancel: the gradient, its mean, and the mean product with x twice
    size = np.abs(weight).max() * (np.abs(whole_grad).max() * (2 + 25))
    np.testing.assert_allclose(back.x, expected[own], rtol=0, atol=bound * size)
    plain = (x - moments.mean[:, np.newaxis]) / np.sqrt(moments.variance + 0.25)[:, np.newaxis]
    by_weight, by_bias = (grad * plain).sum(axis=(0, 2)), grad.sum(axis=(0, 2))
    np.testing.assert_allclose(back.weight, by_weight, rtol=0, atol=bound * size * x.size)
    np.testing.assert_allclose(back.bias, by_bias, rtol=0, atol=bound * size * x.size)

    sums = norm.backward_sums(grad, x, moments)
    same_everywhere(sums, norm.running_mean, norm.running_variance)
    np.testing.assert_array_equal(norm.running_mean, moments.mean * 0.5)
    np.testing.assert_array_equal(norm.running_variance, 1 + 0.5 * (moments.unbiased - 1))
    inferred = norm.infer(x, weight, bias)
    assert inferred.shape == x.shape


def test_backward_sums_are_in_rank_order(world: Comm) -> None:
    norm = SyncBatchNorm(1, world)
    value = 2.0**53 if RANK == 0 else 1.0
    x = np.array([[3.0], [3.0]])
    moments = Moments(2 * SIZE, np.array([2.0]), np.array([1.0]))
    sums = norm.backward_sums(np.array([[value], [0.0]]), x, moments)
    # Each 1 is lost one by one: 2^53 + 1 is rounded to even
    assert sums.tolist() == [[2.0**53], [2.0**53]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_dtype_comes_out_as_it_went_in(dtype: Any, world: Comm) -> None:
    norm = SyncBatchNorm(1, world, eps=0)
    x = np.array([[1], [3]], dtype)
    y, moments = norm.forward(x, np.array([2.0]), np.array([0.5]))
    assert y.dtype == dtype
    assert y.astype(float).ravel().tolist() == [-1.5, 2.5]
    back = norm.backward(np.array([[1], [1]], dtype), x, moments, np.array([2.0]))
    assert back.x.dtype == dtype
    assert not back.x.any()  # all the same: the mean takes them away
    assert (back.weight.tolist(), back.bias.tolist()) == ([0], [2])
    assert norm.infer(x).dtype == dtype


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_values(count: int, world: Comm) -> None:
    norm = SyncBatchNorm(2, world)
    with pytest.raises(ValueError, match=f"on rank {RANK}: {count} value.* needs two"):
        norm.forward(np.ones((count if RANK == LAST else 0, 2)))
    assert norm.running_variance.tolist() == [1, 1]


def test_wrong_inputs(world: Comm) -> None:
    norm = SyncBatchNorm(2, world)
    x, moments = np.ones((4, 2)), Moments(4, np.zeros(2), np.ones(2))
    for call, words in [
        (lambda: norm.statistics(np.ones((4, 3))), r"x has shape \(4, 3\); expected 2 channels"),
        (lambda: norm.statistics(np.ones(4)), r"x has shape \(4,\); expected 2 channels along"),
        (lambda: norm.statistics(np.ones((4, 2), int)), "x is of int64; expected"),
        (lambda: norm.infer([1.0]), "x is of list; expected"),
        (lambda: norm.forward(x, np.ones(3)), r"weight has shape \(3,\); expected \(2,\)"),
        (lambda: norm.forward(x, None, np.ones(1)), r"bias has shape \(1,\)"),
        (lambda: norm.backward(np.ones((3, 2)), x, moments), r"grad has shape \(3, 2\); expected"),
        (lambda: norm.backward_sums(np.ones((3, 2)), x, moments), "grad has shape"),
        (lambda: norm.backward(x, x, moments, np.ones(1)), "weight has shape"),
    ]:
        with pytest.raises(ValueError, match=f"SyncBatchNorm on rank {RANK}: {words}"):
            call()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"channels": 0}, "channels=0; expected"),
        ({"axis": "x"}, "axis='x'; expected"),
        ({"eps": -1}, "eps=-1; expected"),
        ({"momentum": 2}, "momentum=2; expected"),
        ({"dtype": np.float32}, "dtype=.*float32.*; expected float64 or longdouble"),
        ({"dtype": "what"}, "dtype='what'; expected"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str, world: Comm) -> None:
    usual: dict[str, Any] = {"channels": 2}
    with pytest.raises(ValueError, match=f"on rank {RANK}: rank {LAST} passed {words}"):
        SyncBatchNorm(comm=world, **(usual | arguments if RANK == LAST else usual))


@pytest.mark.parametrize("name", ["channels", "axis", "eps", "momentum", "dtype"])
def test_arguments_that_differ(name: str, world: Comm) -> None:
    usual: dict[str, Any] = {"channels": 2, "axis": 1, "eps": 1.0, "momentum": 0.5}
    other = {"channels": 3, "axis": 2, "eps": 0.5, "momentum": 0.25, "dtype": "longdouble"}[name]
    if SIZE == 1:
        return
    with pytest.raises(ValueError, match=f"rank {LAST} has {name}=.* where rank 0 has {name}="):
        SyncBatchNorm(comm=world, **(usual | {name: other} if RANK == LAST else usual))


# -- features ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "g", BFLOAT16], ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_features(counts: str, dtype: Any, world: Comm) -> None:
    for shape in ((), (3,), (2, 0), (2, 2)):
        gather_and_return(counts, shape, dtype, world)


def gather_and_return(counts: str, shape: tuple[int, ...], dtype: Any, world: Comm) -> None:
    """Gather small integers, exact in every dtype, and return gradients."""

    def rows(rank: int, factor: int) -> Array:
        size = (COUNTS[counts](rank), *shape)
        return (np.arange(math.prod(size)) % 5 + factor * rank).reshape(size).astype(dtype)

    gathered = gather_features(
        np.asfortranarray(rows(RANK, 1)).reshape(rows(RANK, 1).shape), world
    )
    every = np.concatenate([rows(rank, 1) for rank in range(SIZE)])
    assert gathered.features.dtype == dtype
    np.testing.assert_array_equal(gathered.features, every)
    np.testing.assert_array_equal(gathered.features[gathered.own], rows(RANK, 1))
    assert gathered.counts == tuple(COUNTS[counts](rank) for rank in range(SIZE))

    # Rank r's loss has the gradient r + 1 times a pattern.
    pattern = (np.arange(every.size) % 3).reshape(every.shape)
    back = gathered.backward(((RANK + 1) * pattern).astype(dtype))
    assert back.dtype == dtype
    expected = (pattern * (SIZE * (SIZE + 1) // 2)).astype(dtype)
    np.testing.assert_array_equal(back, expected[gathered.own])


def test_contrastive_loss(world: Comm) -> None:
    """Rank r's loss is sum over its rows i and all rows j of x_i * x_j: gradients by hand."""
    x = np.arange(RANK + 1.0)[:, np.newaxis] + RANK
    gathered = gather_features(x, world)
    every = gathered.features
    grad = np.full_like(every, x.sum())  # of the second factor, any row
    grad[gathered.own] += every.sum()  # of the first, rows of this rank
    np.testing.assert_array_equal(gathered.backward(grad), np.full_like(x, 2 * every.sum()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([1.0], "features of type list"),
        (np.float64(1), "features of type float64"),
        (np.array(1.0), "features without rows"),
        (np.ones(2, int), "features of dtype int64"),
        (np.ones(2, ">f4"), "features of dtype >f4"),
    ],
)
def test_wrong_features(wrong: Any, words: str, world: Comm) -> None:
    with pytest.raises(ValueError, match=f"on rank {RANK}: rank {LAST} passed {words}"):
        gather_features(wrong if RANK == LAST else np.ones(2), world)


@pytest.mark.parametrize("other", [np.ones((2, 4)), np.ones((2, 3), "f4"), np.ones(2)])
def test_features_that_differ(other: Array, world: Comm) -> None:
    if SIZE == 1:
        return
    with pytest.raises(ValueError, match=rf"rank {LAST} has rows of \(.*where rank 0 has rows of"):
        gather_features(other if RANK == LAST else np.ones((2, 3)), world)


def test_wrong_gradient_of_features(world: Comm) -> None:
    gathered = gather_features(np.ones((2, 3), np.float32), world)
    for grad in (np.ones((2, 4), np.float32), np.ones((2 * SIZE, 3)), [1]):
        words = rf"backward on rank {RANK}: grad is of shape .*; expected \({2 * SIZE}, 3\)"
        with pytest.raises(ValueError, match=words):
            gathered.backward(grad)


# -- metrics ----------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, LAST])
def test_metrics(root: int, world: Comm) -> None:
    weights = [rank * rank for rank in range(1, SIZE + 1)]
    own = {"loss": float(RANK), "accuracy": np.float32(0.5), "count": 3}
    means = average_metrics(own, weights[RANK], world, root=root)
    assert (means is None) == (root != RANK)
    if means is not None:
        loss = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
        assert means == {"loss": loss, "accuracy": 0.5, "count": 3.0}


def test_metrics_without_weight(world: Comm) -> None:
    """A rank without samples has no say, whatever its loss is."""
    means = average_metrics({"a": 2.0 if RANK == LAST else np.nan}, RANK == LAST, world)
    assert means == ({"a": 2.0} if RANK == 0 else None)
    means = average_metrics({"a": 1.0}, 0, world)
    assert means is None or math.isnan(means["a"])
    assert average_metrics({}, comm=world) == ({} if RANK == 0 else None)


@pytest.mark.parametrize(
    ("metrics", "weight", "words"),
    [
        ({"a": 1}, -1, "weight -1.0; expected a finite number, 0 or more"),
        ({"a": 1}, math.inf, "weight inf; expected"),
        ({"a": 1}, "two", "'weight' of type str; expected a number"),
        ({"a": "one"}, 1, "'a' of type str; expected a number"),
        ([1], 1, "metrics of type list; expected numbers by name"),
    ],
)
def test_wrong_metrics(metrics: Any, weight: Any, words: str, world: Comm) -> None:
    arguments = (metrics, weight) if RANK == LAST else ({"a": 1}, 1)
    with pytest.raises(ValueError, match=f"on rank {RANK}: rank {LAST} passed {words}"):
        average_metrics(*arguments, world)


def test_metrics_that_differ(world: Comm) -> None:
    if SIZE == 1:
        return
    with pytest.raises(
        ValueError, match=f"rank {LAST} has metric 'b' where rank 0 has metric 'a'"
    ):
        average_metrics({"b" if RANK == LAST else "a": 1}, 1, world)

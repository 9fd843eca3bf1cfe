"""Optimizers on flat arrays against closed forms and the textbook, and the cut into groups."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpicoll.parallel.flat import Group, bits, plan
from mpicoll.parallel.optimizers import PIECE, SGD, Adam

U = 2.0**-24


def gamma(roundings: int) -> float:
    return roundings * U / (1 - roundings * U)


def state(optimizer: Any, like: Any) -> dict[str, Any]:
    return {slot: np.zeros_like(like) for slot in optimizer.slots}


def run(optimizer: Any, value: Any, gradients: list[Any]) -> Any:
    value, kept = value.copy(), state(optimizer, value)
    for step, gradient in enumerate(gradients, start=1):
        optimizer.update(value, gradient.copy(), kept, step)
    return value


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sgd_in_closed_form(dtype: Any) -> None:
    """Powers of two and small whole numbers: every operation is exact."""
    x, g = np.array([8.0, -4.0], dtype), np.array([2.0, 4.0], dtype)
    assert (run(SGD(0.5), x, [g, g]) == x - g).all()
    # Velocities g, 1.5 g, 1.75 g.
    assert (run(SGD(0.5, momentum=0.5), x, [g] * 3) == x - 0.5 * 4.25 * g).all()
    # Looked ahead: 1.5 g, 1.75 g.
    assert (run(SGD(0.5, momentum=0.5, nesterov=True), x, [g] * 2) == x - 0.5 * 3.25 * g).all()
    assert (run(SGD(0.5, weight_decay=0.5), x, [0 * g] * 2) == x * 0.75**2).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weight_decay_of_adam(dtype: Any) -> None:
    x = np.array([8.0, -4.0], dtype)
    zero = np.zeros_like(x)
    assert (run(Adam(0.5, weight_decay=0.5), x, [zero] * 2) == x * 0.75**2).all()
    added = run(Adam(0.5, weight_decay=0.5, decoupled=False), x, [zero])
    assert (added == run(Adam(0.5), x, [0.5 * x])).all()


def test_adam_by_the_textbook() -> None:
    """Against float64 and the paper's own order of operations, to a derived bound.

    Gradients are positive, so nothing cancels. Per step a term of the mean is rounded three
    times and one of the square as often, one more for g * g: after t steps they are off by
    γ(3 t) and γ(3 t + 1), and the root of the latter by half; seven more roundings make the
    update, so it is off by γ(5 t + 8), and the difference is rounded once more.
    """
    rng = np.random.default_rng(5)
    lr, b1, b2, eps = 0.01, 0.9, 0.999, 1e-8
    x = rng.standard_normal(1000).astype(np.float32)
    gradients = [rng.uniform(0.1, 2, 1000).astype(np.float32) for _ in range(10)]
    actual = run(Adam(lr, b1, b2, eps), x, gradients)
    expected = x.astype(np.float64)
    mean, square, bound = np.zeros(1000), np.zeros(1000), np.zeros(1000)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.astype(np.float64)
        mean = b1 * mean + (1 - b1) * g
        square = b2 * square + (1 - b2) * g * g
        update = lr * (mean / (1 - b1**t)) / (np.sqrt(square / (1 - b2**t)) + eps)
        expected = expected - update
        bound = (1 + U) * (bound + gamma(5 * t + 8) * update) + U * np.abs(expected)
    assert (np.abs(actual - expected) <= bound).all()
    assert bound.max() < 2e-5


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1, momentum=0.9, weight_decay=0.01),
        SGD(0.1, momentum=0.9, nesterov=True),
        Adam(0.01, weight_decay=0.1),
    ],
    ids=["momentum", "nesterov", "adamw"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_shard_has_the_bits_of_the_whole(optimizer: Any, dtype: Any) -> None:
    """Cut anywhere, at any alignment, and longer than a piece."""
    rng = np.random.default_rng(6)
    count = PIECE + 41
    x = rng.standard_normal(count).astype(dtype)
    gradients = [rng.standard_normal(count).astype(dtype) for _ in range(3)]
    whole = run(optimizer, x, gradients)
    for low, high in [(0, 1), (1, 8), (3, 40), (17, count), (PIECE - 1, PIECE + 2), (5, 5)]:
        shard = run(optimizer, x[low:high], [one[low:high] for one in gradients])
        assert shard.tobytes() == whole[low:high].tobytes()


def test_numpy_scalars_do_not_set_the_precision() -> None:
    x = np.array([1.0, 2.0, 3.0], np.float32) / 7
    for plain, scalar in [(SGD(0.1), SGD(np.float64(0.1))), (Adam(0.1), Adam(np.float64(0.1)))]:
        assert run(scalar, x, [x]).tobytes() == run(plain, x, [x]).tobytes()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-1.0), "lr is -1.0, expected at least 0"),
        (lambda: SGD(float("nan")), "lr is nan"),
        (lambda: SGD(1.0, momentum=-0.5), "momentum is -0.5"),
        (lambda: SGD(1.0, weight_decay=-1.0), "weight_decay is -1.0"),
        (lambda: SGD(1.0, nesterov=True), "nesterov needs a momentum above 0"),
        (lambda: Adam(beta1=1.0), "beta1 is 1.0, expected at least 0 and below 1"),
        (lambda: Adam(beta2=-0.1), "beta2 is -0.1"),
        (lambda: Adam(eps=0.0), "eps is 0.0, expected at least 1.17549e-38"),
    ],
)
def test_numbers_out_of_range(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


# -- groups -----------------------------------------------------------------------------


def model() -> dict[str, Any]:
    return {
        "a": np.arange(5, dtype=np.float32),
        "b": np.arange(6.0).reshape(2, 3),
        "c": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "d": np.array([1 + 2j, 3 + 4j], np.complex64),
        "e": np.arange(3, dtype=ml_dtypes.bfloat16),
        "f": np.float32(9).reshape(()),
    }


def names(groups: list[Group]) -> list[tuple[str, list[str]]]:
    return [(one.dtype.name, [entry.name for entry in one.entries]) for one in groups]


def test_one_group_per_dtype_and_bucket() -> None:
    assert names(plan(model(), ["f"], None)) == [
        ("float32", ["a", "c"]),
        ("float64", ["b"]),
        ("complex64", ["d"]),
        ("bfloat16", ["e"]),
        ("float32", ["f"]),
    ]
    # A bucket is closed by the parameter that fills it; what is left over comes last.
    assert names(plan(model(), [], None, 24)) == [
        ("float64", ["b"]),
        ("float32", ["a", "c"]),
        ("complex64", ["d"]),
        ("bfloat16", ["e"]),
        ("float32", ["f"]),
    ]


def test_dtypes_of_groups() -> None:
    found = {
        one.dtype.name: (one.element.name, one.update.name, one.wire.name)
        for one in plan(model(), [], np.dtype(np.float32))
    }
    assert found == {
        "float32": ("float32",) * 3,
        "float64": ("float64",) * 3,
        "complex64": ("float32",) * 3,
        "bfloat16": ("bfloat16", "float32", "float32"),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_shards_make_the_whole(size: int) -> None:
    """Read piece by piece and put together, written back in any layout."""
    values = model()
    for group in plan(values, [], None):
        share = group.share(size)
        assert share * size - group.count < size
        flat = np.full(group.padded(size), 77, group.element)
        for rank in range(size):
            group.read(values, rank * share, flat[rank * share : (rank + 1) * share])
        assert (flat[group.count :] == 0).all()
        targets = {entry.name: np.zeros_like(values[entry.name]) for entry in group.entries}
        group.write(flat, targets)
        for name, target in targets.items():
            assert (target == values[name]).all()
            assert group.views(flat)[name].shape == values[name].shape


def test_bits_of_every_dtype() -> None:
    for dtype in ("?", "i1", "f2", "f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "g"):
        array = np.ones(3, dtype)
        assert bits(array).dtype.kind == "u"
        assert bits(array).tobytes() == array.tobytes()

"""A small model of several dtypes, its gradients, and its training in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mpicoll.parallel.optimizers import FlatOptimizer

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

BF16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BF16)
FROZEN = ("rows.table", "out.mask")


def layers(seed: int = 1) -> dict[str, Arrays]:
    """Return parameters by layer: all trained dtypes, 0-d, empty, strided, and frozen ones."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    return {
        "rows": {
            "weight": np.asfortranarray(normal((5, 3)).astype(np.float32)),
            "bias": normal(7),
            "table": rng.integers(-9, 9, (3, 2), np.int64),
        },
        "half": {
            "weight": normal((2, 9)).astype(np.float16),
            "scale": normal(11).astype(BF16),
        },
        "out": {
            "phase": (normal((2, 3)) + 1j * normal((2, 3))).astype(np.complex64),
            "wide": normal(3) + 1j * normal(3),
            "temperature": np.full((), 1.5, np.float32),
            "nothing": np.zeros((0, 4), np.float32),
            "strided": np.zeros((4, 6), np.float64)[::2, ::-3],
            "mask": np.array([True, False, True]),
        },
    }


def flat(model: Mapping[str, Arrays]) -> Arrays:
    """Return the parameters by full name."""
    return {f"{layer}.{name}": a for layer, one in model.items() for name, a in one.items()}


def trained(params: Arrays) -> list[str]:
    return [name for name in params if name not in FROZEN]


def gradients(params: Arrays, rank: int, step: int, whole: bool = False) -> Arrays:
    """Return what ``rank`` brings to a step; ``whole`` numbers add up exactly in any order."""
    rng = np.random.default_rng([rank, step])
    found = {}
    for name in trained(params):
        value = params[name]
        given: Any = (
            rng.integers(-8, 9, value.shape) if whole else rng.standard_normal(value.shape)
        )
        if value.dtype.kind == "c":
            given = given + 1j * np.flip(given)
        found[name] = np.asarray(given).astype(value.dtype)
    return found


def parts(value: Array) -> Array:
    """Return a dense copy of the parts of an array, one-dimensional."""
    dense = np.array(value, order="C").reshape(-1)
    return dense.view(value.dtype.char.lower()) if value.dtype.kind == "c" else dense


def mean(given: list[Array], wire: str | None = None) -> Array:
    """Return the mean from left to right; that of 16-bit floats in float32, rounded once."""
    dtype = given[0].dtype
    half = dtype in HALVES
    total = parts(given[0]).astype(np.float32) if half else parts(given[0])
    for one in given[1:]:
        total = total + parts(one).astype(total.dtype)
    result = total / total.dtype.type(len(given))
    return result.astype(dtype) if half and wire is None else result


class Alone:
    """The training in one process: whole arrays, one after another, no communication."""

    def __init__(self, params: Arrays, optimizer: FlatOptimizer) -> None:
        self.params = {name: np.array(value, order="C") for name, value in params.items()}
        self.optimizer = optimizer
        self.steps = 0
        self.work: Arrays = {}
        self.state: dict[str, Arrays] = {}
        for name in trained(params):
            work = parts(params[name])
            self.work[name] = work.astype(np.float32) if work.dtype in HALVES else work
            self.state[name] = {
                slot: np.zeros_like(self.work[name]) for slot in self.optimizer.slots
            }

    def step(self, means: Arrays, factor: float = 1.0) -> None:
        """Update by the mean gradients; ``means`` as `mean` returns them."""
        self.steps += 1
        for name, work in self.work.items():
            gradient = means[name].astype(work.dtype)
            if factor != 1:
                gradient *= factor
            self.optimizer.update(work, gradient, self.state[name], self.steps)
            value = self.params[name]
            value[...] = work.astype(parts(value).dtype).view(value.dtype).reshape(value.shape)


def means(params: Arrays, size: int, step: int, whole: bool = False) -> Arrays:
    """Return the mean gradients of ``size`` ranks."""
    given = [gradients(params, rank, step, whole) for rank in range(size)]
    return {name: mean([one[name] for one in given]) for name in trained(params)}


def same(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Raise AssertionError unless all arrays have the same dtype, shape and bits."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert np.array(actual[name], order="C").tobytes() == value.tobytes(), name

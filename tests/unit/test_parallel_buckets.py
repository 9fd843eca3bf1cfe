"""How parameters are laid out in buckets, and the names of mpicoll.parallel; without MPI."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import mpicoll.parallel
from mpicoll.parallel.buckets import Bucket, layout
from mpicoll.parallel.library import squares


def params(*forms: tuple[int, type]) -> dict[str, np.ndarray]:
    """Return parameters a, b, c, … of some lengths and dtypes."""
    return {chr(97 + at): np.zeros(size, dtype) for at, (size, dtype) in enumerate(forms)}


@pytest.mark.parametrize(
    ("forms", "limit", "expected"),
    [
        ([], 64, []),
        ([(4, np.float32)] * 4, 1 << 20, [["d", "c", "b", "a"]]),
        ([(4, np.float32)] * 4, 32, [["d", "c"], ["b", "a"]]),
        ([(4, np.float32)] * 4, 31, [["d"], ["c"], ["b"], ["a"]]),
        # One that is larger than a bucket has its own
        ([(4, np.float32), (99, np.float32), (4, np.float32)], 32, [["c"], ["b"], ["a"]]),
        # No bucket mixes dtypes; its turn comes with its last parameter
        (
            [(1, np.float32), (1, np.float64), (1, np.float32), (1, np.float64)],
            64,
            [["d", "b"], ["c", "a"]],
        ),
        (
            [(1, np.float64), (1, np.float32), (1, np.float32), (1, np.float64)],
            64,
            [["c", "b"], ["d", "a"]],
        ),
        # Without elements
        ([(0, np.float32), (0, np.float32)], 1, [["b", "a"]]),
        ([(0, np.float32), (9, np.float32), (0, np.float32)], 1, [["c"], ["b"], ["a"]]),
    ],
)
def test_layout(forms: list[tuple[int, type]], limit: int, expected: list[list[str]]) -> None:
    assert layout(params(*forms), limit) == expected


def test_squares_and_scale_of_all_dtypes() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, "g", "F", "D", "G"):
        bucket = Bucket(["a"], {"a": np.zeros(3, dtype)}, None)
        bucket.slots[0].view[...] = [3, -4, 12]
        assert squares(bucket.flat[0:3]) == 169
        assert squares(bucket.flat[1:2]) == 16
        bucket.scale(0.5)
        assert bucket.flat.tolist() == [1.5, -2, 6]


def test_squares_of_many_elements() -> None:
    bucket = Bucket(["a"], {"a": np.zeros(40_000, np.float32)}, None)
    bucket.flat[...] = 2
    assert squares(bucket.flat[0:40_000]) == 160_000


def test_names_are_loaded_when_used() -> None:
    program = """
import sys
import mpicoll.parallel
assert "mpi4py" not in sys.modules
assert set(mpicoll.parallel.__all__) <= set(dir(mpicoll.parallel))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'mpicoll\.parallel' has no attribute 'nothing'"):
        _ = mpicoll.parallel.nothing

"""Samples and labels: read on rank 0, sent to all, one fifth held out."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpicoll
from mpicoll.parallel import broadcast_object
from training.console import on_root

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Data(NamedTuple):
    """Samples, one per row, and their labels; the last fifth of a fixed shuffle is held out."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array
    digest: str

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(max(self.y.max(), self.y_test.max())) + 1


def share(comm: mpicoll.Comm, rows: Array) -> Array:
    """Return this rank's part of the rows: sizes differ by one at most, and may be zero."""
    bounds = [len(rows) * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
    return rows[bounds[0] : bounds[1]]


def broadcast(comm: mpicoll.Comm, array: Array | None) -> Array:
    """Return rank 0's array on every rank."""
    shape, dtype = broadcast_object(
        None if array is None else (array.shape, array.dtype), comm
    ) or (
        (0,),
        np.dtype(float),
    )
    if array is None:
        array = np.empty(shape, dtype)
    comm.Bcast(array, root=0)
    return array


def read_npz(path: Path, names: set[str]) -> dict[str, Array]:
    """Return what an .npz file holds; it must be sound and have the named arrays."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{path} is not an .npz file, or a damaged one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as caught:
        raise ValueError(f"{path} cannot be read: {caught}") from caught
    if not names <= arrays.keys():
        raise ValueError(f"{path} must hold {sorted(names)}, it has {sorted(arrays)}")
    return arrays


def read_samples(path: Path | None) -> tuple[Array, Array]:
    """Return samples and labels: those of a file, or the digits that scikit-learn brings."""
    if path is None:
        if not importlib.util.find_spec("sklearn"):
            raise ImportError(
                "the digits come with scikit-learn, which is not installed: "
                "pip install scikit-learn, or give --data FILE.npz"
            )
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.ascontiguousarray(digits.data), digits.target
    arrays = read_npz(path, {"x", "y"})
    x, y = arrays["x"], arrays["y"]
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: x must be numbers and y integers, not {x.dtype} and {y.dtype}")
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or len(x) < 5 or x.size == 0:
        raise ValueError(f"{path}: x and y must be 5 samples or more, not {x.shape}, {y.shape}")
    if not np.isfinite(x).all() or set(y.tolist()) != set(range(y.max() + 1)):
        raise ValueError(f"{path}: x must be finite, and y labels 0, 1, ... without a gap")
    return x.reshape(len(x), -1), y


def load_data(comm: mpicoll.Comm, path: Path | None, dtype: str) -> Data:
    """Read the samples on rank 0 and share them; the split is the same whatever the seed."""
    samples = on_root(comm, lambda: read_samples(path))
    x, y = (broadcast(comm, array) for array in samples or (None, None))
    digest = hashlib.sha256(repr((x.shape, x.dtype.str)).encode() + x.tobytes() + y.tobytes())
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [len(x) - len(x) // 5])
    x = (x / max(np.abs(x[train]).max(), 1e-12)).astype(dtype)
    y = y.astype(np.int64)
    return Data(x[train], y[train], x[test], y[test], digest.hexdigest()[:16])

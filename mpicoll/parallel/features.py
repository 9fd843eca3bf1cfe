"""Features of all ranks on every rank, as contrastive losses need them, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.library import EXPECTED, Array, dense, is_array, library, place
from mpicoll.schedule.partition import offsets


@dataclass(frozen=True, slots=True, eq=False)
class GatheredFeatures:
    """The rows of all ranks in rank order, how many are from each, and which are this rank's."""

    features: Array
    counts: tuple[int, ...]
    own: slice
    comm: Comm

    def backward(self, grad: Array) -> Array:
        """Return the gradient of this rank's rows, summed over the losses of all ranks.

        ``grad`` is the gradient of this rank's loss by ``features``: same shape, dtype and
        place. The total loss is the sum of all ranks' losses; where it is their mean, divide.
        Collective: one reduce-scatter with the counts of the forward pass.

        Raises ValueError, before anything is sent, on the rank whose ``grad`` does not fit; the
        others wait for it.
        """
        whole = self.features
        actual, expected = _form(grad), _form(whole)
        if actual != expected:
            raise ValueError(
                f"backward on rank {self.comm.rank}: grad is of shape {actual}; expected "
                f"{expected}, as the gathered features"
            )
        width = prod(whole.shape[1:])
        result: Array = library(whole).empty(
            (self.counts[self.comm.rank], *whole.shape[1:]), whole.dtype
        )
        self.comm.Reduce_scatter(dense(grad), result, [count * width for count in self.counts])
        return result


def gather_features(x: Array, comm: MPI.Intracomm | None = None) -> GatheredFeatures:
    """Return the rows of all ranks, in rank order, on every rank.

    ``x`` has shape ``(n, ...)``: n may differ between ranks and be zero, the rest and the
    dtype (floating or complex) may not. NumPy's or CuPy's, each rank as it likes; the result is
    where this rank's rows are. Collective: an allgather of 24 bytes per rank for the
    counts, then one of the rows. Raises ValueError on every rank if they differ or are wrong.
    """
    given = wrapped(comm)
    problem = _problem(x)
    entries, own = ([], 0) if problem else ([f"rows of {x.shape[1:]} {x.dtype}"], len(x))
    counts = agree(given, "gather_features", entries, own, problem)
    bounds = offsets(counts)
    features: Array = library(x).empty((bounds[-1], *x.shape[1:]), x.dtype)
    width = prod(x.shape[1:])
    given.Allgatherv(dense(x), [features, [count * width for count in counts]])
    return GatheredFeatures(
        features, counts, slice(bounds[given.rank], bounds[given.rank + 1]), given
    )


def _form(array: object) -> str:
    if not is_array(array):
        return f"{np.shape(cast(Any, array))} and type {type(array).__name__}"
    return f"{array.shape} and dtype {array.dtype} on {place(array)}"


def _problem(x: object) -> str | None:
    """Say what is wrong with features; the other ranks have to hear of it."""
    if not is_array(x):
        return f"features of type {type(x).__name__}; expected {EXPECTED}"
    if x.ndim == 0:
        return "features without rows; expected an array of shape (rows, ...)"
    if not (x.dtype.kind in "fc" or x.dtype == ml_dtypes.bfloat16) or not x.dtype.isnative:
        return f"features of dtype {x.dtype}; expected a floating or complex type"
    return None

"""Figures of a batch or an epoch, averaged over ranks that saw different numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

import numpy as np
from mpi4py import MPI

from mpicoll.parallel.agreement import agree, wrapped


def average_metrics(
    metrics: Mapping[str, SupportsFloat],
    weight: SupportsFloat = 1.0,
    comm: MPI.Intracomm | None = None,
    *,
    root: int = 0,
) -> dict[str, float] | None:
    """Return the weighted means of the ranks' metrics on the root, None elsewhere.

    ``weight`` is usually how many samples a rank's metrics are over. A rank of weight 0 counts for
    nothing, whatever its metrics are, NaN included; without any weight the means are NaN.
    Collective: the names are compared by an allgather of 24 bytes per rank; then one reduce of
    one float64 per metric and one more, in rank order, so the same bits every run.

    Numbers may be arrays of one element on either side; each one of a device is waited for.

    Raises ValueError on every rank if the names or their order differ, or a weight is negative or
    not finite.
    """
    given = wrapped(comm)
    entries, share, values, problem = [f"root={root}"], 0.0, [0.0], None
    try:
        share, values = _numbers(metrics, weight)
        entries += [f"metric {name!r}" for name in metrics]
    except ValueError as error:
        problem = str(error)
    agree(given, "average_metrics", entries, problem=problem)
    with np.errstate(all="ignore"):
        sums = np.array([1.0, *values]) * share if share else np.zeros(1 + len(values))
    totals = np.empty_like(sums) if given.rank == root else None
    given.Reduce(sums, totals, MPI.SUM, root, order="rank")
    if totals is None:
        return None
    if not totals[0]:
        return dict.fromkeys(metrics, math.nan)
    return dict(zip(metrics, (totals[1:] / totals[0]).tolist(), strict=True))


def _numbers(metrics: object, weight: object) -> tuple[float, list[float]]:
    """Return arguments, of whatever type, as numbers; each is read once."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics of type {type(metrics).__name__}; expected numbers by name")
    share = _number("weight", weight)
    if not (share >= 0 and math.isfinite(share)):
        raise ValueError(f"weight {share}; expected a finite number, 0 or more")
    return share, [_number(name, value) for name, value in metrics.items()]


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        words = f"{name!r} of type {type(value).__name__}; expected a number"
        if not isinstance(error, TypeError | ValueError):  # of the device, say
            words += f", got {type(error).__name__}: {error}"
        raise ValueError(words) from error

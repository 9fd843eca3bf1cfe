"""Figures of a batch or an epoch, averaged over ranks that saw different numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import SupportsFloat

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

    Raises ValueError on every rank if the names or their order differ, or a weight is negative or
    not finite.
    """
    given = wrapped(comm)
    problem = _problem(metrics, weight)
    entries = [] if problem else [f"root={root}", *(f"metric {name!r}" for name in metrics)]
    agree(given, "average_metrics", entries, problem=problem)
    share = float(weight)
    values = [float(value) for value in metrics.values()]
    with np.errstate(all="ignore"):
        sums = np.array([1.0, *values]) * share if share else np.zeros(1 + len(values))
    totals = np.empty_like(sums) if given.rank == root else None
    given.Reduce(sums, totals, MPI.SUM, root, order="rank")
    if totals is None:
        return None
    if not totals[0]:
        return dict.fromkeys(metrics, math.nan)
    return dict(zip(metrics, (totals[1:] / totals[0]).tolist(), strict=True))


def _problem(metrics: object, weight: object) -> str | None:
    """Say what is wrong with arguments, of whatever type: the other ranks have to hear of it."""
    if not isinstance(metrics, Mapping):
        return f"metrics of type {type(metrics).__name__}; expected numbers by name"
    for name, value in [("weight", weight), *metrics.items()]:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"{name!r} of type {type(value).__name__}; expected a number"
        if name == "weight" and value is weight and not (number >= 0 and math.isfinite(number)):
            return f"weight {number}; expected a finite number, 0 or more"
    return None

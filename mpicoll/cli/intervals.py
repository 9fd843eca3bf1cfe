"""Intervals of time: what two lists share, how long, and side by side without overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the parts that two sorted lists of intervals share."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low < high:
            found.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not touch."""
    found: list[list[float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


def length(intervals: Iterable[Interval]) -> float:
    """Return how long intervals that do not overlap are together."""
    return sum(end - start for start, end in intervals)


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each of some intervals, sorted by start, so that none overlap."""
    ends: list[float] = []
    found = []
    for start, end in spans:
        lane = next((n for n, until in enumerate(ends) if until <= start), len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        found.append(lane)
    return found

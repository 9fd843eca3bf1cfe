"""A plan: a schedule bound to the buffers of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.runtime.executor import Bytes, Program, Reduction
from mpicoll.runtime.staging import Lane

EMPTY: Bytes = np.empty(0, np.uint8)


@dataclass(slots=True)
class Plan:
    """What runs for a call.

    ``source`` and ``target`` are input and output as dense bytes; ``alias`` is the byte of
    ``target`` where ``source`` begins when they share memory. ``loads`` have to be done
    before a run, ``finishes`` after it; None among them is nothing to do.

    ``operator``, ``dtype``, ``count`` (items of this rank's input, or output), ``counts``,
    ``root`` and ``segment_bytes`` describe the call; ``counts`` are those that all ranks
    must pass alike, () where there are none. ``lane`` is there when a buffer is on a device.
    ``pairs`` are the bytes sent to and expected of each rank, where ranks know those for
    themselves only and a checked call compares them.
    """

    algorithm: Algorithm
    program: Program
    tag: int
    source: Bytes
    target: Bytes
    reduction: Reduction | None = None
    alias: int | None = None
    loads: tuple[Callable[[], None] | None, ...] = ()
    finishes: tuple[Callable[[], None] | None, ...] = ()
    operator: str = ""
    dtype: str = ""
    count: int = 0
    counts: tuple[int, ...] = ()
    root: int = -1
    segment_bytes: int = 0
    lane: Lane | None = None
    pairs: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def load(self) -> None:
        """Bring the input to where the schedule reads it."""
        for load in self.loads:
            if load is not None:
                load()

    def finish(self) -> None:
        """Bring the output to where the caller wants it."""
        for finish in self.finishes:
            if finish is not None:
                finish()

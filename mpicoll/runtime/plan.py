"""A plan: a schedule bound to the buffers of one call.

What does not depend on the buffers is a `Recipe`, which equal calls share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.runtime.executor import Bytes, Program, Reduction, compiled
from mpicoll.runtime.record import Record
from mpicoll.runtime.staging import Lane
from mpicoll.runtime.tags import code_of
from mpicoll.schedule.contracts import ROOTED
from mpicoll.schedule.ir import Call

EMPTY: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The compiled schedule of a call, and what it was made of.

    ``code`` tells messages of such calls from most others, in their tags. ``root`` is -1
    where the collective has none.
    """

    algorithm: Algorithm
    program: Program
    code: int = 0
    counts: tuple[int, ...] = ()
    root: int = -1
    segment_bytes: int = 0


@lru_cache(maxsize=128)  # a program of 1000 ranks may have half a megabyte
def recipe(
    algorithm: Algorithm,
    segment_bytes: int,
    rank: int,
    size: int,
    counts: tuple[int, ...],
    root: int = 0,
    item_bytes: int = 1,
    label: str = "",
    recv_counts: tuple[int, ...] = (),
    radix: int = 2,
    transit: tuple[tuple[int, ...], ...] = (),
) -> Recipe:
    """Build and compile a schedule, or return that of an equal earlier call.

    ``counts`` are items of ``item_bytes``; the rest is as in `Call`. ``label`` tells
    operators apart. Arguments one by one, since a `Call` takes longer to make and to compare
    than a small collective may take.
    """
    # A segment below one item is one item.
    segment = max(1, segment_bytes // max(1, item_bytes)) if segment_bytes else 0
    call = Call(rank, size, counts, root, segment, recv_counts, radix, transit)
    return Recipe(
        algorithm,
        compiled(algorithm.build(call), item_bytes),
        code_of(algorithm.collective, algorithm.name, root, segment, label),
        counts,
        root if algorithm.collective in ROOTED else -1,
        segment_bytes,
    )


@dataclass(slots=True)
class Plan:
    """What runs for a call.

    ``source`` and ``target`` are input and output as dense bytes; ``alias`` is the byte of
    ``target`` where ``source`` begins when they share memory. ``loads`` have to be done
    before a run, ``finishes`` after it; None among them is nothing to do.

    ``dtype`` and ``count`` (items of this rank's input, or output) describe the call.
    ``lane`` is there when a buffer is on a device. ``pairs`` are the bytes sent to and
    expected of each rank, where ranks know those for themselves only and a checked call
    compares them in place of the counts.
    """

    recipe: Recipe
    tag: int
    source: Bytes
    target: Bytes
    reduction: Reduction | None = None
    alias: int | None = None
    loads: tuple[Callable[[], None] | None, ...] = ()
    finishes: tuple[Callable[[], None] | None, ...] = ()
    dtype: str = ""
    count: int = 0
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

    def describe(self, record: Record) -> None:
        """Put into the record of a call what is known of it now."""
        recipe = self.recipe
        record.algorithm = recipe.algorithm.name
        record.root = recipe.root
        record.dtype = self.dtype
        record.count = self.count
        record.nbytes = self.source.size or self.target.size
        if self.reduction is not None:
            record.operator = self.reduction.operator

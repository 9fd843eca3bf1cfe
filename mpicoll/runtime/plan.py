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

#: What the recipes that are kept may weigh together, each by `_weight`: some 50 MB.
KEPT = 1 << 18
_kept = 0


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


@lru_cache(maxsize=128)
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

    A program of 4096 ranks may have 7 MB, and calls with counts of their own each have
    another one: what is kept is thrown away when it weighs too much.
    """
    global _kept
    # A segment below one item is one item.
    segment = max(1, segment_bytes // max(1, item_bytes)) if segment_bytes else 0
    call = Call(rank, size, counts, root, segment, recv_counts, radix, transit)
    program = compiled(algorithm.build(call), item_bytes)
    numbers = len(counts) + len(recv_counts) + sum(map(len, transit))
    weight = _weight(program) + numbers // 4  # which has a quarter of the bytes of an operation
    _kept += weight
    if _kept > KEPT:
        recipe.cache_clear()
        _kept = weight
    return Recipe(
        algorithm,
        program,
        code_of(algorithm.collective, algorithm.name, root, segment, label),
        counts,
        root if algorithm.collective in ROOTED else -1,
        segment_bytes,
    )


def _weight(program: Program) -> int:
    """Return the number of operations of a program, each of which has some 200 bytes."""
    weight = len(program.stages)
    for recvs, sends, local, _ in program.stages:
        weight += len(recvs) + len(sends) + sum([len(work.sources) for work in local])
    return weight


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

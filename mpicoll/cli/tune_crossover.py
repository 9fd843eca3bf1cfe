"""Up to how many bytes a call on device memory is faster through the host. Loads mpi4py.

Which way a rank's part of a call goes is its own choice: the messages are the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import log2
from typing import Any, TypeAlias

import numpy as np

from mpicoll.cli import timing
from mpicoll.cli.bench_rivals import afterwards
from mpicoll.cli.cases import Case, Shape, even
from mpicoll.cli.memory import Memory
from mpicoll.cli.timing import Contender, Measured, Times
from mpicoll.cli.world import native
from mpicoll.comm import Comm
from mpicoll.runtime import staging
from mpicoll.runtime.link import attach
from mpicoll.selection.table import LARGEST, Crossover, Table

#: Bytes of a call's buffers on one rank, those it sends and those it receives together.
SIZES = tuple(1 << k for k in range(9, 23))

#: What is called: with folds and without, from one rank to all and from each to each.
PROBES = ("allreduce", "allgather", "alltoall", "bcast")

DOUBLE = np.dtype(np.float64)
STAGED, POINTERS, AGAIN = "staged", "pointers", "pointers again"

Row: TypeAlias = dict[str, Any]


def with_crossover(comm: Comm, nbytes: int | None, stack: ExitStack) -> Comm:
    """Return a duplicate for device memory, which ``stack`` frees; collective.

    With a number, calls of at most so many bytes on a rank go through the host and others by
    device pointers; with None it goes the ways that ``comm`` goes.
    """
    settings = replace(attach(comm).settings, memory="device")
    if nbytes is not None:
        table = settings.tuning or Table(())
        table = replace(table, crossovers=(Crossover(comm.size, nbytes),))
        settings = replace(settings, tuning=table, cuda_aware=True)
    made = native(comm).Dup()
    attach(made, settings)
    wrapped = Comm(made)
    afterwards(stack, wrapped.Free)
    return wrapped


def measure(comm: Comm, memory: Memory, seconds: float) -> list[Row]:
    """Time both ways by turns; return a row per size, equal on all ranks.

    Each size has ``seconds``, shared by the probes.
    """
    with ExitStack() as stack:
        ways = {
            STAGED: with_crossover(comm, LARGEST, stack),
            POINTERS: with_crossover(comm, 0, stack),
        }
        ways[AGAIN] = ways[POINTERS]
        # Shorter ones have no item for every rank.
        sizes = [nbytes for nbytes in SIZES if nbytes >= 2 * DOUBLE.itemsize * comm.size]
        return [_row(ways, nbytes, memory, seconds) for nbytes in sizes]


def boundary(rows: Sequence[Row]) -> int:
    """Return the bytes of the largest call that goes through the host.

    It is the size that the fewest verdicts contradict, so that one which was disturbed, at
    whatever size, moves nothing. Of several the one nearest to what stands without a table:
    where times do not differ beyond the noise, nothing changes.
    """
    verdicts = [row["verdict"] for row in rows]

    def contradicted(count: int) -> int:
        return verdicts[:count].count("slower") + verdicts[count:].count("faster")

    def moved(count: int) -> float:
        here = rows[count - 1]["bytes"] if count else 1
        return abs(log2(here) - log2(max(1, staging.SMALL_BYTES)))

    best = min(range(len(rows) + 1), key=lambda count: (contradicted(count), moved(count)))
    return int(rows[best - 1]["bytes"]) if best else 0


def _row(ways: dict[str, Comm], nbytes: int, memory: Memory, seconds: float) -> Row:
    """Race both ways, and pointers against themselves, on calls of one size."""
    world = native(ways[STAGED])
    contenders = [
        _contender(comm, way, case)
        for case in [Case(world, _shape(name, world.size, nbytes), memory) for name in PROBES]
        for way, comm in ways.items()
    ]
    measured = timing.race(world, contenders, seconds, 1000, memory)
    faults = {one.name: one.fault for one in measured if one.fault}
    row: Row = {"bytes": nbytes, "rounds": int(measured[0].seconds.size), "faults": faults}
    staged, pointers, again = (_together(measured, way) for way in ways)
    for way, times in ((STAGED, staged), (POINTERS, pointers)):
        wrong = any(name.startswith(f"{way}, ") for name in faults)
        row[f"{way}_seconds"] = None if wrong else float(np.median(times))
    if faults:  # a time of wrong data is compared with none
        return row | {"ratio": None, "interval": None, "verdict": None}
    interval = timing.spread_of_median(staged, pointers)
    noise = timing.spread_of_median(again, pointers)
    return row | {
        "ratio": timing.ratio(staged, pointers)["median"],
        "interval": interval,
        "verdict": timing.verdict(interval, noise),
    }


def _contender(comm: Comm, way: str, case: Case) -> Contender:
    name = f"{way}, {case.shape.collective}"
    return Contender(name, case.bound(comm), case.poison, case.wrong)


def _together(measured: Sequence[Measured], way: str) -> Times:
    """Return by round the geometric mean of the probes' times, in which each weighs the same."""
    times = [one.seconds for one in measured if one.name.startswith(f"{way}, ")]
    middle: Times = np.exp(np.mean(np.log(times), axis=0))
    return middle


def _shape(name: str, size: int, nbytes: int) -> Shape:
    """Return a call whose buffers have about ``nbytes`` on each rank, and not more."""
    both = {"bcast": nbytes, "allgather": nbytes * size // (size + 1)}
    return even(name, size, both.get(name, nbytes // 2), DOUBLE)

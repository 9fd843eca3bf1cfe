"""The race of all candidates for one collective and size. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from mpicoll.algorithms import find, names, parse_name
from mpicoll.cli import timing
from mpicoll.cli.cases import Case, Shape, even
from mpicoll.cli.common import human_bytes
from mpicoll.cli.memory import HOST, Memory
from mpicoll.cli.timing import Contender, Measured
from mpicoll.cli.world import native
from mpicoll.comm import Comm
from mpicoll.selection.choose import Wanted, automatic, unfit
from mpicoll.selection.model import KIB, Rates
from mpicoll.selection.table import LARGEST, Entry, Ranked

SEGMENTS = (0, 64 * KIB, 256 * KIB, 1024 * KIB)  #: of pipelines; those below the vector's size
RADICES = (4, 8)  #: of Bruck's all-to-all, beside 2; those below the number of ranks
HEATS = 5  #: rounds in which all take part
SLOW = 2.0  #: times the fastest; who is slower in the heats is out


class Candidate(NamedTuple):
    """An algorithm, a radix maybe behind its name, and the segment in bytes."""

    algorithm: str
    segment: int

    @property
    def label(self) -> str:
        """What is shown."""
        return self.algorithm + (f" {human_bytes(self.segment)}" if self.segment else "")


def shapes(collective: str, size: int, sizes: Sequence[int]) -> list[Shape]:
    """Return what is timed; sizes that blocks of equal length make the same are one."""
    wanted = (0,) if collective == "barrier" else sizes
    made = (even(collective, size, nbytes, np.dtype(np.float64)) for nbytes in wanted)
    return list(dict.fromkeys(made))


def candidates(collective: str, size: int, nbytes: int, default: Candidate) -> list[Candidate]:
    """Return what takes part, the default first."""
    found = [default]
    for name in names(collective):
        algorithm = find(collective, name)
        if unfit(algorithm, Wanted(collective, size)):
            continue
        cuts = [cut for cut in SEGMENTS if cut < nbytes] if algorithm.segmented else []
        found += [Candidate(name, cut) for cut in cuts or [0]]
        if (collective, name) == ("alltoall", "bruck"):
            found += [Candidate(f"{name}:{radix}", 0) for radix in RADICES if radix < size]
    return list(dict.fromkeys(found))


def measure(
    comm: Comm, shape: Shape, seconds: float, rates: Rates, memory: Memory = HOST
) -> dict[str, Any]:
    """Time all candidates by turns; return a row, equal on all ranks.

    After some rounds those that are much slower than the fastest are out.
    """
    choice = automatic(Wanted(shape.collective, comm.size, _bytes(shape)), None, rates)
    default = Candidate(choice.algorithm.name, choice.segment_bytes)
    running = candidates(shape.collective, comm.size, _bytes(shape), default)
    case = Case(comm, shape, memory)
    contenders = {one.label: _contender(case, comm, one) for one in running}
    heats = timing.race(native(comm), list(contenders.values()), 0.0, HEATS, memory)
    limit = SLOW * min(_median(one) for one in heats)
    by_label = {one.name: one for one in heats}
    kept = [one for one in running if one == default or _median(by_label[one.label]) <= limit]
    finals = timing.race(
        native(comm), [contenders[one.label] for one in kept], 0.8 * seconds, 1000, memory
    )
    by_label |= {one.name: one for one in finals}
    faults = {one.name: one.fault for one in (*heats, *finals) if one.fault}
    return _row(comm.size, shape, running, by_label, kept, faults)


def _row(
    size: int,
    shape: Shape,
    running: Sequence[Candidate],
    measured: dict[str, Measured],
    kept: Sequence[Candidate],
    faults: dict[str, str],
) -> dict[str, Any]:
    default = running[0]
    right = [one for one in kept if one.label not in faults]
    chosen = best = min(right, key=lambda one: _median(measured[one.label]), default=None)
    base = measured[default.label].seconds
    gain: float | None = None
    interval: tuple[float, float] | None = None
    if best is not None and default in right:  # a time of wrong data is compared with none
        fastest = measured[best.label].seconds
        gain = timing.ratio(base, fastest)["median"]
        interval = timing.spread_of_median(base, fastest)
        if interval[0] <= 1.0:
            chosen, gain, interval = default, 1.0, (1.0, 1.0)
    order = sorted(
        (one for one in running if one.label not in faults),
        key=lambda one: (one != chosen, one not in kept, _median(measured[one.label])),
    )

    def median(one: Candidate | None) -> float | None:
        return None if one not in right else _median(measured[one.label])

    return {
        "collective": shape.collective,
        "ranks": size,
        "bytes": _bytes(shape),
        "default": default.label,
        "default_seconds": median(default),
        "best": None if chosen is None else chosen.label,
        "best_seconds": median(chosen),
        "fastest_seconds": median(best),
        "gain": gain,
        "interval": interval,
        "rounds": int(base.size),
        "ranked": [
            {
                "algorithm": one.algorithm,
                "segment": one.segment,
                "seconds": _median(measured[one.label]),
            }
            for one in order
        ],
        "faults": faults,
    }


def entries_of(rows: Sequence[dict[str, Any]], memory: str) -> list[Entry]:
    """Return the entries of one collective's rows, by growing size.

    A range ends at the geometric mean of two sizes. The first begins at 0; the last ends as
    far above its size as it begins below it: the table says nothing of sizes far beyond.
    """
    sizes = [row["bytes"] for row in rows]
    bounds = [0, *(isqrt(a * b) + 1 for a, b in pairwise(sizes))]
    last = LARGEST
    if sizes[-1] > 0:
        last = sizes[-1] ** 2 // bounds[-1] if bounds[-1] else 4 * sizes[-1]
    highs = [bound - 1 for bound in bounds[1:]] + [last]
    entries = []
    for row, low, high in zip(rows, bounds, highs, strict=True):
        ranked = tuple(
            Ranked(one["algorithm"], one["segment"], one["seconds"]) for one in row["ranked"]
        )
        if ranked:
            key = row["collective"], row["ranks"], memory
            entries.append(Entry(*key, low, high, ranked))
    return entries


def _bytes(shape: Shape) -> int:
    return 0 if shape.collective == "barrier" else shape.nbytes


def _median(one: Measured) -> float:
    return float(np.median(one.seconds))


def _contender(case: Case, comm: Comm, one: Candidate) -> Contender:
    keywords: dict[str, Any] = {"algorithm": one.algorithm}
    if parse_name(case.shape.collective, one.algorithm)[0].segmented:
        keywords["segment"] = one.segment
    return Contender(one.label, case.bound(comm, **keywords), case.poison, case.wrong)

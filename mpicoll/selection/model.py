"""The cost model: what a machine takes, and the algorithm that should be done first.

Time is linear: α for a step and for a message, β for a byte on the wire, γ for a byte that
is reduced or copied. What is multiplied with them comes from `profiles`. The rates are equal
on all ranks, so what is derived from them is, too (law 1).

One α and one β for all leave some algorithms out by a factor of two: E. Nuriyev, A. Lastovetsky,
"A New Model-Based Approach to Performance Comparison of MPI Collective Algorithms", 2021,
measure them for each algorithm. `Corrections` does so at a few sizes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import NamedTuple, TypeAlias

from mpicoll.algorithms import Algorithm
from mpicoll.schedule.partition import pieces
from mpicoll.selection.profiles import profile

KIB = 1024

#: Segments that are tried, in bytes; 0 leaves blocks whole.
SEGMENTS = (0, 64 * KIB, 256 * KIB, 1024 * KIB)

#: Factors by bytes, growing; one is measured at a few sizes.
Curve: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """What algorithms took, divided by what the rates alone predict.

    ``curves`` are by collective and algorithm, then by the bytes of a segment, 0 where blocks
    are whole. They hold for ``kind`` ranks, which is a power of two, and fewer, down to half
    of it: schedules of other numbers are others.
    """

    curves: Mapping[tuple[str, str], Mapping[int, Curve]]
    kind: int

    def factor(
        self, collective: str, algorithm: str, size: int, segment: int, nbytes: int
    ) -> float:
        """Return the factor of a call, 1 if it is unknown.

        That of the nearest segment; between two sizes linear in their logarithms. Only
        operations that are rounded alike everywhere lead to it, as all ranks must agree.
        """
        cuts = self.curves.get((collective, algorithm))
        if not cuts or kind(size) != self.kind:
            return 1.0
        known = [cut for cut in cuts if cut] if segment else [0]
        known = [cut for cut in known or [0] if cut in cuts]
        if not known:
            return 1.0
        place = _log2(segment + 1)
        curve = cuts[min(known, key=lambda cut: abs(_log2(cut + 1) - place))]
        at = bisect(curve, nbytes, key=lambda point: point[0])
        if at in (0, len(curve)):
            return curve[max(0, at - 1)][1]
        (low, first), (high, last) = curve[at - 1], curve[at]
        start = _log2(low + 1)
        share = (_log2(nbytes + 1) - start) / (_log2(high + 1) - start)
        return first + share * (last - first)


def _log2(number: int) -> float:
    """Return the logarithm, linear between powers of two: C's may differ between hosts."""
    shift = number.bit_length() - 1
    return shift + (number / (1 << shift) - 1)


def kind(size: int) -> int:
    """Return the number of ranks that measurements are kept under: a power of two."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Rates:
    """What things take on a machine with an MPI, in seconds.

    ``step`` for a step that waits for a message: latency, waking up, Python's part;
    ``message`` for every message of the busier direction, ``byte`` for each of its bytes;
    ``local`` for each byte that is reduced or copied. ``load`` is how many ranks share a
    core; 1 where each has its own. ``corrections`` are what single algorithms took instead.
    """

    step: float = 12e-6
    message: float = 6e-6
    byte: float = 0.12e-9
    local: float = 0.12e-9
    load: float = 1.0
    corrections: Corrections | None = None


#: Where nothing was measured, on a node with a core for each rank.
DEFAULT = Rates()
#: Where ranks share cores and nothing was measured: a rank that waits has to be woken up.
CROWDED = Rates(step=20e-6, message=10e-6, byte=0.17e-9, local=0.12e-9)


class Counts(NamedTuple):
    """What the rates are multiplied with; bytes and local work in vectors."""

    steps: float
    messages: float
    sent: float
    local: float


@lru_cache(maxsize=4096)
def counts(collective: str, name: str, size: int, segments: int) -> tuple[Counts, Counts]:
    """Return what is done along the longest chain of steps, and by all ranks together.

    A message is counted once: along the chain where it is sent or received, and where it is
    sent in what all ranks do.
    """
    terms = profile(collective, name, size, segments)

    def total(times: list[float], sends: list[float]) -> Counts:
        rows = list(zip(times, sends, terms, strict=True))
        return Counts(
            sum(n for n, _, term in rows if term.messages),
            sum(n * share * term.messages for n, share, term in rows),
            sum(n * share * term.sent for n, share, term in rows),
            sum(n * term.local for n, _, term in rows),
        )

    deep = total([term.deep for term in terms], [1.0] * len(terms))
    return deep, total([term.wide for term in terms], [term.sends for term in terms])


def seconds(
    algorithm: Algorithm, size: int, nbytes: int, segment_bytes: int, rates: Rates
) -> float:
    """Return the predicted time of a call on ``nbytes`` bytes.

    Steps that wait for one another follow each other; the rates are those of a rank that
    shares its core, where it does. The work of all ranks is done by the cores that they have.
    Neither hides the other, nor do they add up: we take the root of the sum of their squares.
    """
    segments = pieces(_cut(algorithm.collective, size, nbytes), segment_bytes)
    segments = segments if algorithm.segmented else 1
    deep, wide = counts(algorithm.collective, algorithm.name, size, segments)
    load = max(1.0, rates.load)
    chain, work = _time(deep, nbytes, rates), _time(wide, nbytes, rates) * load / size
    time = sqrt(chain * chain + work * work)
    if rates.corrections is None:
        return time
    segment = segment_bytes if segments > 1 else 0
    key = algorithm.collective, algorithm.name, size
    return time * rates.corrections.factor(*key, segment, nbytes)


def _cut(collective: str, size: int, nbytes: int) -> int:
    """Return the bytes of what is cut into segments: a block, or the vector."""
    return nbytes // size if collective in ("allreduce", "reduce_scatter") else nbytes


def _time(done: Counts, nbytes: int, rates: Rates) -> float:
    return (
        done.steps * rates.step
        + done.messages * rates.message
        + done.sent * nbytes * rates.byte
        + done.local * nbytes * rates.local
    )


@lru_cache(maxsize=4096)
def best_segment(algorithm: Algorithm, size: int, nbytes: int, rates: Rates) -> int:
    """Return the segment in bytes with the least predicted time; 0 leaves blocks whole."""
    if not algorithm.segmented or size == 1:
        return 0
    whole = _cut(algorithm.collective, size, nbytes)
    tried = [segment for segment in SEGMENTS if segment < whole] or [0]
    return min(tried, key=lambda segment: seconds(algorithm, size, nbytes, segment, rates))


def best(
    candidates: Sequence[Algorithm], size: int, nbytes: int, rates: Rates
) -> tuple[Algorithm, int]:
    """Return the candidate with the least predicted time, and its segment.

    The first of equals wins, equal being within a thousandth.
    """
    found: tuple[float, Algorithm, int] | None = None
    for algorithm in candidates:
        segment = best_segment(algorithm, size, nbytes, rates)
        time = seconds(algorithm, size, nbytes, segment, rates)
        if found is None or time < 0.999 * found[0]:
            found = (time, algorithm, segment)
    if found is None:
        raise ValueError("no candidates")
    return found[1], found[2]


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` cut to its two leading bits, so that few sizes are told apart."""
    shift = max(0, nbytes.bit_length() - 2)
    return nbytes >> shift << shift

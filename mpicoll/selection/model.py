"""The cost model: what a machine takes, and the algorithm that should be done first.

Time is linear: α for a step and for a message, β for a byte on the wire, γ for a byte that
is reduced or copied. What is multiplied with them comes from `profiles`. The rates are equal
on all ranks, so what is derived from them is, too (law 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import hypot, sqrt
from typing import NamedTuple

from mpicoll.algorithms import Algorithm
from mpicoll.schedule.partition import pieces
from mpicoll.selection.profiles import profile

KIB = 1024

#: Segments that are tried, in bytes; 0 leaves blocks whole.
SEGMENTS = (0, 32 * KIB, 128 * KIB, 512 * KIB, 2048 * KIB)


@dataclass(frozen=True, slots=True)
class Rates:
    """What things take on a machine with an MPI, in seconds.

    ``step`` for a step that waits for a message: latency, waking up, Python's part;
    ``message`` for every message of the busier direction, ``byte`` for each of its bytes;
    ``local`` for each byte that is reduced or copied. ``load`` is how many ranks share a
    core; 1 where each has its own.
    """

    step: float = 12e-6
    message: float = 6e-6
    byte: float = 0.12e-9
    local: float = 0.12e-9
    load: float = 1.0


#: Where nothing was measured, on a node with a core for each rank.
DEFAULT = Rates()
#: Where ranks share cores and nothing was measured: a rank that waits has to be woken up.
CROWDED = Rates(step=60e-6, message=25e-6, byte=0.25e-9, local=0.12e-9)


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

    Steps that wait for one another follow each other. A rank that shares its core waits at
    each until the others there had their turn, and while it works it has the core for a
    part of the time: the root of the load fits what was measured. The work of all ranks is
    done by the cores that they have. Neither hides the other, nor do they add up: we take
    the root of the sum of their squares.
    """
    segments = pieces(_cut(algorithm.collective, size, nbytes), segment_bytes)
    deep, wide = counts(
        algorithm.collective, algorithm.name, size, segments if algorithm.segmented else 1
    )
    load = max(1.0, rates.load)
    waiting = deep.steps * rates.step
    working = _time(deep, nbytes, rates) - waiting
    chain = waiting * load + working * sqrt(load)
    return hypot(chain, _time(wide, nbytes, rates) * load / size)


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


def best_segment(algorithm: Algorithm, size: int, nbytes: int, rates: Rates) -> int:
    """Return the segment in bytes with the least predicted time; 0 leaves blocks whole.

    Where ranks share cores nothing is cut: no core is idle that a pipeline could fill, and
    every step more is a turn of all ranks on a core.
    """
    if not algorithm.segmented or size == 1 or rates.load > 1:
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

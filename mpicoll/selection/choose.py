"""The choice of an algorithm, from what is equal on all ranks and nothing else.

Law 1: what is looked at here is the collective, the group's size, the operator's
properties, the bytes of the type signature where the standard makes them equal on all
ranks (None where it does not), and settings that the ranks agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mpicoll.algorithms import Algorithm, find, names, parse_name
from mpicoll.errors import AlgorithmError
from mpicoll.selection.settings import Settings

KIB = 1024
MIB = 1024 * KIB

#: None leaves the order to the algorithm; "rank" wants a left-to-right sum over ranks.
OrderWish: TypeAlias = Literal["rank"] | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call asks for. ``nbytes`` are the bytes of the whole vector on one rank, or
    of all blocks together; None where ranks may differ."""

    collective: str
    size: int
    nbytes: int | None = None
    commutative: bool = True
    wide: bool = False
    uniform: bool = True
    order: OrderWish = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, the most bytes of one segment (0 leaves blocks whole), Bruck's radix."""

    algorithm: Algorithm
    segment_bytes: int = 0
    radix: int = 2


def choose(
    wanted: Wanted,
    settings: Settings,
    algorithm: str | None = None,
    segment_bytes: int | None = None,
) -> Choice:
    """Return what runs: the named algorithm, else that of the settings, else a default.

    Bruck's all-to-all takes a radix behind its name: "bruck:4". A named algorithm that
    cannot serve the call raises AlgorithmError. One that comes from the settings stands
    for the calls it can serve; others get the default.
    """
    if wanted.order not in (None, "rank"):
        raise AlgorithmError(f"order={wanted.order!r}; known: None, 'rank'")
    if segment_bytes is not None and segment_bytes < 0:
        raise AlgorithmError(f"segment={segment_bytes}; expected 0 or more bytes")
    if algorithm is not None:
        chosen, radix = parse_name(wanted.collective, algorithm)
        objection = unfit(chosen, wanted)
        if objection:
            raise AlgorithmError(objection)
    else:
        named = settings.algorithm(wanted.collective)
        chosen, radix = parse_name(wanted.collective, named or default(wanted))
        if named and unfit(chosen, wanted):
            chosen, radix = parse_name(wanted.collective, default(wanted))
    if segment_bytes is None:
        segment_bytes = default_segment(chosen, wanted)
    return Choice(chosen, segment_bytes if chosen.segmented else 0, radix)


def unfit(algorithm: Algorithm, wanted: Wanted) -> str:
    """Return why ``algorithm`` cannot serve the call, or an empty string if it can."""
    name = f"{algorithm.collective} algorithm {algorithm.name!r}"
    if wanted.order == "rank" and algorithm.order != "sequential":
        fitting = _fitting(algorithm.collective, ("sequential",))
        return f"{name} does not sum from left to right over ranks; those that do: {fitting}"
    if not wanted.commutative and algorithm.order == "any":
        fitting = _fitting(algorithm.collective, ("rank", "sequential"))
        return f"{name} reorders operands and the operator does not commute; fit: {fitting}"
    if algorithm.uniform and not wanted.uniform:
        return f"{name} wants equal counts on all ranks"
    return ""


def _fitting(collective: str, orders: tuple[str, ...]) -> str:
    fit = [name for name in names(collective) if find(collective, name).order in orders]
    return ", ".join(fit) or "none"


def default(wanted: Wanted) -> str:
    """Return the name of the automatic choice."""
    if wanted.collective == "allreduce":
        return _allreduce(wanted)
    if wanted.collective == "reduce":
        return _reduce(wanted)
    if wanted.collective == "reduce_scatter":
        return _reduce_scatter(wanted)
    if wanted.collective in ("scan", "exscan"):
        return "direct" if wanted.wide else "recursive_doubling"
    if wanted.collective == "bcast":
        return _bcast(wanted)
    if wanted.collective == "allgather":
        return _allgather(wanted)
    if wanted.collective == "alltoall":
        return _alltoall(wanted)
    if wanted.collective in ("gather", "scatter"):
        return _rooted(wanted)
    return "dissemination"


# The thresholds below are first sensible ones. With latency alpha and time per byte beta,
# algorithms with log P steps win while alpha dominates and those that send each byte
# about twice win when beta does.
SMALL = 8 * KIB
LARGE = 512 * KIB
GATHER_ALL = 2 * KIB


def _allreduce(wanted: Wanted) -> str:
    nbytes = wanted.nbytes or 0
    if wanted.order == "rank" or wanted.wide:
        # One fold over all operands: rounds once, and in rank order.
        return "gather" if nbytes * wanted.size <= LARGE else "direct"
    if wanted.size <= 2 or nbytes <= SMALL:
        return "recursive_doubling"
    if not wanted.commutative:
        return "reduce_bcast" if nbytes <= LARGE else "direct"
    return "circulant" if nbytes <= LARGE else "ring"


def _reduce(wanted: Wanted) -> str:
    nbytes = wanted.nbytes or 0
    if wanted.order == "rank" or wanted.wide:
        return "linear" if nbytes * wanted.size <= LARGE else "direct"
    if not wanted.commutative or wanted.size <= 2 or nbytes <= LARGE:
        return "binomial"
    return "rabenseifner"


def _reduce_scatter(wanted: Wanted) -> str:
    nbytes = wanted.nbytes or 0
    if wanted.order == "rank" or wanted.wide or not wanted.commutative:
        return "direct"
    return "circulant" if nbytes <= LARGE else "ring"


def _bcast(wanted: Wanted) -> str:
    nbytes = wanted.nbytes or 0
    return "binomial" if wanted.size <= 2 or nbytes <= SMALL * 8 else "scatter_allgather"


def _allgather(wanted: Wanted) -> str:
    nbytes = wanted.nbytes or 0
    return "bruck" if nbytes <= SMALL * 8 else "ring"


def _alltoall(wanted: Wanted) -> str:
    # Counts of an uneven exchange are not equal on all ranks, so they may not decide.
    if wanted.nbytes is None:
        return "linear"
    return "bruck" if wanted.size > 8 and wanted.nbytes <= 256 * wanted.size else "linear"


def _rooted(wanted: Wanted) -> str:
    # Only the root of a v-form knows the counts; linear needs no others.
    if wanted.nbytes is None:
        return "linear"
    return "binomial" if wanted.size > 4 and wanted.nbytes <= SMALL * wanted.size else "linear"


def default_segment(algorithm: Algorithm, wanted: Wanted) -> int:
    """Return the most bytes of a pipelined piece; 0 leaves blocks whole."""
    return 256 * KIB if algorithm.segmented else 0

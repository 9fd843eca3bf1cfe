"""Native collectives that can not be compared with, by MPI.

Each entry is a fault of the MPI itself, seen with its native call alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

if TYPE_CHECKING:
    from exchange import Case

DERIVED = ("contiguous", "vector", "indexed", "struct", "resized")

VENDOR = MPI.get_vendor()[0]

#: MPICH packs and unpacks a REAL16 in a derived type as a long double: 10 of its 16 bytes.
QUAD_IS_LONG_DOUBLE = VENDOR in ("MPICH", "Intel MPI")

#: Open MPI adds integers of 8 and 16 bits with saturation where it has vector instructions
#: and wraps in the rest of the same vector, so a sum that overflows is nothing to compare.
SATURATES = VENDOR == "Open MPI"

#: By vendor: what is wrong, and which cases it spoils on how many ranks.
_QUIRKS: dict[str, list[tuple[str, Callable[[Case, int], bool]]]] = {
    "MPICH": [
        (
            "with an operator that does not commute, reduce-scatter makes scratch of count * "
            "true extent bytes and writes count * extent: the heap breaks",
            lambda case, size: (
                case.kind == "affine with gaps" and case.collective == "reduce_scatter"
            ),
        ),
        (
            "on four ranks or more, Gather may abort or wait for ever, with items of 32 or 64 "
            "bytes or with gaps",
            lambda case, size: case.method == "Gather" and size >= 4,
        ),
    ],
    "Intel MPI": [
        (
            "a user operator on items with gaps is shown memory that ends before count * extent: "
            "seen to crash in the native call",
            lambda case, size: case.kind == "affine with gaps",
        ),
        (
            "Allgather on three ranks or more truncates where send and receive type differ",
            lambda case, size: (
                case.method == "Allgather" and not {case.send, case.recv}.isdisjoint(DERIVED)
            ),
        ),
    ],
    "Open MPI": [
        (
            "a long double complex that a fragment of a message splits, at byte 4000 of a Send "
            "too, arrives wrong in a derived type",
            lambda case, size: (
                "LONG_DOUBLE_COMPLEX" in case.kind
                and case.count > 60
                and not {case.send, case.recv}.isdisjoint({*DERIVED, "gaps in items"})
            ),
        ),
        (
            "MAX and MIN take the signed MPI_OFFSET for unsigned",
            lambda case, size: case.kind == "OFFSET" and case.operator in ("MAX", "MIN"),
        ),
        (
            "on one rank, Alltoallw ignores displacements",
            lambda case, size: case.method == "Alltoallw" and size == 1,
        ),
        (
            "Allgatherv chooses an algorithm by the receive counts times the size of the SEND "
            "type, which differs between ranks: they wait for each other for ever",
            lambda case, size: case.method == "Allgatherv" and case.send in DERIVED,
        ),
    ],
}


def native(case: Case, size: int) -> bool:
    """Return whether the native call on ``size`` ranks can be held against a case."""
    return not any(spoils(case, size) for _, spoils in _QUIRKS.get(VENDOR, ()))

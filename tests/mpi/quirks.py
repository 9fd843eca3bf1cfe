"""Native collectives that can not be compared with, by MPI.

Each entry is a fault of the MPI itself, seen with its native call alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from layouts import DERIVED
from mpi4py import MPI

if TYPE_CHECKING:
    from exchange import Case

VENDOR = MPI.get_vendor()[0]

#: MPICH packs and unpacks a REAL16 in a derived type as a long double: 10 of its 16 bytes.
QUAD_IS_LONG_DOUBLE = VENDOR in ("MPICH", "Intel MPI")


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
    ],
    "Open MPI": [
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

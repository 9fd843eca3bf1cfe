"""Allgather: every rank gets the blocks of all ranks, in rank order."""

from __future__ import annotations

from mpicoll.algorithms._allgather_phases import (
    ring_allgather,
)
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule.ir import INPUT, OUTPUT, Builder, Call, Copy, Schedule, Span
from mpicoll.schedule.partition import blocks


def _start(call: Call) -> tuple[Builder, list[Span]]:
    """Return a builder that has put the own block in its place, and the places of all."""
    builder = Builder()
    homes = blocks(OUTPUT, call.counts)
    own = Span(INPUT, 0, call.counts[call.rank])
    builder.step(local=[Copy(homes[call.rank], own)])
    return builder, homes


@algorithm("allgather", "ring")
def ring(call: Call) -> Schedule:
    """Pass blocks round the ring, to the right, until everyone has had all of them.

    Steps: P - 1
    Sent: N * (P - 1) / P

    Good for long blocks: all messages go to neighbours, and nothing is copied.

    Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective
    Communication: Theory, Practice, and Experience", Concurrency and Computation:
    Practice and Experience 19 (2007).
    """
    builder, homes = _start(call)
    ring_allgather(builder, call.rank, call.size, homes)
    return builder.build()

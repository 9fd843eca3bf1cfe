"""Alltoall: every rank gets from each rank the block that is meant for it."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import INPUT, OUTPUT, Builder, Call, Copy, Recv, Schedule, Send
from mpicoll.schedule.partition import blocks


@algorithm("alltoall", "linear")
def linear(call: Call) -> Schedule:
    """Exchange with 32 ranks at a time in each direction, all messages posted at once.

    Steps: ceil((P - 1) / 32)
    Sent: N * (P - 1) / P

    Distances go up from 1 on all ranks, so no rank is everyone's first target.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    return _direct(call, peers.throttled(call.size))


@algorithm("alltoall", "pairwise")
def pairwise(call: Call) -> Schedule:
    """Send to the rank at distance k to the right and receive from the left, k = 1, 2, ….

    Steps: P - 1
    Sent: N * (P - 1) / P

    At any time every rank has one sender and one receiver. Good for long blocks.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    return _direct(call, [range(k, k + 1) for k in range(1, call.size)])


def _direct(call: Call, batches: list[range]) -> Schedule:
    """Return a schedule with a step per batch of distances between sender and receiver."""
    builder = Builder()
    sources, targets = blocks(INPUT, call.counts), blocks(OUTPUT, call.recv_counts)
    local = [Copy(targets[call.rank], sources[call.rank])]
    for distances in batches or [range(0)]:
        lefts = [(call.rank - k) % call.size for k in distances]
        rights = [(call.rank + k) % call.size for k in distances]
        builder.step(
            recvs=[Recv(left, targets[left]) for left in lefts],
            sends=[Send(right, sources[right]) for right in rights],
            local=local,
            phase="alltoall",
        )
        local = []
    return builder.build()

"""Barrier: no rank leaves before every rank has entered."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule.ir import INPUT, WORK, Builder, Call, Recv, Schedule, Send, Span
from mpicoll.schedule.peers import ceil_log2


@algorithm("barrier", "dissemination")
def dissemination(call: Call) -> Schedule:
    """Tell the rank 1, 2, 4, … to the right, hear from those to the left.

    Steps: lg
    Sent: lg

    After step k a rank has heard, directly or through others, of the ``2**(k+1)`` ranks
    up to its own. Every message is one byte, the least that can carry news.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier
    Synchronization", International Journal of Parallel Programming 17 (1988).
    """
    builder = Builder()
    inbox = builder.work(1)
    for k in range(ceil_log2(call.size)):
        builder.step(
            recvs=[Recv((call.rank - (1 << k)) % call.size, Span(WORK, inbox, inbox + 1))],
            sends=[Send((call.rank + (1 << k)) % call.size, Span(INPUT, 0, 1))],
        )
    return builder.build()

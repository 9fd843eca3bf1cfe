"""Gather: the root gets the blocks of all ranks, in rank order."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import INPUT, OUTPUT, Builder, Call, Copy, Recv, Schedule, Send, Span
from mpicoll.schedule.partition import blocks


@algorithm("gather", "linear")
def linear(call: Call) -> Schedule:
    """Send every block straight to the root, which has 32 receives posted at a time.

    Steps: ceil((P - 1) / 32)
    Sent: N / P

    A rank other than the root needs to know its own count only. Good for long blocks.

    Source: Message Passing Interface Forum, "MPI: A Message-Passing Interface Standard",
    version 4.1 (2023), section 6.5, which defines Gather by these messages.
    """
    builder = Builder()
    own = Span(INPUT, 0, call.counts[call.rank])
    if call.rank != call.root:
        builder.step(sends=[Send(call.root, own)], phase="gather")
        return builder.build()
    homes = blocks(OUTPUT, call.counts)
    local = [Copy(homes[call.rank], own)]
    for distances in peers.throttled(call.size) or [range(0)]:
        sources = [(call.root + distance) % call.size for distance in distances]
        recvs = [Recv(source, homes[source]) for source in sources]
        builder.step(recvs=recvs, local=local, phase="gather")
        local = []
    return builder.build()

"""Bcast: every rank gets the vector of the root. It lies in OUTPUT, on the root too."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import OUTPUT, Builder, Call, Recv, Schedule, Send, Span


@algorithm("bcast", "binomial")
def binomial(call: Call) -> Schedule:
    """Send the whole vector down the binomial tree, to the largest subtree first.

    Steps: lg
    Sent: N * lg

    Good for short vectors.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    builder = Builder()
    whole = Span(OUTPUT, 0, call.count)
    tree = peers.binomial(call.rank, call.size, call.root)
    if tree.parent is not None:
        builder.step(recvs=[Recv(tree.parent, whole)], phase="bcast")
    for child, _, _ in tree.children:
        builder.step(sends=[Send(child, whole)], phase="bcast")
    return builder.build()

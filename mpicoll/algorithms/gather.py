"""Gather: the root gets the blocks of all ranks, in rank order."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Buffer,
    Builder,
    Call,
    Copy,
    Recv,
    Schedule,
    Send,
    Span,
)
from mpicoll.schedule.partition import blocks, joined


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


@algorithm("gather", "binomial", knows="counts")
def binomial(call: Call) -> Schedule:
    """Collect blocks up the binomial tree, those of a subtree in one message.

    Steps: lg
    Sent: N / P * max(P - 2**(lg - 1), 2**(lg - 2))

    Good for short blocks. A rank with children keeps its subtree in work memory; the
    root has all in place, so the subtree that wraps round the last rank is two messages.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    builder = Builder()
    own = Span(INPUT, 0, call.counts[call.rank])
    tree = peers.binomial(call.rank, call.size, call.root)
    held = Subtree(builder, call, tree, OUTPUT, own)
    local = [] if held.own == own else [Copy(held.own, own)]
    for child, first, last in reversed(tree.children):
        recvs = [Recv(child, span) for span in held.spans(child, first, last)]
        builder.step(recvs=recvs, local=local, phase="gather")
        local = []
    if tree.parent is None:
        builder.step(local=local, phase="gather")
    else:
        spans = held.spans(tree.parent, tree.relative, tree.last)
        builder.step(sends=[Send(tree.parent, span) for span in spans], phase="gather")
    return builder.build()


class Subtree:
    """Where a rank of the binomial tree keeps the blocks of its subtree; for Scatter too.

    The root keeps them in ``whole``, in rank order; others in relative rank order, an
    inner rank in scratch, a leaf its only one in ``own``.
    """

    def __init__(
        self, builder: Builder, call: Call, tree: peers.Tree, whole: Buffer, own: Span
    ) -> None:
        self._call = call
        self._first = tree.relative
        ranks = [(call.root + place) % call.size for place in range(tree.relative, tree.last)]
        self._blocks = [own]
        if tree.parent is None:
            homes = blocks(whole, call.counts)
            self._blocks = [homes[rank] for rank in ranks]
        elif tree.children:
            counts = [call.counts[rank] for rank in ranks]
            self._blocks = blocks(WORK, counts, builder.work(sum(counts)))

    @property
    def own(self) -> Span:
        """Where the rank's own block lies."""
        return self._blocks[0]

    def spans(self, peer: int, first: int, last: int) -> list[Span]:
        """Return what ``peer`` exchanges of relative ranks ``first`` to ``last - 1``.

        One span, or two if the root takes part and the range wraps round the last rank.
        """
        middle = last
        if self._call.root in (self._call.rank, peer):
            middle = min(max(first, self._call.size - self._call.root), last)
        return [
            joined(self._blocks[low - self._first : high - self._first])
            for low, high in ((first, middle), (middle, last))
            if low < high
        ]

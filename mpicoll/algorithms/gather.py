"""Gather: the root gets the blocks of all ranks, in rank order."""

from __future__ import annotations

from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
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
    tree = peers.binomial(call.rank, call.size, call.root)
    is_root, wrap = tree.parent is None, call.size - call.root
    own = Span(INPUT, 0, call.counts[call.rank])
    held = [own]
    local = []
    if is_root or tree.children:
        held = subtree_blocks(builder, call, tree, OUTPUT)
        local = [Copy(held[0], own)]
    for child, first, last in reversed(tree.children):
        slices = peers.subtree_slices(tree, first, last, wrap if is_root else None)
        recvs = [Recv(child, joined(held[part])) for part in slices]
        builder.step(recvs=recvs, local=local, phase="gather")
        local = []
    if tree.parent is None:
        builder.step(local=local, phase="gather")
    else:
        cut = wrap if tree.parent == call.root else None
        slices = peers.subtree_slices(tree, tree.relative, tree.last, cut)
        sends = [Send(tree.parent, joined(held[part])) for part in slices]
        builder.step(sends=sends, phase="gather")
    return builder.build()

"""Scatter: every rank gets its block of the root's vector."""

from __future__ import annotations

from mpicoll.algorithms.gather import Subtree
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import INPUT, OUTPUT, Builder, Call, Copy, Recv, Schedule, Send, Span
from mpicoll.schedule.partition import blocks


@algorithm("scatter", "linear")
def linear(call: Call) -> Schedule:
    """Send every block from the root straight to its rank, 32 of them at a time.

    Steps: ceil((P - 1) / 32)
    Sent: N * (P - 1) / P

    A rank other than the root needs to know its own count only. Good for long blocks.

    Source: Message Passing Interface Forum, "MPI: A Message-Passing Interface Standard",
    version 4.1 (2023), section 6.6, which defines Scatter by these messages.
    """
    builder = Builder()
    own = Span(OUTPUT, 0, call.counts[call.rank])
    if call.rank != call.root:
        builder.step(recvs=[Recv(call.root, own)], phase="scatter")
        return builder.build()
    homes = blocks(INPUT, call.counts)
    local = [Copy(own, homes[call.rank])]
    for distances in peers.throttled(call.size) or [range(0)]:
        targets = [(call.root + distance) % call.size for distance in distances]
        sends = [Send(target, homes[target]) for target in targets]
        builder.step(sends=sends, local=local, phase="scatter")
        local = []
    return builder.build()


@algorithm("scatter", "binomial", knows="counts")
def binomial(call: Call) -> Schedule:
    """Hand blocks down the binomial tree, those of a subtree in one message.

    Steps: lg
    Sent: N * (P - 1) / P

    Good for short blocks. A rank with children keeps its subtree in work memory; the
    root has all in place, so the subtree that wraps round the last rank is two messages.

    Source: M. Barnett, L. Shuler, R. van de Geijn, S. Gupta, D. Payne, J. Watts,
    "Interprocessor Collective Communication Library (InterCom)", Scalable High
    Performance Computing Conference (1994).
    """
    builder = Builder()
    own = Span(OUTPUT, 0, call.counts[call.rank])
    tree = peers.binomial(call.rank, call.size, call.root)
    held = Subtree(builder, call, tree, INPUT, own)
    local = [] if held.own == own else [Copy(own, held.own)]
    if tree.parent is not None:
        spans = held.spans(tree.parent, tree.relative, tree.last)
        builder.step(recvs=[Recv(tree.parent, span) for span in spans], phase="scatter")
    for child, first, last in tree.children:
        sends = [Send(child, span) for span in held.spans(child, first, last)]
        builder.step(sends=sends, local=local, phase="scatter")
        local = []
    builder.step(local=local, phase="scatter")
    return builder.build()

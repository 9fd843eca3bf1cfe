"""Bcast: every rank gets the vector of the root. It lies in OUTPUT, on the root too."""

from __future__ import annotations

from mpicoll.algorithms._allgather_phases import ring_allgather
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
from mpicoll.schedule.ir import OUTPUT, Builder, Call, Recv, Schedule, Send, Span
from mpicoll.schedule.partition import cut, joined, segments


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


@algorithm("bcast", "scatter_allgather")
def scatter_allgather(call: Call) -> Schedule:
    """Scatter a block to every rank down the binomial tree, then allgather round the ring.

    Steps: lg + P - 1
    Sent: 2 * N * (P - 1) / P

    Good for long vectors. No work memory: blocks go straight to their place in OUTPUT.

    Source: M. Barnett, L. Shuler, R. van de Geijn, S. Gupta, D. Payne, J. Watts,
    "Interprocessor Collective Communication Library (InterCom)", Scalable High
    Performance Computing Conference (1994).
    """
    builder = Builder()
    blocks = cut(Span(OUTPUT, 0, call.count), call.size)  # of relative ranks
    tree = peers.binomial(call.rank, call.size, call.root)
    if tree.parent is not None:
        span = joined(blocks[tree.relative : tree.last])
        builder.step(recvs=[Recv(tree.parent, span)], phase="scatter")
    for child, first, last in tree.children:
        builder.step(sends=[Send(child, joined(blocks[first:last]))], phase="scatter")
    by_rank = [blocks[(rank - call.root) % call.size] for rank in range(call.size)]
    ring_allgather(builder, call.rank, call.size, by_rank)
    return builder.build()


@algorithm("bcast", "chain", segmented=True)
def chain(call: Call) -> Schedule:
    """Pass segments down the chain of ranks from the root, one while the next arrives.

    Steps: (S + (P > 2)) * (P > 1)
    Sent: N

    The last rank has its last segment after P - 2 + S steps of the chain. Good for very
    long vectors on few ranks.

    Source: J. Watts, R. van de Geijn, "A Pipelined Broadcast for Multidimensional
    Meshes", Parallel Processing Letters 5 (1995).
    """
    builder = Builder()
    place = (call.rank - call.root) % call.size
    left, right = peers.ring(call.rank, call.size)
    pieces = segments(Span(OUTPUT, 0, call.count), call.segment)
    recvs = [[Recv(left, piece)] if place > 0 else [] for piece in pieces]
    sends = [[Send(right, piece)] if place < call.size - 1 else [] for piece in pieces]
    for arriving, leaving in zip([*recvs, []], [[], *sends], strict=True):
        builder.step(recvs=arriving, sends=leaving, phase="bcast")
    return builder.build()


@algorithm("bcast", "circulant", segmented=True)
def circulant(call: Call) -> Schedule:
    """Send a segment and receive another in every round, over Träff's circulant graph.

    Steps: (S + lg - 1) * (P > 1)
    Sent: N / S * (S + lg - 1)

    No broadcast of S segments takes fewer steps. Good for vectors of any length in about
    sqrt((lg - 1) * N * β / α) segments.

    Source: J. L. Träff, "Optimal Broadcast Schedules in Logarithmic Time with Applications
    to Broadcast, All-Broadcast, Reduction and All-Reduction", arXiv:2407.18004.
    """
    builder = Builder()
    rank, size = call.rank, call.size
    if size == 1:
        return builder.build()
    pieces = segments(Span(OUTPUT, 0, call.count), call.segment)
    place = (rank - call.root) % size
    skips = peers.circulant_skips(size)[::-1]
    rights = [(place + skip) % size for skip in skips]
    arriving = peers.circulant_blocks(place, size)
    leaving = [
        peers.circulant_blocks(right, size)[k] if right else 0 for k, right in enumerate(rights)
    ]
    total = len(pieces) - 1 + len(skips)
    late = -total % len(skips)  # so many rounds of the first phase are left out
    for turn in range(late, late + total):
        phase, k = divmod(turn, len(skips))
        shift = phase * len(skips) - late
        recvs, sends = [], []
        if place and arriving[k] + shift >= 0:
            piece = pieces[min(arriving[k] + shift, len(pieces) - 1)]
            recvs = [Recv((rank - skips[k]) % size, piece)]
        if rights[k] and leaving[k] + shift >= 0:
            piece = pieces[min(leaving[k] + shift, len(pieces) - 1)]
            sends = [Send((rank + skips[k]) % size, piece)]
        builder.step(recvs=recvs, sends=sends, phase="bcast")
    return builder.build()

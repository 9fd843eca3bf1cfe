"""Reduce: the root gets the reduction of the vectors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.algorithms import _phases
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Builder,
    Call,
    Copy,
    Local,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
)
from mpicoll.schedule.partition import blocks, cut, joined, segments
from mpicoll.schedule.peers import fold, throttled


def _start(call: Call) -> tuple[Builder, Span, Span]:
    """Return a builder, which has the copy that is all a lone rank does, input and output."""
    builder = Builder()
    own, out = Span(INPUT, 0, call.count), Span(OUTPUT, 0, call.count)
    if call.size == 1:
        builder.step(local=[Copy(out, own)])
    return builder, own, out


@algorithm("reduce", "binomial", order="rank")
def binomial(call: Call) -> Schedule:
    """Join neighbouring intervals of ranks pairwise until the root has them all.

    Steps: lg
    Sent: N

    Ranks are halved recursively, and each half is led by the root if it holds it, else
    by its first rank. So operands meet in rank order for every root without an extra
    hop, and the bits do not depend on the root. Scratch of two vectors, on the root and
    on ranks that only send of one or none. Good for short vectors.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005), for the binomial tree; halving by ranks is ours.
    """
    builder, own, out = _start(call)
    _phases.tree_reduce(builder, call.rank, call.size, call.root, own, out)
    return builder.build()


@algorithm("reduce", "chain", order="rank", segmented=True)
def chain(call: Call) -> Schedule:
    """Pass segments from both ends of the row of ranks to the root, each rank adding its own.

    Steps: min(S * (P - 1), 2 * S, S + 2)
    Sent: N

    A rank receives a segment, reduces the one before and sends the one before that in
    one step. A segment takes two steps per hop, and the farthest rank is P - 1 hops away
    at most. Operands are in rank order: from rank 0 up to the root a left fold, from the
    last rank down a right one. Scratch of three segments, six on the root. Good for long
    vectors in many segments on few ranks.

    Source: J. Pješivac-Grbović, T. Angskun, G. Bosilca, G. E. Fagg, E. Gabriel,
    J. J. Dongarra, "Performance Analysis of MPI Collective Operations", Cluster
    Computing 10 (2007), pipeline; two chains that meet are ours.
    """
    builder, own, out = _start(call)
    rank, root = call.rank, call.root
    before = [rank - 1] if 0 < rank <= root else []
    after = [rank + 1] if root <= rank < call.size - 1 else []
    towards = rank + (rank < root) - (rank > root)
    mine, outs = segments(own, call.segment), segments(out, call.segment)
    room = mine[0].count
    boxes = [builder.work(3 * room) for _ in before + after]
    recvs: list[list[Recv]] = []
    local: list[list[Local]] = []
    sends: list[list[Send]] = []
    for t, source in enumerate(mine):
        recvs.append([])
        local.append([])
        for peer, box in zip(before + after, boxes, strict=True):
            start = box + t % 3 * room
            inbox = Span(WORK, start, start + source.count)
            recvs[t].append(Recv(peer, inbox))
            operands = _phases.in_order(rank, source, peer, inbox)
            source = outs[t] if rank == root else inbox
            local[t].append(Reduce(source, operands))
        sends.append([Send(towards, source)] if rank != root else [])
    _phases.pipeline(builder, recvs, local, sends, "reduce")
    return builder.build()


@algorithm("reduce", "rabenseifner", order="rank")
def rabenseifner(call: Call) -> Schedule:
    """Reduce-scatter by recursive halving, then gather to the root up a binomial tree.

    Steps: 2 * fl + odd
    Sent: N * (1.5 - 1 / 2**fl)

    Halving starts with the nearest rank, so operands meet in rank order, in the same
    bracketing for all elements. Unless P is a power of two, pairs of neighbours are
    folded first, and the root is in one. Scratch of up to two vectors. Good for long
    vectors.

    Source: R. Rabenseifner, "Optimization of Collective Reduction Operations",
    International Conference on Computational Science, LNCS 3036 (2004).
    """
    builder, own, out = _start(call)
    place = fold(call.rank, call.size, call.root)
    rounds = _phases.exchanges(place, call.size, call.root)
    mine = cut(own, place.members)
    kept = joined(mine[slice(*rounds[0].keep)]).count if rounds else 0
    inbox = _phases.scratch(builder, kept if place.partner is None else call.count)
    sums = out if call.rank == call.root else _phases.scratch(builder, call.count)
    shares = cut(sums, place.members)
    source = _phases.fold_in(builder, call.rank, place, own, sums, inbox)
    inputs = cut(source, place.members)
    _phases.halving_reduce_scatter(builder, call.rank, rounds, inputs, shares, inbox)
    if place.index is None:
        return builder.build()
    apart = place.index ^ (fold(call.root, call.size, call.root).index or 0)
    for k, (peer, keep, give) in reversed(list(enumerate(rounds))):
        if apart >> k == 1:
            builder.step(sends=[Send(peer, joined(shares[slice(*keep)]))], phase="gather")
        elif apart >> k == 0:
            builder.step(recvs=[Recv(peer, joined(shares[slice(*give)]))], phase="gather")
    return builder.build()


@algorithm("reduce", "linear", order="sequential")
def linear(call: Call) -> Schedule:
    """Send every vector to the root, which folds them in one go.

    Steps: ceil((P - 1) / 32)
    Sent: N

    The bits are those of a sum from left to right over the ranks, and a wide
    accumulator is rounded once. The root has at most 32 messages in flight and scratch
    of P vectors. Good for tiny vectors.

    Source: MPI: A Message-Passing Interface Standard, version 4.1, section 6.9.1, whose
    definition it follows.
    """
    builder, own, out = _start(call)
    if call.size == 1:
        return builder.build()
    if call.rank != call.root:
        builder.step(sends=[Send(call.root, own)], phase="gather")
        return builder.build()
    slots = blocks(WORK, [call.count] * call.size, builder.work(call.count * call.size))
    builder.step(local=[Copy(slots[call.rank], own)])  # in place the output would overlap
    _to_root(builder, call, slots)
    builder.step(local=[Reduce(out, tuple(slots))], phase="reduce")
    return builder.build()


@algorithm("reduce", "direct", order="sequential")
def direct(call: Call) -> Schedule:
    """Send every block to its owner at once, which folds it in one go and sends it to the root.

    Steps: 2 * ceil((P - 1) / 32)
    Sent: N if P > 1 else 0

    The bits are those of a sum from left to right over the ranks, whatever the length,
    and a wide accumulator is rounded once. At most 32 messages are in flight in each
    direction. Scratch of the vector. Good for long vectors where the bits count.

    Source: the first phase is pairwise exchange, posted together: R. Thakur,
    R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", International Journal of High Performance Computing Applications 19 (2005).
    """
    builder, own, out = _start(call)
    if call.size == 1:
        return builder.build()
    inputs, outs = cut(own, call.size), cut(out, call.size)
    mine = _phases.scratch(builder, inputs[call.rank].count)
    builder.step(local=[Copy(mine, inputs[call.rank])])  # in place the output would overlap
    target = outs[call.rank]
    if call.rank != call.root:
        target = _phases.scratch(builder, mine.count)
    _phases.direct_reduce_scatter(builder, call.rank, call.size, inputs, mine, target)
    if call.rank == call.root:
        _to_root(builder, call, outs)
    else:
        builder.step(sends=[Send(call.root, target)], phase="gather")
    return builder.build()


def _to_root(builder: Builder, call: Call, slots: Sequence[Span]) -> None:
    """Receive on the root what every other rank sends, into its slot."""
    for distances in throttled(call.size):
        peers = [(call.root + distance) % call.size for distance in distances]
        builder.step(recvs=[Recv(peer, slots[peer]) for peer in peers], phase="gather")

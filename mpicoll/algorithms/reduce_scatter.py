"""Reduce_scatter: every rank gets its block of the reduction of all vectors."""

from __future__ import annotations

from mpicoll.algorithms import _phases
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import partition
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Builder,
    Call,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Span,
)
from mpicoll.schedule.peers import bit_reversed, fold, members_of


def _start(call: Call) -> tuple[Builder, list[Span], Span]:
    """Return a builder, which has the copy that is all a lone rank does, inputs and output."""
    builder = Builder()
    inputs, out = partition.blocks(INPUT, call.counts), Span(OUTPUT, 0, call.counts[call.rank])
    if call.size == 1:
        builder.step(local=[Copy(out, inputs[0])])
    return builder, inputs, out


@algorithm("reduce_scatter", "ring", segmented=True)
def ring(call: Call) -> Schedule:
    """Send every block round the ring, each rank adding its own, to end on its owner.

    Steps: (P - 1) * S
    Sent: (P - 1) * N / P

    One segment is reduced while the next is in flight. Operands of block b meet in the
    order b + 1, b + 2, …, b, so operators must commute. Scratch of one block and one
    segment. Good for long vectors on few ranks.

    Source: P. Patarasu, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters
    of Workstations", Journal of Parallel and Distributed Computing 69 (2009).
    """
    builder, inputs, out = _start(call)
    targets = [out if block == call.rank else None for block in range(call.size)]
    pieces = partition.pieces(max(call.counts), call.segment)
    _phases.ring_reduce_scatter(builder, call.rank, call.size, inputs, targets, pieces)
    return builder.build()


@algorithm("reduce_scatter", "recursive_halving", order="rank")
def recursive_halving(call: Call) -> Schedule:
    """Exchange halves of the vector with the rank 1, 2, 4, … away and reduce the kept half.

    Steps: fl + 2 * odd
    Sent: N - (1 - odd) * N / P

    The nearest rank comes first, so operands meet in rank order, in the same bracketing
    for all elements; the blocks are packed in bit-reversed order first, which keeps
    halves in one piece. Unless P is a power of two, pairs of neighbours are folded.
    Scratch of 3/2 vectors, two where folded. Good for vectors of middle length.

    Source: M. Bernaschi, G. Iannello, M. Lauria, "Efficient Implementation of
    Reduce-scatter in MPI", Journal of Systems Architecture 49 (2003).
    """
    builder, inputs, out = _start(call)
    rank, place = call.rank, fold(call.rank, call.size)
    if place.index is None and place.partner is not None:
        whole = partition.joined(inputs)
        builder.step(sends=[Send(place.partner, whole)], phase="fold")
        builder.step(recvs=[Recv(place.partner, out)], phase="unfold")
        return builder.build()
    rounds = _phases.exchanges(place, call.size)
    groups = [members_of(bit_reversed(i, place.members), call.size) for i in range(place.members)]
    ranks = [peer for group in groups for peer in range(*group)]
    counts = [call.counts[peer] for peer in ranks]
    packed = partition.blocks(WORK, counts, builder.work(call.count))
    blocks = dict(zip(ranks, packed, strict=True))
    shares = [partition.joined([blocks[peer] for peer in range(*group)]) for group in groups]
    if place.partner is None:
        builder.step(local=[Copy(blocks[peer], inputs[peer]) for peer in ranks])
        kept = partition.joined(shares[slice(*rounds[0].keep)]).count if rounds else 0
        inbox = _phases.scratch(builder, kept)
    else:
        inbox = _phases.scratch(builder, call.count)
        builder.step(recvs=[Recv(place.partner, inbox)], phase="fold")
        theirs = partition.blocks(WORK, call.counts, inbox.start)
        pairs = [_phases.in_order(rank, inputs[b], place.partner, theirs[b]) for b in ranks]
        reduces = zip(packed, pairs, strict=True)
        builder.step(local=[Reduce(*item) for item in reduces], phase="fold")
    _phases.halving_reduce_scatter(builder, rank, rounds, shares, shares, inbox)
    unfold = [] if place.partner is None else [Send(place.partner, blocks[place.partner])]
    builder.step(sends=unfold, local=[Copy(out, blocks[rank])], phase="unfold")
    return builder.build()


@algorithm("reduce_scatter", "pairwise", order="rank")
def pairwise(call: Call) -> Schedule:
    """Send one block per step to its owner, which adds up what it receives.

    Steps: P - 1
    Sent: (P - 1) * N / P

    In step k the message is for the rank k to the right. What comes from lower ranks
    and what comes from higher ranks, both in falling order, is added up apart, so
    operands are in rank order. One block is reduced while the next is in flight.
    Scratch of three blocks. Good for long vectors.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005); the two sums are ours.
    """
    builder, inputs, out = _start(call)
    rank, size = call.rank, call.size
    high = _phases.scratch(builder, out.count)
    boxes = partition.blocks(WORK, [out.count] * 2, builder.work(2 * out.count))
    lower = inputs[rank]  # the sum over the ranks up to this one, as far as they are in
    work: list[Reduce] = []
    for k in range(1, size):
        peer = (rank - k) % size
        inbox = high if peer == size - 1 and rank != peer else boxes[k % 2]
        builder.step(
            recvs=[Recv(peer, inbox)],
            sends=[Send((rank + k) % size, inputs[(rank + k) % size])],
            local=work,
        )
        if peer < rank:
            work = [Reduce(out, (inbox, lower))]
            lower = out
        else:
            work = [Reduce(high, (inbox, high))] if inbox is not high else []
    if rank != size - 1:
        work.append(Reduce(out, (lower, high)))
    builder.step(local=work)
    return builder.build()


@algorithm("reduce_scatter", "circulant")
def circulant(call: Call) -> Schedule:
    """Send partly reduced blocks over the circulant graph whose skips halve P, rounded up.

    Steps: lg
    Sent: (P - 1) * N / P

    Operators must commute. Any P takes the least rounds and the least bytes. Scratch of
    about 3/4 of the vector. Good for vectors of any length.

    Source: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce
    Algorithms", arXiv:2410.14234 (2024).
    """
    builder, inputs, out = _start(call)
    _phases.circulant_reduce_scatter(builder, call.rank, call.size, inputs, out)
    return builder.build()


@algorithm("reduce_scatter", "direct", order="sequential")
def direct(call: Call) -> Schedule:
    """Send every block to its owner at once; each owner folds its block in one go.

    Steps: ceil((P - 1) / 32)
    Sent: (P - 1) * N / P

    The bits are those of a sum from left to right over the ranks, and a wide
    accumulator is rounded once. At most 32 messages are in flight in each direction.
    Scratch of P - 1 blocks. Good for vectors of middle length, and where the bits count.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005), pairwise exchange, here posted together.
    """
    builder, inputs, out = _start(call)
    rank = call.rank
    _phases.direct_reduce_scatter(builder, rank, call.size, inputs, inputs[rank], out)
    return builder.build()

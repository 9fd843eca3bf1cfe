"""Allreduce: every rank gets the reduction of the vectors of all ranks."""

from __future__ import annotations

from mpicoll.algorithms import _phases
from mpicoll.algorithms._allgather_phases import circulant_allgather, ring_allgather
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule import peers
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
from mpicoll.schedule.partition import blocks, cut, joined, pieces


def _start(call: Call) -> tuple[Builder, Span, Span]:
    """Return a builder, which has the copy that is all a lone rank does, input and output."""
    builder = Builder()
    own, out = Span(INPUT, 0, call.count), Span(OUTPUT, 0, call.count)
    if call.size == 1:
        builder.step(local=[Copy(out, own)])
    return builder, own, out


@algorithm("allreduce", "ring", segmented=True)
def ring(call: Call) -> Schedule:
    """Reduce-scatter round the ring, block i ending on rank i, then allgather round it.

    Steps: (P - 1) * (S + 1)
    Sent: 2 * (P - 1) * N / P

    In the first phase one segment is reduced while the next is in flight; the second
    has nothing to overlap and sends whole blocks. Operands of block b meet in the order
    b + 1, b + 2, …, b, so operators must commute. Scratch of two segments. Good for
    long vectors on few ranks.

    Source: P. Patarasu, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters
    of Workstations", Journal of Parallel and Distributed Computing 69 (2009).
    """
    builder, own, out = _start(call)
    rank, size = call.rank, call.size
    inputs, outs = cut(own, size), cut(out, size)
    parts = pieces(outs[0].count, call.segment)
    _phases.ring_reduce_scatter(builder, rank, size, inputs, outs, parts)
    ring_allgather(builder, rank, size, outs)
    return builder.build()


@algorithm("allreduce", "recursive_doubling", order="rank")
def recursive_doubling(call: Call) -> Schedule:
    """Exchange whole vectors with the rank 1, 2, 4, … away and reduce.

    Steps: fl + 2 * odd
    Sent: N * (fl + odd)

    Both peers reduce in rank order, so all ranks have the same bits. Unless P is a
    power of two, pairs of neighbours are folded first. Scratch of one vector. Good for
    short vectors.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    builder, own, out = _start(call)
    place = peers.fold(call.rank, call.size)
    rounds = _phases.exchanges(place, call.size)
    inbox = _phases.scratch(builder, call.count if rounds else 0)
    source = _phases.fold_in(builder, call.rank, place, own, out, inbox)
    for peer, _, _ in rounds:
        builder.step(recvs=[Recv(peer, inbox)], sends=[Send(peer, source)], phase="exchange")
        operands = _phases.in_order(call.rank, source, peer, inbox)
        builder.step(local=[Reduce(out, operands)], phase="exchange")
        source = out
    _phases.fold_out(builder, place, out)
    return builder.build()


@algorithm("allreduce", "rabenseifner", order="rank")
def rabenseifner(call: Call) -> Schedule:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling.

    Steps: 2 * fl + 2 * odd
    Sent: 2 * N * (1 - 1 / 2**fl) + odd * N

    Halving starts with the nearest rank, so operands meet in rank order, in the same
    bracketing for all elements. Unless P is a power of two, pairs of neighbours are
    folded first. Scratch of half a vector, a whole one where folded. Good for long
    vectors where P is a power of two.

    Source: R. Rabenseifner, "Optimization of Collective Reduction Operations",
    International Conference on Computational Science, LNCS 3036 (2004).
    """
    builder, own, out = _start(call)
    place = peers.fold(call.rank, call.size)
    rounds = _phases.exchanges(place, call.size)
    shares = cut(out, place.members)
    kept = joined(shares[slice(*rounds[0].keep)]).count if rounds else 0
    inbox = _phases.scratch(builder, call.count if rounds and place.partner is not None else kept)
    source = _phases.fold_in(builder, call.rank, place, own, out, inbox)
    inputs = cut(source, place.members)
    _phases.halving_reduce_scatter(builder, call.rank, rounds, inputs, shares, inbox)
    for peer, keep, give in reversed(rounds):
        builder.step(
            recvs=[Recv(peer, joined(shares[slice(*give)]))],
            sends=[Send(peer, joined(shares[slice(*keep)]))],
            phase="allgather",
        )
    _phases.fold_out(builder, place, out)
    return builder.build()


@algorithm("allreduce", "circulant")
def circulant(call: Call) -> Schedule:
    """Reduce-scatter over the circulant graph whose skips halve P, allgather back over it.

    Steps: 2 * lg
    Sent: 2 * (P - 1) * N / P

    Operators must commute. Any P takes the least rounds and the least bytes. Scratch of
    about 3/4 of the vector. Good for vectors of any length.

    Source: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce
    Algorithms", arXiv:2410.14234 (2024).
    """
    builder, own, out = _start(call)
    rank, size = call.rank, call.size
    outs = cut(out, size)
    _phases.circulant_reduce_scatter(builder, rank, size, cut(own, size), outs[rank])
    circulant_allgather(builder, rank, size, outs)
    return builder.build()


@algorithm("allreduce", "reduce_bcast", order="rank")
def reduce_bcast(call: Call) -> Schedule:
    """Reduce to rank 0 along a tree, then broadcast from it along a binomial tree.

    Steps: 2 * lg
    Sent: N * lg

    Operands meet in rank order, bracketed as in the binomial Reduce, whose bits it has.
    Scratch of two vectors. Good where few messages matter more than few steps.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    builder, own, out = _start(call)
    _phases.tree_reduce(builder, call.rank, call.size, 0, own, out)
    _phases.tree_bcast(builder, call.rank, call.size, 0, out)
    return builder.build()


@algorithm("allreduce", "gather", order="sequential")
def gather(call: Call) -> Schedule:
    """Gather the vectors of all ranks on all ranks; each folds them in one go.

    Steps: lg
    Sent: (P - 1) * N

    The bits are those of a sum from left to right over the ranks, and a wide
    accumulator is rounded once. Scratch of P vectors. Good for tiny vectors.

    Source: the allgather is the circulant one of J. L. Träff, arXiv:2410.14234 (2024),
    in the steps and bytes of J. Bruck et al., "Efficient Algorithms for All-to-All
    Communications in Multiport Message-Passing Systems", IEEE Transactions on Parallel
    and Distributed Systems 8 (1997).
    """
    builder, own, out = _start(call)
    if call.size == 1:
        return builder.build()
    slots = blocks(WORK, [call.count] * call.size, builder.work(call.size * call.count))
    builder.step(local=[Copy(slots[call.rank], own)])
    circulant_allgather(builder, call.rank, call.size, slots)
    builder.step(local=[Reduce(out, tuple(slots))], phase="reduce")
    return builder.build()


@algorithm("allreduce", "direct", order="sequential")
def direct(call: Call) -> Schedule:
    """Send every block to its owner at once, which folds it in one go; then allgather.

    Steps: ceil((P - 1) / 32) + lg
    Sent: 2 * (P - 1) * N / P

    The bits are those of a sum from left to right over the ranks, whatever the length,
    and a wide accumulator is rounded once. At most 32 messages are in flight in each
    direction; the allgather is the circulant one. Scratch of the vector. Good for long
    vectors where the bits count.

    Source: the first phase is pairwise exchange, posted together: R. Thakur,
    R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", International Journal of High Performance Computing Applications 19 (2005);
    the second J. L. Träff, arXiv:2410.14234 (2024).
    """
    builder, own, out = _start(call)
    rank, size = call.rank, call.size
    inputs, outs = cut(own, size), cut(out, size)
    mine = _phases.scratch(builder, outs[rank].count if size > 1 else 0)
    if size > 1:
        builder.step(local=[Copy(mine, inputs[rank])])  # in place the output would overlap
    _phases.direct_reduce_scatter(builder, rank, size, inputs, mine, outs[rank])
    circulant_allgather(builder, rank, size, outs)
    return builder.build()

"""Allgather: every rank gets the blocks of all ranks, in rank order."""

from __future__ import annotations

from mpicoll.algorithms._allgather_phases import (
    circulant_allgather,
    doubling_allgather,
    ring_allgather,
)
from mpicoll.algorithms.registry import algorithm
from mpicoll.schedule.ir import (
    INPUT,
    OUTPUT,
    WORK,
    Builder,
    Call,
    Copy,
    Recv,
    Schedule,
    Send,
    Span,
)
from mpicoll.schedule.partition import around, blocks, joined


def _start(call: Call) -> tuple[Builder, list[Span]]:
    """Return a builder that has put the own block in its place, and the places of all."""
    builder = Builder()
    homes = blocks(OUTPUT, call.counts)
    own = Span(INPUT, 0, call.counts[call.rank])
    builder.step(local=[Copy(homes[call.rank], own)])
    return builder, homes


@algorithm("allgather", "ring")
def ring(call: Call) -> Schedule:
    """Pass blocks round the ring, to the right, until everyone has had all of them.

    Steps: P - 1
    Sent: N * (P - 1) / P

    Good for long blocks: all messages go to neighbours, and nothing is copied.

    Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective
    Communication: Theory, Practice, and Experience", Concurrency and Computation:
    Practice and Experience 19 (2007).
    """
    builder, homes = _start(call)
    ring_allgather(builder, call.rank, call.size, homes)
    return builder.build()


@algorithm("allgather", "recursive_doubling")
def recursive_doubling(call: Call) -> Schedule:
    """Exchange all there is with the rank at distance 1, 2, 4, …, folded if need be.

    Steps: fl + 2 * odd
    Sent: N / P * (P - 1 + odd * (2**fl - 1 + sum(min(2**k, P - 2**fl) for k in range(fl))))

    Good for short blocks on a power of two of ranks, where it sends N * (P - 1) / P.
    Else pairs of ranks join before, and the one that waits gets all of it at the end.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    builder, homes = _start(call)
    doubling_allgather(builder, call.rank, call.size, homes)
    return builder.build()


@algorithm("allgather", "bruck")
def bruck(call: Call) -> Schedule:
    """Get from the rank 1, 2, 4, … to the right all that it has, then rotate.

    Steps: lg
    Sent: N * (P - 1) / P

    Good for short blocks: one message a step on any number of ranks. Blocks are kept in
    work memory of N bytes in the order rank, rank + 1, …, and copied once at the end.

    Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient Algorithms
    for All-to-All Communications in Multiport Message-Passing Systems", IEEE Transactions
    on Parallel and Distributed Systems 8 (1997).
    """
    builder = Builder()
    rank, size = call.rank, call.size
    homes = blocks(OUTPUT, call.counts)
    held = blocks(WORK, call.counts[rank:] + call.counts[:rank], builder.work(call.count))
    builder.step(local=[Copy(held[0], Span(INPUT, 0, call.counts[rank]))])
    reach = 1
    while reach < size:
        count = min(reach, size - reach)
        builder.step(
            recvs=[Recv((rank + reach) % size, joined(held[reach : reach + count]))],
            sends=[Send((rank - reach) % size, joined(held[:count]))],
            phase="allgather",
        )
        reach *= 2
    targets = [joined(homes[rank:]), *around(homes, 0, rank)]
    sources = [joined(held[: size - rank]), *around(held, size - rank, rank)]
    builder.step(local=map(Copy, targets, sources), phase="rotate")
    return builder.build()


@algorithm("allgather", "neighbour_exchange")
def neighbour_exchange(call: Call) -> Schedule:
    """Exchange with the left and the right neighbour in turn what the other side sent last.

    Steps: (P // 2 + P % 2 * 2) * (P > 1)
    Sent: N / P * (P - 1 + P % 2 * (P - (P == 3)))

    Good for long blocks on an even number of ranks: half the steps of the ring. Of an odd
    number the last joins the one before it, and gets all of it at the end.

    Source: J. Chen, L. Zhang, Y. Zhang, W. Yuan, "Performance Evaluation of Allgather
    Algorithms on Terascale Linux Cluster with Fast Ethernet", High-Performance Computing
    in Asia-Pacific Region (2005).
    """
    builder, homes = _start(call)
    rank, size = call.rank, call.size
    if size == 1:
        return builder.build()
    members = size - size % 2
    helper = members - 1 if size % 2 else None
    others = joined(homes[: size - 1])
    if rank == members:
        builder.step(sends=[Send(members - 1, homes[rank])], phase="allgather")
        builder.step(recvs=[Recv(members - 1, others)], phase="allgather")
        return builder.build()
    if rank == helper:
        builder.step(recvs=[Recv(members, homes[members])], phase="allgather")
    held = [*homes[: members - 1], joined(homes[members - 1 :])]
    _exchange_with_neighbours(builder, rank, held)
    if rank == helper:
        builder.step(sends=[Send(members, others)], phase="allgather")
    return builder.build()


def _exchange_with_neighbours(builder: Builder, rank: int, homes: list[Span]) -> None:
    """Run the neighbour exchange over an even number of ranks, all that have ``homes``."""
    size = len(homes)
    pairs = [joined(homes[first : first + 2]) for first in range(0, size, 2)]
    away = -1 if rank % 2 else 1  # from a rank to the other of its pair
    builder.step(
        recvs=[Recv(rank + away, homes[rank + away])],
        sends=[Send(rank + away, homes[rank])],
        phase="allgather",
    )
    latest = rank // 2
    for step in range(1, size // 2):
        side = -away if step % 2 else away
        # Pairs come from ever further away, one side after the other.
        arriving = (rank // 2 + side * ((step + 1) // 2)) % len(pairs)
        peer = (rank + side) % size
        builder.step(
            recvs=[Recv(peer, pairs[arriving])],
            sends=[Send(peer, pairs[latest])],
            phase="allgather",
        )
        latest = arriving


@algorithm("allgather", "circulant")
def circulant(call: Call) -> Schedule:
    """Get blocks from ever further to the right over Träff's circulant graph.

    Steps: lg
    Sent: N * (P - 1) / P

    Good for blocks of any length. Nothing is copied: a range of blocks that wraps round
    the last rank is two messages of one step.

    Source: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce
    Algorithms", arXiv:2410.14234.
    """
    builder, homes = _start(call)
    circulant_allgather(builder, call.rank, call.size, homes)
    return builder.build()

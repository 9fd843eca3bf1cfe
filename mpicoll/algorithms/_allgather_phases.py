"""Phases in which every rank ends with the blocks of all; each appends to a Builder.

``blocks[r]`` is where the block of rank ``r`` lies on every rank; a rank's own is in
place before the phase. Only the ring lets blocks lie anywhere; the others want them one
after the other, and join neighbours to one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.schedule import peers
from mpicoll.schedule.ir import Builder, Recv, Send, Span
from mpicoll.schedule.partition import around, joined, runs


def ring_allgather(
    builder: Builder, rank: int, size: int, blocks: Sequence[Span], *, phase: str = "allgather"
) -> None:
    """Pass on to the right what came from the left; ``size - 1`` steps."""
    left, right = peers.ring(rank, size)
    for k in range(size - 1):
        builder.step(
            recvs=[Recv(left, blocks[(rank - k - 1) % size])],
            sends=[Send(right, blocks[(rank - k) % size])],
            phase=phase,
        )


def hypercube_allgather(
    builder: Builder,
    index: int,
    members: Sequence[int],
    blocks: Sequence[Span],
    *,
    phase: str = "allgather",
) -> None:
    """Exchange all there is with the member at distance 1, 2, 4, …; log2 steps.

    ``members`` are the ranks that take part, a power of two of them; the calling one is
    ``members[index]``, and ``blocks[i]`` is what ``members[i]`` has.
    """
    reach = 1
    while reach < len(members):
        mine = index & -reach
        theirs = mine ^ reach
        peer = members[index ^ reach]
        builder.step(
            recvs=[Recv(peer, joined(blocks[theirs : theirs + reach]))],
            sends=[Send(peer, joined(blocks[mine : mine + reach]))],
            phase=phase,
        )
        reach *= 2


def doubling_allgather(
    builder: Builder, rank: int, size: int, blocks: Sequence[Span], *, phase: str = "allgather"
) -> None:
    """Run the hypercube exchange for any number of ranks, folded to a power of two.

    A rank that waits hands its block to its partner and gets all others at the end.
    """
    place = peers.fold(rank, size)
    if place.partner is not None and place.index is None:
        builder.step(sends=[Send(place.partner, blocks[rank])], phase=phase)
        missing = runs([*blocks[:rank], *blocks[rank + 1 :]])
        builder.step(recvs=[Recv(place.partner, span) for span in missing], phase=phase)
        return
    if place.partner is not None:
        builder.step(recvs=[Recv(place.partner, blocks[place.partner])], phase=phase)
    assert place.index is not None
    indices = range(place.members)
    held = [joined(blocks[slice(*peers.members_of(index, size))]) for index in indices]
    members = [peers.unfold(index, size) for index in indices]
    hypercube_allgather(builder, place.index, members, held, phase=phase)
    if place.partner is not None:
        missing = runs([*blocks[: place.partner], *blocks[place.partner + 1 :]])
        builder.step(sends=[Send(place.partner, span) for span in missing], phase=phase)


def circulant_allgather(
    builder: Builder, rank: int, size: int, blocks: Sequence[Span], *, phase: str = "allgather"
) -> None:
    """Gather from the right over the circulant graph; ``ceil_log2(size)`` steps.

    Before the step with skip s a rank has its own block and those of the s - 1 ranks to
    its right; it gets those that follow from the rank s to the right. Where a range of
    blocks wraps round the end it travels as two messages, so nothing is copied.
    """
    skips = peers.circulant_skips(size)
    for skip, goal in reversed(list(zip(skips, (size, *skips), strict=False))):
        right = (rank + skip) % size
        builder.step(
            recvs=[Recv(right, span) for span in around(blocks, right, goal - skip)],
            sends=[Send((rank - skip) % size, span) for span in around(blocks, rank, goal - skip)],
            phase=phase,
        )

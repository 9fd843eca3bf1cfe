"""Phases that several reductions share; each appends its steps to a Builder.

``own`` and ``inputs`` are what a rank reduces, the whole or by blocks; they may share
memory with the output, which is written only when they are no longer needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpicoll.schedule.ir import WORK, Builder, Copy, Local, Recv, Reduce, Send, Span
from mpicoll.schedule.partition import blocks, cut, joined, runs
from mpicoll.schedule.peers import (
    Folded,
    Halving,
    binomial,
    circulant_skips,
    halvings,
    interval_tree,
    throttled,
    unfold,
)
from mpicoll.schedule.peers import ring as neighbours


def scratch(builder: Builder, count: int) -> Span:
    """Reserve ``count`` elements."""
    start = builder.work(count)
    return Span(WORK, start, start + count)


def head(span: Span, count: int) -> Span:
    """Return the first ``count`` elements of ``span``."""
    return Span(span.buffer, span.start, span.start + count)


def in_order(rank: int, mine: Span, peer: int, theirs: Span) -> tuple[Span, Span]:
    """Return two operands, that of the lower rank first."""
    return (theirs, mine) if peer < rank else (mine, theirs)


def tree_reduce(builder: Builder, rank: int, size: int, root: int, own: Span, out: Span) -> None:
    """Reduce in rank order along the interval tree to ``out`` on root.

    Other ranks do not touch ``out``.
    """
    tree = interval_tree(rank, size, root)
    inbox = scratch(builder, own.count if tree.children else 0)
    sums = out
    if tree.parent is not None:
        sums = scratch(builder, own.count if tree.children else 0)
    source = own
    for child in tree.children:
        builder.step(recvs=[Recv(child, inbox)], phase="reduce")
        operands = in_order(rank, source, child, inbox)
        builder.step(local=[Reduce(sums, operands)], phase="reduce")
        source = sums
    if tree.parent is not None:
        builder.step(sends=[Send(tree.parent, source)], phase="reduce")


def pipeline(
    builder: Builder,
    recvs: Sequence[Sequence[Recv]],
    local: Sequence[Sequence[Local]],
    sends: Sequence[Sequence[Send]],
    phase: str,
) -> None:
    """Receive piece t, work on piece t - 1 and send piece t - 2 in one step."""
    steps = zip([*recvs, (), ()], [(), *local, ()], [(), (), *sends], strict=True)
    for arriving, work, leaving in steps:
        builder.step(recvs=arriving, sends=leaving, local=work, phase=phase)


def ring_reduce_scatter(
    builder: Builder,
    rank: int,
    size: int,
    inputs: Sequence[Span],
    targets: Sequence[Span | None],
    pieces: int,
) -> None:
    """Reduce every block on its way round the ring, from the rank after its owner on.

    Block ``b`` ends on rank ``b`` in ``targets[b]``, piece by piece: one is reduced
    while the next is in flight. ``targets`` of the other blocks hold what passes
    through; those that are None stay in scratch, one block and a piece in all.
    """
    if size == 1:
        return
    left, right = neighbours(rank, size)
    slots = pieces + 1 if None in targets else min(pieces, 2)
    room = max(-(-block.count // pieces) for block in inputs)
    start = builder.work(slots * room)
    arrivals: list[Reduce] = []  # per step: where the message goes, with what, and whither
    for k in range(2, size + 1):
        target = targets[rank - k]
        results = [None] * pieces if target is None else cut(target, pieces)
        for own, result in zip(cut(inputs[rank - k], pieces), results, strict=True):
            inbox = Span(WORK, slot := start + len(arrivals) % slots * room, slot + own.count)
            arrivals.append(Reduce(inbox if result is None else result, (inbox, own)))
    outgoing = cut(inputs[rank - 1], pieces) + [item.target for item in arrivals[:-pieces]]
    late = pieces > 1  # a lone piece is sent on in the next step, so it can not wait
    for t, (source, item) in enumerate(zip(outgoing, arrivals, strict=True)):
        builder.step(
            recvs=[Recv(left, item.operands[0])],
            sends=[Send(right, source)],
            local=[arrivals[t - 1]] if late and t else [],
            phase="reduce-scatter",
        )
        if not late:
            builder.step(local=[item], phase="reduce-scatter")
    if late:
        builder.step(local=[arrivals[-1]], phase="reduce-scatter")


def circulant_reduce_scatter(
    builder: Builder, rank: int, size: int, inputs: Sequence[Span], target: Span
) -> None:
    """Reduce block ``rank`` to ``target`` over the circulant graph of halved skips.

    Before a round with skip s a rank has sums for fewer than 2 s blocks, its own first;
    it sends those from the s-th on s ranks to the right and adds as many that arrive
    to its first ones. Operands must commute. Scratch of about 3/4 of the blocks.
    """
    if size == 1:
        return
    skip, *skips = circulant_skips(size)
    mine = [inputs[(rank + i) % size] for i in range(size)]
    counts = [span.count for span in mine]
    sums = blocks(WORK, counts[:skip], builder.work(sum(counts[:skip])))
    near = runs(mine[: size - skip])
    arrivals = blocks(WORK, [run.count for run in near], sums[0].start)
    left, right = (rank - skip) % size, (rank + skip) % size
    builder.step(
        recvs=[Recv(left, span) for span in arrivals],
        sends=[Send(right, span) for span in runs(mine[skip:])],
        local=[Copy(sums[-1], mine[skip - 1])] if size % 2 else [],
        phase="reduce-scatter",
    )
    goals = arrivals if skips else [target]
    reduces = zip(goals, zip(arrivals, near, strict=True), strict=True)
    builder.step(local=[Reduce(*item) for item in reduces], phase="reduce-scatter")
    inbox = scratch(builder, sum(counts[: skip - skips[0]]) if skips else 0)
    for last, next_skip in pairwise((skip, *skips)):
        kept = joined(sums[: last - next_skip])
        arrival = head(inbox, kept.count)
        builder.step(
            recvs=[Recv((rank - next_skip) % size, arrival)],
            sends=[Send((rank + next_skip) % size, joined(sums[next_skip:last]))],
            phase="reduce-scatter",
        )
        goal = target if next_skip == 1 else kept
        builder.step(local=[Reduce(goal, (kept, arrival))], phase="reduce-scatter")


def direct_reduce_scatter(
    builder: Builder, rank: int, size: int, inputs: Sequence[Span], own: Span, target: Span
) -> None:
    """Send every block to its owner, who folds all of its block from the left into ``target``.

    ``own`` is where this rank's block is for the fold; it may not be ``target``.
    Scratch of a block for every other rank. Messages go out ``peers.IN_FLIGHT`` at a time.
    """
    if size == 1:
        return
    start = builder.work((size - 1) * own.count)
    slots = blocks(WORK, [own.count] * (size - 1), start)
    operands = [*slots[:rank], own, *slots[rank:]]
    for distances in throttled(size):
        builder.step(
            recvs=[Recv((rank - k) % size, operands[(rank - k) % size]) for k in distances],
            sends=[Send((rank + k) % size, inputs[(rank + k) % size]) for k in distances],
            phase="reduce-scatter",
        )
    builder.step(local=[Reduce(target, tuple(operands))], phase="reduce-scatter")


def fold_in(
    builder: Builder, rank: int, place: Folded, own: Span, sums: Span, inbox: Span
) -> Span:
    """Let each waiting rank hand its vector to its partner; return where the sum is."""
    if place.partner is None:
        return own
    if place.index is None:
        builder.step(sends=[Send(place.partner, own)], phase="fold")
        return own
    builder.step(recvs=[Recv(place.partner, inbox)], phase="fold")
    operands = in_order(rank, own, place.partner, inbox)
    builder.step(local=[Reduce(sums, operands)], phase="fold")
    return sums


def fold_out(builder: Builder, place: Folded, out: Span) -> None:
    """Let each partner of a waiting rank hand it the result ``out``."""
    if place.partner is not None:
        if place.index is None:
            builder.step(recvs=[Recv(place.partner, out)], phase="unfold")
        else:
            builder.step(sends=[Send(place.partner, out)], phase="unfold")


def exchanges(place: Folded, size: int, root: int | None = None) -> list[Halving]:
    """Return the halvings of a rank, with ranks as peers; none if it waits."""
    if place.index is None:
        return []
    rounds = halvings(place.index, place.members)
    return [item._replace(peer=unfold(item.peer, size, root)) for item in rounds]


def halving_reduce_scatter(
    builder: Builder,
    rank: int,
    rounds: Sequence[Halving],
    inputs: Sequence[Span],
    targets: Sequence[Span],
    inbox: Span,
) -> None:
    """Exchange halves, then halves of halves, and reduce what is kept in rank order.

    The peers of ``rounds`` are ranks. One of the blocks ends in ``targets``; the others
    there hold what is not yet complete. Both lie densely and may be the same.
    """
    for peer, keep, give in rounds:
        mine = joined(inputs[slice(*keep)])
        arrival = head(inbox, mine.count)
        builder.step(
            recvs=[Recv(peer, arrival)],
            sends=[Send(peer, joined(inputs[slice(*give)]))],
            phase="reduce-scatter",
        )
        goal = joined(targets[slice(*keep)])
        operands = in_order(rank, mine, peer, arrival)
        builder.step(local=[Reduce(goal, operands)], phase="reduce-scatter")
        inputs = targets


def tree_bcast(builder: Builder, rank: int, size: int, root: int, span: Span) -> None:
    """Send ``span`` down the binomial tree."""
    tree = binomial(rank, size, root)
    if tree.parent is not None:
        builder.step(recvs=[Recv(tree.parent, span)], phase="broadcast")
    for child, _, _ in tree.children:
        builder.step(sends=[Send(child, span)], phase="broadcast")


def prefix_folds(
    builder: Builder, rank: int, size: int, own: Span, out: Span, *, exclusive: bool
) -> None:
    """Let the owner of each block fold it for every rank, and send each rank its fold.

    Rank r gets the fold over ranks 0 to r in ``out``, or to r - 1 if ``exclusive``; rank 0
    then gets nothing. Every fold starts at rank 0 and is done in one go. Scratch of two
    vectors.
    """
    inputs, outs = cut(own, size), cut(out, size)
    mine = inputs[rank].count
    slots = blocks(WORK, [mine] * size, builder.work(size * mine))
    folds = blocks(WORK, [mine] * size, builder.work(size * mine))
    builder.step(local=[Copy(slots[rank], inputs[rank])])
    for distances in throttled(size):
        lefts = [(rank - k) % size for k in distances]
        rights = [(rank + k) % size for k in distances]
        builder.step(
            recvs=[Recv(left, slots[left]) for left in lefts],
            sends=[Send(right, inputs[right]) for right in rights],
            phase="gather",
        )
    last = size - 1 if exclusive else size
    local: list[Local] = []
    for count in range(1, last + 1):
        reader = count if exclusive else count - 1
        fold = outs[rank] if reader == rank else folds[reader]
        local.append(Copy(fold, slots[0]) if count == 1 else Reduce(fold, tuple(slots[:count])))
    builder.step(local=local, phase="reduce")
    for distances in throttled(size):
        lefts = [(rank - k) % size for k in distances]
        rights = [(rank + k) % size for k in distances]
        builder.step(
            recvs=[Recv(left, outs[left]) for left in lefts if rank or not exclusive],
            sends=[Send(right, folds[right]) for right in rights if right or not exclusive],
            phase="scatter",
        )

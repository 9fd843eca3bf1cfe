"""Exscan: every rank but the first gets the reduction of the vectors of all ranks before it."""

from __future__ import annotations

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
from mpicoll.schedule.partition import segments


@algorithm("exscan", "recursive_doubling", order="rank")
def recursive_doubling(call: Call) -> Schedule:
    """Scan by doubling, keeping beside the sum that is sent the one without this rank.

    Steps: lg
    Sent: N * lg

    After step k the result is over the ``2**(k+1) - 1`` ranks before this one, in rank
    order, whatever P is. The output of rank 0 is not touched. Scratch of two vectors.
    Good for short vectors.

    Source: P. M. Kogge, H. S. Stone, "A Parallel Algorithm for the Efficient Solution of
    a General Class of Recurrence Equations", IEEE Transactions on Computers C-22 (1973).
    """
    builder = Builder()
    source, out = Span(INPUT, 0, call.count), Span(OUTPUT, 0, call.count)
    inbox = _phases.scratch(builder, call.count if call.rank else 0)
    sums = _phases.scratch(builder, call.count if call.rank else 0)
    distance = 1
    while distance < call.size:
        left, right = call.rank - distance, call.rank + distance
        builder.step(
            recvs=[Recv(left, inbox)] if left >= 0 else [],
            sends=[Send(right, source)] if right < call.size else [],
        )
        if left >= 0:
            local: list[Local] = []
            if call.rank + 2 * distance < call.size:
                local.append(Reduce(sums, (inbox, source)))
                source = sums
            local.append(Copy(out, inbox) if distance == 1 else Reduce(out, (inbox, out)))
            builder.step(local=local)
        distance *= 2
    return builder.build()


@algorithm("exscan", "linear", order="rank", segmented=True)
def linear(call: Call) -> Schedule:
    """Pass segments from rank to rank, each keeping a copy and adding its own.

    Steps: min(S * (P - 1), 2 * S, S + 2)
    Sent: N

    A rank receives a segment, works on the one before and sends the one before that in
    one step. A segment takes two steps per hop, and the last rank is P - 1 hops away.
    Operands are folded from the left in rank order. The output of rank 0 is not
    touched. Scratch of four segments. Good for long vectors in many segments on few
    ranks.

    Source: MPI: A Message-Passing Interface Standard, version 4.1, section 6.11, whose
    definition it follows; the pipeline is that of J. Pješivac-Grbović et al.,
    "Performance Analysis of MPI Collective Operations", Cluster Computing 10 (2007).
    """
    builder = Builder()
    own, out = Span(INPUT, 0, call.count), Span(OUTPUT, 0, call.count)
    mine, outs = segments(own, call.segment), segments(out, call.segment)
    room = mine[0].count
    start = builder.work(4 * room if call.rank else 0)
    recvs: list[list[Recv]] = []
    local: list[list[Local]] = []
    sends: list[list[Send]] = []
    for t, (source, target) in enumerate(zip(mine, outs, strict=True)):
        inbox = Span(WORK, slot := start + t % 2 * room, slot + source.count)
        total = Span(WORK, slot := slot + 2 * room, slot + source.count)
        passes = call.rank + 1 < call.size
        recvs.append([Recv(call.rank - 1, inbox)] if call.rank else [])
        local.append([])
        if call.rank:
            if passes:
                local[t].append(Reduce(total, (inbox, source)))
                source = total
            local[t].append(Copy(target, inbox))
        sends.append([Send(call.rank + 1, source)] if passes else [])
    _phases.pipeline(builder, recvs, local, sends, "")
    return builder.build()


@algorithm("exscan", "direct", order="sequential")
def direct(call: Call) -> Schedule:
    """Send every block to its owner, which folds it for every rank and sends the folds out.

    Steps: 2 * ceil((P - 1) / 32)
    Sent: 2 * (P - 1) * N / P

    Every element is one fold over ranks from rank 0 on, as a loop over ranks has it, and a
    wide accumulator is rounded once. At most 32 messages are in flight in each direction.
    Scratch of two vectors; each rank reduces about P / 2 vectors. Good where bits count.

    Source: two all-to-alls by pairwise exchange, posted together: R. Thakur,
    R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
    MPICH", International Journal of High Performance Computing Applications 19 (2005).
    """
    builder = Builder()
    own, out = Span(INPUT, 0, call.count), Span(OUTPUT, 0, call.count)
    _phases.prefix_folds(builder, call.rank, call.size, own, out, exclusive=True)
    return builder.build()

"""Alltoall: every rank gets from each rank the block that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    Schedule,
    Send,
    Span,
)
from mpicoll.schedule.partition import blocks, joined, runs


@algorithm("alltoall", "linear")
def linear(call: Call) -> Schedule:
    """Exchange with 32 ranks at a time in each direction, all messages posted at once.

    Steps: ceil((P - 1) / 32)
    Sent: N * (P - 1) / P

    Distances go up from 1 on all ranks, so no rank is everyone's first target.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    return _direct(call, peers.throttled(call.size))


@algorithm("alltoall", "pairwise")
def pairwise(call: Call) -> Schedule:
    """Send to the rank at distance k to the right and receive from the left, k = 1, 2, ….

    Steps: P - 1
    Sent: N * (P - 1) / P

    At any time every rank has one sender and one receiver. Good for long blocks.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", International Journal of High Performance
    Computing Applications 19 (2005).
    """
    return _direct(call, [range(k, k + 1) for k in range(1, call.size)])


@algorithm("alltoall", "bruck", uniform=True)
def bruck(call: Call) -> Schedule:
    """Move every block by the digits of its distance in base ``radix``, one digit a step.

    Steps: ceil(log(P, R) - 1e-9)
    Sent: N / P * sum(j // R**k % R > 0 for j in range(P) for k in range(lg))

    Good for short blocks on many ranks. In a step go messages to radix - 1 ranks, each of
    all blocks with that digit, packed; above radix 33 a step is cut to 32 messages. With
    the radix at P or above it is the linear algorithm. Work memory is what is sent in one
    step and received in all, at most N * (lg + 1) / 2 for radix 2.

    Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient Algorithms
    for All-to-All Communications in Multiport Message-Passing Systems", IEEE Transactions
    on Parallel and Distributed Systems 8 (1997).
    """
    block = call.counts[0]
    counts = [(block,) * len(hop.slots) for hop in _hops(call.size, call.radix)]
    return _bruck(call, call.radix, counts)


@algorithm("alltoall", "two_phase_bruck", knows="transit")
def two_phase_bruck(call: Call) -> Schedule:
    """Send the sizes of blocks along Bruck's route, then the blocks; this is the second phase.

    Steps: lg
    Sent: N / P * sum(j >> k & 1 for j in range(P) for k in range(lg))

    Good for short blocks of uneven counts on many ranks. ``Call.transit`` has what the
    first phase, `transit_schedule`, brought. Work memory is the most that is sent in
    one step and all that is received.

    Source: K. Fan, T. Gilray, V. Pascucci, X. Huang, K. Micinski, S. Kumar, "Optimizing
    the Bruck Algorithm for Non-uniform All-to-all Communication", High-Performance
    Parallel and Distributed Computing (2022).
    """
    return _bruck(call, 2, call.transit)


def transit_schedule(rank: int, size: int) -> Schedule:
    """Return the schedule that sends counts along the route of `two_phase_bruck`.

    INPUT has ``size`` elements, the counts of the blocks to send. OUTPUT ends with the
    counts of the blocks that will arrive, message by message; see `transit_from`.
    """
    builder = Builder()
    slots = blocks(INPUT, [1] * size)
    slots = slots[rank:] + slots[:rank]
    arrivals = []
    start = 0
    for hop in _hops(size, 2):
        arrivals.append(blocks(OUTPUT, [1] * len(hop.slots), start))
        start += len(hop.slots)
    _travel(builder, rank, size, 2, slots, arrivals)
    return builder.build()


def transit_from(size: int, received: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return ``Call.transit`` from what `transit_schedule` left in OUTPUT.

    It has, for every message that a rank receives, the counts of the blocks in it.
    """
    bounds = blocks(OUTPUT, [len(hop.slots) for hop in _hops(size, 2)])
    return tuple(tuple(received[span.start : span.stop]) for span in bounds)


def transit(call: Call, count_of: Callable[[int, int], int]) -> Call:
    """Return ``call`` with the transit that follows from the counts of all ranks.

    ``count_of(source, target)`` is the count of the block from ``source`` to ``target``.
    """
    rank, size = call.rank, call.size
    arriving = []
    for hop in _hops(size, 2):
        # What has moved by the digits so far comes from that far to the left.
        sources = [(rank - slot % (2 * hop.distance)) % size for slot in hop.slots]
        targets = [(source + slot) % size for source, slot in zip(sources, hop.slots, strict=True)]
        arriving.append(tuple(map(count_of, sources, targets)))
    return replace(call, transit=tuple(arriving))


class _Hop(NamedTuple):
    """One message of Bruck's exchange: how far to the right, and the slots it carries.

    Slot j of a rank holds the block that is on its way to j ranks to the right of its
    source. It moves by one digit of j at a time, so its distance is done in the end.
    """

    step: int
    distance: int
    slots: list[int]


def _hops(size: int, radix: int) -> Iterator[_Hop]:
    """Yield the messages that every rank sends, step by step."""
    step = 0
    weight = 1
    while weight < size:
        for digits in peers.throttled(min(radix, -(-size // weight))):
            for digit in digits:
                lows = range(digit * weight, size, radix * weight)
                slots = [slot for low in lows for slot in range(low, min(low + weight, size))]
                yield _Hop(step, digit * weight, slots)
            step += 1
        weight *= radix


def _bruck(call: Call, radix: int, arriving: Sequence[Sequence[int]]) -> Schedule:
    """Return Bruck's exchange, where ``arriving`` has the counts of every message's blocks."""
    builder = Builder()
    rank, size = call.rank, call.size
    homes = blocks(OUTPUT, call.recv_counts)
    homes = [homes[(rank - slot) % size] for slot in range(size)]
    slots = blocks(INPUT, call.counts)
    slots = slots[rank:] + slots[:rank]
    arrivals = []
    for hop, counts in zip(_hops(size, radix), arriving, strict=True):
        if len(hop.slots) == 1:  # comes straight from its source
            arrivals.append([homes[hop.slots[0]]])
        else:
            arrivals.append(blocks(WORK, counts, builder.work(sum(counts))))
    _travel(builder, rank, size, radix, slots, arrivals)
    builder.step(
        local=[Copy(*pair) for pair in zip(homes, slots, strict=True) if pair[0] != pair[1]],
        phase="unpack",
    )
    return builder.build()


def _travel(
    builder: Builder,
    rank: int,
    size: int,
    radix: int,
    slots: list[Span],
    arrivals: Sequence[Sequence[Span]],
) -> None:
    """Append the steps of Bruck's exchange.

    ``slots`` says where the blocks lie, and is kept up to date; ``arrivals`` where those
    of every message go, one after the other. Those to send are packed first, unless they
    lie so.
    """
    steps: list[list[tuple[int, list[Span], Span]]] = []
    for hop, places in zip(_hops(size, radix), arrivals, strict=True):
        if hop.step == len(steps):
            steps.append([])
        parts = runs([slots[slot] for slot in hop.slots if slots[slot].count])
        steps[-1].append((hop.distance, parts, joined(places)))
        for slot, place in zip(hop.slots, places, strict=True):
            slots[slot] = place
    packed = [[part for _, parts, _ in step if len(parts) > 1 for part in parts] for step in steps]
    start = builder.work(max((sum(part.count for part in step) for step in packed), default=0))
    for step, loose in zip(steps, packed, strict=True):
        targets = blocks(WORK, [part.count for part in loose], start)
        builder.step(local=map(Copy, targets, loose), phase="pack")
        sends = []
        for distance, parts, _ in step:
            if len(parts) > 1:
                parts, targets = targets[: len(parts)], targets[len(parts) :]
            sends += [Send((rank + distance) % size, joined(parts))] if parts else []
        recvs = [Recv((rank - distance) % size, target) for distance, _, target in step]
        builder.step(recvs=recvs, sends=sends, phase="alltoall")


def _direct(call: Call, batches: list[range]) -> Schedule:
    """Return a schedule with a step per batch of distances between sender and receiver."""
    builder = Builder()
    sources, targets = blocks(INPUT, call.counts), blocks(OUTPUT, call.recv_counts)
    local = [Copy(targets[call.rank], sources[call.rank])]
    for distances in batches or [range(0)]:
        lefts = [(call.rank - k) % call.size for k in distances]
        rights = [(call.rank + k) % call.size for k in distances]
        builder.step(
            recvs=[Recv(left, targets[left]) for left in lefts],
            sends=[Send(right, sources[right]) for right in rights],
            local=local,
            phase="alltoall",
        )
        local = []
    return builder.build()

"""Who talks to whom: rings, hypercubes, circulant graphs, binomial and folded groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


def ring(rank: int, size: int) -> tuple[int, int]:
    """Return the ranks to the left and to the right on the ring."""
    return (rank - 1) % size, (rank + 1) % size


IN_FLIGHT = 32  #: peers that a rank exchanges messages with at once, at most


def throttled(size: int) -> list[range]:
    """Return the distances from a rank to all others, in batches of ``IN_FLIGHT``."""
    firsts = range(1, size, IN_FLIGHT)
    return [range(first, min(first + IN_FLIGHT, size)) for first in firsts]


def ceil_log2(size: int) -> int:
    """Return the least k with ``2**k >= size``."""
    return (size - 1).bit_length()


def floor_log2(size: int) -> int:
    """Return the greatest k with ``2**k <= size``."""
    return size.bit_length() - 1


def circulant_skips(size: int) -> tuple[int, ...]:
    """Return the skips of Träff's circulant graph: size halved, rounded up, down to 1.

    For 22 ranks: 11, 6, 3, 2, 1. There are ``ceil_log2(size)`` of them.

    Source: J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce
    Algorithms", arXiv:2410.14234.
    """
    skips = []
    while size > 1:
        size = -(-size // 2)
        skips.append(size)
    return tuple(skips)


def circulant_blocks(rank: int, size: int) -> tuple[int, ...]:
    """Return the block that ``rank`` gets from rank 0, round by round of one phase.

    A phase has a round per skip, the shortest first; in round b rank 0 sends the phase's
    block b. Every rank gets one block of this phase, its own, and all others, but for its
    own, of the phase before; those are counted from its end, as -1, -2, …. Empty for
    rank 0.

    A block's origin is the rank whose own it is. For round k one is searched to the left,
    between the skips of rounds k and k + 1 away, whose block is still missing.

    Source: J. L. Träff, "Optimal Broadcast Schedules in Logarithmic Time with Applications
    to Broadcast, All-Broadcast, Reduction and All-Reduction", arXiv:2407.18004.
    """
    if rank == 0:
        return ()
    rounds = ceil_log2(size)
    skips = (*reversed(circulant_skips(size)), size, 2 * size)
    own = rounds
    rest = rank
    for block in reversed(range(rounds)):
        if rest >= skips[block]:
            rest -= skips[block]
            own = block
    missing = [block for block in range(rounds + 1) if block != own]
    found: list[int] = []
    right = size + rank  # positions of ranks from 0 to here, once round the circle
    latest = right

    def search(place: int, highest: int) -> None:
        """Take blocks of the ranks reached from ``place`` by skips of ``highest`` and less."""
        nonlocal latest
        for block in range(highest, -1, -1):
            k = len(found)
            there = place + skips[block]
            if block not in missing or there >= latest or there > right - skips[k]:
                continue
            if there <= right - skips[k + 1]:
                search(there, block - 1)
            if place > right - skips[len(found) + 1]:
                return
            found.append(block)
            missing.remove(block)
            latest = there

    search(0, rounds)
    return tuple(own if block == rounds else block - rounds for block in found)


class Tree(NamedTuple):
    """One rank's place in a binomial tree; children in the order of a broadcast.

    A child is (rank, first, last): the relative ranks ``first`` to ``last - 1`` are its
    subtree. ``last`` bounds this rank's own subtree, which starts at ``relative``.
    """

    relative: int
    parent: int | None
    children: tuple[tuple[int, int, int], ...]
    last: int


def binomial(rank: int, size: int, root: int) -> Tree:
    """Return the place of ``rank`` in the binomial tree over all ranks from ``root``.

    Subtrees are contiguous in relative rank ``(rank - root) % size``, the largest child
    first, so gathered blocks stay in order.
    """
    relative = (rank - root) % size
    reach = 1 << ceil_log2(size)
    parent = None
    if relative:
        reach = relative & -relative
        parent = (relative - reach + root) % size
    children = []
    step = reach >> 1
    while step:
        first = relative + step
        if first < size:
            children.append(((first + root) % size, first, min(first + step, size)))
        step >>= 1
    return Tree(relative, parent, tuple(children), min(relative + reach, size))


@dataclass(frozen=True, slots=True)
class Folded:
    """One rank's place after folding the group to a power of two.

    The first ``2 * (size - members)`` ranks form neighbouring pairs; the even one hands
    its data to the odd one and waits for the result. ``index`` is None for those that
    wait. Pairs are neighbours and members keep their order, so rank order survives.
    """

    members: int
    index: int | None
    partner: int | None


def fold(rank: int, size: int, root: int | None = None) -> Folded:
    """Return the place of ``rank`` in the folded group.

    With a ``root`` the pairs are moved so that, if there are any, the root is in one,
    and is the one of the two that does not wait.
    """
    members = 1 << floor_log2(size)
    extra = size - members
    first = _first_pair(size, root)
    place = rank - first
    if place < 0:
        return Folded(members, rank, None)
    if place >= 2 * extra:
        return Folded(members, rank - extra, None)
    partner = first + (place ^ 1)
    waits = partner == root or (rank != root and place % 2 == 0)
    return Folded(members, None if waits else first + place // 2, partner)


def unfold(index: int, size: int, root: int | None = None) -> int:
    """Return the rank of member ``index`` of the folded group."""
    extra = size - (1 << floor_log2(size))
    first = _first_pair(size, root)
    if index < first:
        return index
    if index >= first + extra:
        return index + extra
    even = 2 * index - first
    return even if even == root else even + 1


def _first_pair(size: int, root: int | None) -> int:
    """Return the rank at which the pairs of the folded group begin."""
    pairs = size - (1 << floor_log2(size))
    return 0 if root is None else min(root, size - 2 * pairs)


def members_of(index: int, size: int) -> tuple[int, int]:
    """Return the range (first, last + 1) of ranks whose data member ``index`` holds."""
    rank = unfold(index, size)
    return (rank - 1 if rank < 2 * (size - (1 << floor_log2(size))) else rank), rank + 1


class IntervalTree(NamedTuple):
    """One rank's place in a tree that joins neighbouring intervals of ranks.

    ``children`` are in the order in which they are joined. All ranks of a child come
    before this rank's interval so far if the child is lower than this rank, else after.
    """

    parent: int | None
    children: tuple[int, ...]


def interval_tree(rank: int, size: int, root: int) -> IntervalTree:
    """Return the place of ``rank`` in the tree that halves the ranks down to single ones.

    The larger half of an interval comes first, so the depth is ``ceil_log2(size)``. An
    interval is led by the root if it holds it, else by its first rank; of its two
    halves one has the same leader, the other's leader is the child. The halves do not
    depend on the root, so neither does the bracketing of a reduction.
    """
    first, last, leader = 0, size, root
    parent: int | None = None
    children: list[int] = []
    while last - first > 1:
        middle = first + -(-(last - first) // 2)
        halves = (first, middle), (middle, last)
        near, far = halves if leader < middle else halves[::-1]
        if near[0] <= rank < near[1]:
            if rank == leader:
                children.append(far[0])
            first, last = near
        else:
            if rank == far[0]:
                parent = leader
            first, last = far
            leader = far[0]
    return IntervalTree(parent, tuple(reversed(children)))


class Halving(NamedTuple):
    """One exchange of recursive halving: the blocks kept and given, as (first, last + 1).

    ``peer`` keeps what is given and gives what is kept.
    """

    peer: int
    keep: tuple[int, int]
    give: tuple[int, int]


def halvings(index: int, members: int) -> list[Halving]:
    """Return the exchanges that leave member ``index`` one of ``members`` blocks.

    The first is with the neighbour, and distances double, so each joins neighbouring
    intervals of members and their order is kept. The block left is the one at
    ``bit_reversed(index, members)``. Backwards, giving what is kept, they are recursive
    doubling.
    """
    rounds = []
    first, last = 0, members
    distance = 1
    while distance < members:
        middle = (first + last) // 2
        low, high = (first, middle), (middle, last)
        keep, give = (high, low) if index & distance else (low, high)
        rounds.append(Halving(index ^ distance, keep, give))
        first, last = keep
        distance *= 2
    return rounds


def bit_reversed(index: int, members: int) -> int:
    """Return ``index`` with its ``floor_log2(members)`` bits in the opposite order."""
    place = 0
    for _ in range(floor_log2(members)):
        place = 2 * place + index % 2
        index //= 2
    return place

"""Who talks to whom: rings, hypercubes, circulant graphs, binomial and folded groups."""

from __future__ import annotations

from typing import NamedTuple


def ring(rank: int, size: int) -> tuple[int, int]:
    """Return the ranks to the left and to the right on the ring."""
    return (rank - 1) % size, (rank + 1) % size


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


class Folded(NamedTuple):
    """One rank's place after folding the group to a power of two.

    The first ``2 * (size - members)`` ranks form neighbouring pairs; the even one hands
    its data to the odd one and waits for the result. ``index`` is None for those that
    wait. Pairs are neighbours and members keep their order, so rank order survives.
    """

    members: int
    index: int | None
    partner: int | None


def fold(rank: int, size: int) -> Folded:
    """Return the place of ``rank`` in the folded group."""
    members = 1 << floor_log2(size)
    extra = size - members
    if rank >= 2 * extra:
        return Folded(members, rank - extra, None)
    if rank % 2:
        return Folded(members, rank // 2, rank - 1)
    return Folded(members, None, rank + 1)


def unfold(index: int, size: int) -> int:
    """Return the rank of member ``index`` of the folded group."""
    extra = size - (1 << floor_log2(size))
    return 2 * index + 1 if index < extra else index + extra


def members_of(index: int, size: int) -> tuple[int, int]:
    """Return the range (first, last + 1) of ranks whose data member ``index`` holds."""
    rank = unfold(index, size)
    return (rank - 1 if rank < 2 * (size - (1 << floor_log2(size))) else rank), rank + 1

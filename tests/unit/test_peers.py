"""Peer arithmetic, for all group sizes up to 130."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from mpicoll.schedule.peers import (
    IN_FLIGHT,
    IntervalTree,
    binomial,
    bit_reversed,
    ceil_log2,
    circulant_blocks,
    circulant_skips,
    floor_log2,
    fold,
    halvings,
    interval_tree,
    members_of,
    ring,
    throttled,
    unfold,
)

SIZES = range(1, 131)


def roots(size: int) -> list[int]:
    return list(range(size)) if size <= 17 else [0, 1, size // 2, size - 2, size - 1]


def test_ring() -> None:
    for size in SIZES:
        for rank in range(size):
            left, right = ring(rank, size)
            assert ring(left, size)[1] == rank == ring(right, size)[0]
    assert ring(0, 5) == (4, 1)


def test_logarithms() -> None:
    for size in SIZES:
        assert ceil_log2(size) == math.ceil(math.log2(size))
        assert floor_log2(size) == math.floor(math.log2(size))


def test_throttled_distances() -> None:
    for size in SIZES:
        batches = throttled(size)
        assert [k for batch in batches for k in batch] == list(range(1, size))
        assert all(0 < len(batch) <= IN_FLIGHT for batch in batches)
        assert len(batches) == math.ceil((size - 1) / IN_FLIGHT)


def test_circulant_skips() -> None:
    assert circulant_skips(22) == (11, 6, 3, 2, 1)
    assert circulant_skips(1) == ()
    for size in SIZES:
        skips = circulant_skips(size)
        assert len(skips) == ceil_log2(size)
        assert all(small == -(-large // 2) for large, small in pairwise((size, *skips)))


def test_circulant_skips_cover() -> None:
    """Every distance is a sum of some of the skips, and doubling leaves no gap."""
    for size in SIZES:
        reached = {0}
        for skip in circulant_skips(size):
            reached |= {distance + skip for distance in reached}
        assert reached >= set(range(size))
        for skip, held in pairwise((*reversed(circulant_skips(size)), size)):
            assert skip < held <= 2 * skip


def test_circulant_blocks() -> None:
    """A rank gets each block once, and what it is to get its neighbour has by then."""
    for size in SIZES:
        rounds = ceil_log2(size)
        skips = circulant_skips(size)[::-1]
        gets = [circulant_blocks(rank, size) for rank in range(size)]
        assert gets[0] == ()
        for rank in range(1, size):
            (own,) = [block for block in gets[rank] if block >= 0]
            assert sorted(gets[rank]) == sorted(
                block if block == own else block - rounds for block in range(rounds)
            )
            for k, block in enumerate(gets[rank]):
                sender = (rank - skips[k]) % size
                if sender == 0:
                    assert block == k
                elif block >= 0:
                    assert block in gets[sender][:k]
                else:
                    earlier = max(gets[sender]) - rounds
                    assert block in gets[sender][:k] or block == earlier


def test_binomial_parents_and_children() -> None:
    for size in SIZES:
        for root in roots(size):
            trees = [binomial(rank, size, root) for rank in range(size)]
            assert trees[root].parent is None
            assert (trees[root].relative, trees[root].last) == (0, size)
            found = {root}
            for rank, tree in enumerate(trees):
                assert tree.relative == (rank - root) % size
                for child, first, last in tree.children:
                    assert trees[child].parent == rank
                    assert (trees[child].relative, trees[child].last) == (first, last)
                    assert child not in found
                    found.add(child)
            assert found == set(range(size))


def test_binomial_subtrees_are_contiguous() -> None:
    for size in SIZES:
        for rank in range(size):
            tree = binomial(rank, size, 0)
            end = tree.relative + 1
            for _, first, last in reversed(tree.children):
                assert first == end
                assert last > first
                end = last
            assert end == tree.last
            assert len(tree.children) <= ceil_log2(size)
            # Largest first; only the last ranks can make a larger one smaller.
            spans = [last - first for _, first, last in tree.children if last < size]
            assert spans == sorted(spans, reverse=True)


def test_binomial_depth() -> None:
    for size in SIZES:
        for rank in range(size):
            depth = 0
            parent = binomial(rank, size, 0).parent
            while parent is not None:
                depth += 1
                parent = binomial(parent, size, 0).parent
            assert depth == rank.bit_count() <= ceil_log2(size)


@pytest.mark.parametrize("rooted", [False, True])
def test_fold(rooted: bool) -> None:
    for size in SIZES:
        for root in roots(size) if rooted else [None]:
            places = [fold(rank, size, root) for rank in range(size)]
            members = places[0].members
            assert members == 1 << floor_log2(size)
            stay = [rank for rank, place in enumerate(places) if place.index is not None]
            assert [places[rank].index for rank in stay] == list(range(members))
            assert [unfold(index, size, root) for index in range(members)] == stay
            waiting = [rank for rank, place in enumerate(places) if place.index is None]
            assert len(waiting) == size - members
            for rank in waiting:
                partner = places[rank].partner
                assert partner is not None
                assert abs(partner - rank) == 1
                assert places[partner].partner == rank
                assert places[partner].index is not None
            paired = [rank for rank, place in enumerate(places) if place.partner is not None]
            assert len(paired) == 2 * len(waiting)
            if root is not None:
                assert places[root].index is not None
                assert not waiting or root in paired


def test_folding_keeps_the_order_of_ranks() -> None:
    """Members hold intervals of ranks that follow one another."""
    for size in SIZES:
        members = fold(0, size).members
        held = [members_of(index, size) for index in range(members)]
        assert held[0][0] == 0
        assert held[-1][1] == size
        assert all(one[1] == two[0] for one, two in pairwise(held))
        for index, (first, last) in enumerate(held):
            rank = unfold(index, size)
            partner = fold(rank, size).partner
            assert set(range(first, last)) == {rank, partner} - {None}


def join(trees: list[IntervalTree], rank: int) -> tuple[int, int, int, str]:
    """Return the interval that ``rank`` joins, the rounds it takes and its bracketing."""
    first, last, rounds, shape = rank, rank + 1, 0, "."
    for child in trees[rank].children:
        assert trees[child].parent == rank
        low, high, depth, other = join(trees, child)
        if child < rank:
            assert high == first
            first, shape = low, f"({other}{shape})"
        else:
            assert low == last
            last, shape = high, f"({shape}{other})"
        rounds = max(rounds, depth) + 1
    return first, last, rounds, shape


def test_interval_tree() -> None:
    """Children are joined to neighbouring intervals, up to all ranks, alike for all roots."""
    for size in SIZES:
        shapes = set()
        for root in roots(size):
            trees = [interval_tree(rank, size, root) for rank in range(size)]
            assert trees[root].parent is None
            first, last, rounds, shape = join(trees, root)
            assert (first, last, rounds) == (0, size, ceil_log2(size))
            shapes.add(shape)
        assert len(shapes) == 1


def test_halvings() -> None:
    for members in (1, 2, 4, 8, 16, 32, 64, 128):
        rounds = [halvings(index, members) for index in range(members)]
        joined = [(index, index + 1) for index in range(members)]
        kept = [(0, members)] * members
        for k in range(floor_log2(members)):
            before = list(joined)
            for index in range(members):
                peer, keep, give = rounds[index][k]
                assert rounds[peer][k] == (index, give, keep)
                assert keep[1] - keep[0] == give[1] - give[0]
                assert sorted([keep, give]) == [
                    (kept[index][0], max(keep[0], give[0])),
                    (min(keep[1], give[1]), kept[index][1]),
                ]
                kept[index] = keep
                low, high = sorted([before[index], before[peer]])
                assert low[1] == high[0]  # neighbours, so the order of members is kept
                joined[index] = low[0], high[1]
        assert set(joined) == {(0, members)}
        places = [bit_reversed(index, members) for index in range(members)]
        assert kept == [(place, place + 1) for place in places]


def test_bit_reversed() -> None:
    assert [bit_reversed(index, 8) for index in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]
    for members in (1, 2, 64, 128):
        for index in range(members):
            assert bit_reversed(bit_reversed(index, members), members) == index

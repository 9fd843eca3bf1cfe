"""Blocks and segments: they cover what they cut, in order, and all ranks cut alike."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Span
from mpicoll.schedule.partition import (
    around,
    blocks,
    cut,
    joined,
    offsets,
    pieces,
    runs,
    segments,
    split,
)

COUNTS = (0, 1, 2, 3, 7, 8, 9, 100, 100_003)


def elements(spans: list[Span]) -> list[int]:
    return [i for span in spans for i in range(span.start, span.stop)]


@pytest.mark.parametrize("count", COUNTS)
def test_split(count: int) -> None:
    for number in range(1, 131):
        counts = split(count, number)
        assert len(counts) == number
        assert sum(counts) == count
        assert max(counts) - min(counts) <= 1
        assert list(counts) == sorted(counts, reverse=True)


def test_split_of_ten_in_four() -> None:
    assert split(10, 4) == (3, 3, 2, 2)


def test_offsets() -> None:
    assert offsets((3, 0, 2)) == (0, 3, 3, 5)
    assert offsets(()) == (0,)


def test_blocks_lie_densely() -> None:
    assert blocks(OUTPUT, (3, 0, 2), 10) == [
        Span(OUTPUT, 10, 13),
        Span(OUTPUT, 13, 13),
        Span(OUTPUT, 13, 15),
    ]
    assert blocks(INPUT, ()) == []


@pytest.mark.parametrize("count", COUNTS[:-1])
@pytest.mark.parametrize("segment", [0, 1, 2, 7, 8, 99, 1000])
def test_segments(count: int, segment: int) -> None:
    span = Span(WORK, 5, 5 + count)
    parts = segments(span, segment)
    assert elements(parts) == elements([span])
    assert len(parts) == pieces(count, segment)
    assert all(part.buffer is WORK for part in parts)
    assert not segment or all(part.count <= segment for part in parts)
    counts = [part.count for part in parts]
    assert max(counts) - min(counts) <= 1
    assert [part.count for part in segments(Span(INPUT, 90, 90 + count), segment)] == counts


@pytest.mark.parametrize("segment", [-1, 0])
def test_no_segment_is_one_piece(segment: int) -> None:
    assert segments(Span(INPUT, 0, 9), segment) == [Span(INPUT, 0, 9)]
    assert pieces(9, segment) == 1


@pytest.mark.parametrize("count", COUNTS[:-1])
@pytest.mark.parametrize("number", [1, 2, 3, 8, 130])
def test_cut(count: int, number: int) -> None:
    span = Span(INPUT, 2, 2 + count)
    parts = cut(span, number)
    assert [part.count for part in parts] == list(split(count, number))
    assert elements(parts) == elements([span])


def test_joined_is_the_inverse_of_cut() -> None:
    span = Span(OUTPUT, 3, 20)
    for number in range(1, 30):
        assert joined(cut(span, number)) == span


def test_runs_join_neighbours() -> None:
    first, second, third = blocks(INPUT, (2, 3, 4))
    assert runs([]) == []
    assert runs([first, second, third]) == [Span(INPUT, 0, 9)]
    assert runs([second, third, first]) == [Span(INPUT, 2, 9), first]
    assert runs([first, third]) == [first, third]
    assert runs([first, Span(OUTPUT, 2, 5)]) == [first, Span(OUTPUT, 2, 5)]


@pytest.mark.parametrize("counts", [(2, 3, 4, 1), (0, 2, 0, 1), (1,)])
def test_around(counts: tuple[int, ...]) -> None:
    dense = blocks(WORK, counts)
    for first in range(len(dense)):
        for number in range(1, len(dense) + 1):
            spans = around(dense, first, number)
            there = [dense[(first + i) % len(dense)] for i in range(number)]
            assert elements(spans) == elements(there)
            assert len(spans) <= 2
            assert all(one.stop != two.start for one, two in pairwise(spans))

"""How a vector is cut into blocks and a block into segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpicoll.schedule.ir import Buffer, Span


def split(count: int, blocks: int) -> tuple[int, ...]:
    """Return ``blocks`` counts that add up to ``count`` and differ by at most one.

    The longer ones come first, so every rank can compute every bound.
    """
    quotient, longer = divmod(count, blocks)
    return (quotient + 1,) * longer + (quotient,) * (blocks - longer)


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the start of each block, and after the last one the total."""
    return (0, *accumulate(counts))


def blocks(buffer: Buffer, counts: Sequence[int], start: int = 0) -> list[Span]:
    """Return the spans of blocks of ``counts`` that lie densely from ``start`` on."""
    bounds = offsets(counts)
    return [
        Span(buffer, start + low, start + high)
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]


def segments(span: Span, segment: int) -> list[Span]:
    """Cut ``span`` into pieces of at most ``segment`` elements; 0 leaves it whole.

    The number of pieces depends on ``span.count`` and ``segment`` only, so the two ends
    of a message cut alike. An empty span is one empty piece.
    """
    if segment <= 0 or span.count <= segment:
        return [span]
    return cut(span, -(-span.count // segment))


def cut(span: Span, pieces: int) -> list[Span]:
    """Cut ``span`` into exactly ``pieces`` nearly equal spans, some maybe empty."""
    return blocks(span.buffer, split(span.count, pieces), span.start)


def pieces(count: int, segment: int) -> int:
    """Return how many segments a block of ``count`` elements has; at least 1."""
    return max(1, -(-count // segment)) if segment > 0 else 1

"""How a vector is cut into blocks and a block into segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

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
    return [Span(buffer, start + low, start + high) for low, high in pairwise(bounds)]


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


def joined(spans: Sequence[Span]) -> Span:
    """Return the one span of ``spans`` that lie densely one after the other."""
    return Span(spans[0].buffer, spans[0].start, spans[-1].stop)


def runs(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with those joined that begin where the one before them ends.

    Blocks of a range that wraps round the end of a vector become two spans.
    """
    found: list[Span] = []
    for span in spans:
        if found and found[-1].buffer is span.buffer and found[-1].stop == span.start:
            found[-1] = joined((found[-1], span))
        else:
            found.append(span)
    return found


def around(blocks: Sequence[Span], first: int, count: int) -> list[Span]:
    """Return ``count`` of the dense ``blocks`` from ``first`` on, and on from the start.

    These are one span, or two where the range wraps round the end.
    """
    wrapped = max(0, first + count - len(blocks))
    return runs([*blocks[first : first + count], *blocks[:wrapped]])

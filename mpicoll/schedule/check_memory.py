"""What a proof keeps of memory: intervals of elements, and how each was reduced."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple


class Piece(NamedTuple):
    """``length`` elements of one term, the first of which has index ``first``."""

    length: int
    term: int
    first: int


class Terms:
    """Interned reduction trees; equal numbers mean equal trees, so equal bits."""

    def __init__(self, size: int) -> None:
        self.ranks: list[tuple[int, ...]] = [(rank,) for rank in range(size)]
        self._folds: dict[tuple[int, ...], int] = {}

    def fold(self, operands: tuple[int, ...]) -> int:
        """Return the term that folds ``operands`` from the left."""
        if len(operands) == 1:
            return operands[0]
        term = self._folds.get(operands)
        if term is None:
            term = self._folds[operands] = len(self.ranks)
            self.ranks.append(tuple(chain.from_iterable([self.ranks[part] for part in operands])))
        return term

    def sequential(self, ranks: tuple[int, ...]) -> int | None:
        """Return the one fold over the inputs of ``ranks``, or None if nobody made it."""
        return ranks[0] if len(ranks) == 1 else self._folds.get(ranks)


class Memory:
    """One buffer of one rank: disjoint sorted intervals; what is in none is undefined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[Piece] = []

    def undefined(self, start: int, stop: int) -> bool:
        """Whether nothing of a range is defined."""
        at = bisect_right(self._starts, start)
        if at and self._starts[at - 1] + self._pieces[at - 1].length > start:
            return False
        return at == len(self._starts) or stop <= self._starts[at]

    def write(self, start: int, pieces: Sequence[Piece]) -> bool:
        """Overwrite from ``start`` on; return whether part of it may have been defined.

        No piece may be empty.
        """
        if not pieces:
            return False
        starts = self._starts
        if len(pieces) == 1:  # the common cases: in the place of one piece, or into a gap
            at = bisect_right(starts, start)
            length = pieces[0].length
            if at and starts[at - 1] == start and self._pieces[at - 1].length == length:
                self._pieces[at - 1] = pieces[0]
                return True
            after_last = not at or starts[at - 1] + self._pieces[at - 1].length <= start
            if after_last and (at == len(starts) or start + length <= starts[at]):
                starts.insert(at, start)
                self._pieces.insert(at, pieces[0])
                return False
        lengths = [piece.length for piece in pieces]
        stop = start + sum(lengths)
        first = self._split(start)
        last = self._split(stop)
        starts[first:last] = accumulate(lengths[:-1], initial=start)
        self._pieces[first:last] = pieces
        return True

    def read(self, start: int, stop: int) -> list[Piece] | None:
        """Return the pieces of a range, or None if part of it is undefined."""
        if start == stop:
            return []
        at = bisect_right(self._starts, start) - 1
        if at >= 0:  # one piece or part of one, the common cases
            length, term, first = piece = self._pieces[at]
            skip = start - self._starts[at]
            if stop - start == length and not skip:
                return [piece]
            if stop - start <= length - skip:
                return [Piece(stop - start, term, first + skip)]
        found = []
        while start < stop:
            if not 0 <= at < len(self._starts):
                return None
            skip = start - self._starts[at]
            piece = self._pieces[at]
            if not 0 <= skip < piece.length:
                return None
            count = min(piece.length - skip, stop - start)
            found.append(Piece(count, piece.term, piece.first + skip))
            start += count
            at += 1
        return found

    def _split(self, position: int) -> int:
        """Make ``position`` a boundary; return the first interval at or after it."""
        at = bisect_right(self._starts, position) - 1
        if at < 0:
            return 0
        skip = position - self._starts[at]
        if skip == 0:
            return at
        count, term, index = self._pieces[at]
        if skip < count:
            self._pieces[at] = Piece(skip, term, index)
            self._starts.insert(at + 1, position)
            self._pieces.insert(at + 1, Piece(count - skip, term, index + skip))
        return at + 1

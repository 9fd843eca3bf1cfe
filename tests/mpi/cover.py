"""Which combinations of factor levels are tried: a pairwise cover, or a product."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias

Levels: TypeAlias = dict[str, Sequence[Any]]
#: Says whether two levels may meet: (factor, level, other factor, other level) -> bool.
Meets: TypeAlias = Callable[[str, Any, str, Any], bool]


class Cover:
    """All pairs of levels that may meet, each in a combination at least once."""

    def __init__(self, levels: Levels, meets: Meets, seed: int) -> None:
        """Note which levels may meet; ``meets`` is asked for each pair of factors once."""
        self._names = list(levels)
        self._levels = [list(levels[name]) for name in self._names]
        self._random = random.Random(seed)
        self._fits: dict[tuple[int, int, int], set[int]] = {}
        for (i, one), (j, other) in combinations(enumerate(self._names), 2):
            for a, x in enumerate(self._levels[i]):
                for b, y in enumerate(self._levels[j]):
                    if meets(one, x, other, y):
                        self._fits.setdefault((i, a, j), set()).add(b)
                        self._fits.setdefault((j, b, i), set()).add(a)

    def _complete(self, chosen: dict[int, int], wanted: set[tuple[int, int, int, int]]) -> bool:
        """Choose a level of every other factor, preferring pairs that are still wanted."""
        open_ones = [i for i in range(len(self._names)) if i not in chosen]
        if not open_ones:
            return True
        candidates = {i: self._candidates(i, chosen) for i in open_ones}
        # The factor with the fewest levels left comes first, so that dead ends show early.
        i = min(open_ones, key=lambda one: (len(candidates[one]), self._random.random()))
        order = list(candidates[i])
        self._random.shuffle(order)
        order.sort(key=lambda a: -sum(_pair(i, a, j, b) in wanted for j, b in chosen.items()))
        for a in order:
            chosen[i] = a
            if self._complete(chosen, wanted):
                return True
            del chosen[i]
        return False

    def _candidates(self, i: int, chosen: dict[int, int]) -> set[int]:
        left = set(range(len(self._levels[i])))
        for j, b in chosen.items():
            left &= self._fits.get((j, b, i), set())
        return left

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Yield combinations that cover all pairs that some combination can have."""
        wanted = {
            _pair(i, a, j, b)
            for (i, a, j), fitting in self._fits.items()
            if i < j
            for b in fitting
        }
        for pair in sorted(wanted):
            if pair not in wanted:
                continue
            i, a, j, b = pair
            chosen = {i: a, j: b}
            if not self._complete(chosen, wanted):
                continue  # the two meet, but a third factor has no level that suits both
            wanted -= {_pair(*one, *two) for one, two in combinations(chosen.items(), 2)}
            yield self._named(chosen)

    def product(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield all combinations of some factors, with levels of the others drawn to suit."""
        factors = [self._names.index(name) for name in names]

        def extend(chosen: dict[int, int], left: list[int]) -> Iterator[dict[str, Any]]:
            if left:
                for level in sorted(self._candidates(left[0], chosen)):
                    yield from extend({**chosen, left[0]: level}, left[1:])
            elif self._complete(chosen, set()):
                yield self._named(chosen)

        return extend({}, factors)

    def _named(self, chosen: dict[int, int]) -> dict[str, Any]:
        return {name: self._levels[i][chosen[i]] for i, name in enumerate(self._names)}


def _pair(i: int, a: int, j: int, b: int) -> tuple[int, int, int, int]:
    return (i, a, j, b) if i < j else (j, b, i, a)

"""What the schedules of all ranks have in common, seen from a few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.simulation.machine import Integers
from mpicoll.simulation.program import Line

Lines: TypeAlias = Callable[[int], Line]
Division: TypeAlias = Callable[[Integers], Integers]
Bools: TypeAlias = npt.NDArray[np.bool_]

ALL = 64  #: ranks up to which every one is looked at
SEVERAL = 8  #: ranks of a class that are looked at beyond, and
FEW = 3  #: on more ranks than
MANY = 8192


def _one(ranks: Integers) -> Integers:
    return np.zeros_like(ranks)


def _parity(ranks: Integers) -> Integers:
    result: Integers = ranks % 2
    return result


def _root(ranks: Integers) -> Integers:
    result: Integers = (ranks == 0).astype(np.int64)
    return result


def _lowest_bit(ranks: Integers) -> Integers:
    return _highest_bit(ranks & -ranks)


def _highest_bit(ranks: Integers) -> Integers:
    result: Integers = np.frexp(ranks.astype(np.float64))[1].astype(np.int64)
    return result


def _both_ends(ranks: Integers) -> Integers:
    result: Integers = _highest_bit(ranks) * 64 + _highest_bit(ranks.size - 1 - ranks)
    return result


#: Ways to divide ranks into classes, of which all are in the same step at a time, and
TOGETHER = (_one, _parity)
#: of which that is not so. The lowest and the highest bit set are the levels of binomial trees;
#: how far a rank is from the first and from the last one tells which powers of two it reaches.
APART = (_root, _lowest_bit, _highest_bit, _both_ends)


def row(ranks: Integers) -> Integers:
    """Divide a row of ranks into its two first ones, its two last ones, and the others."""
    first, last = np.minimum(ranks, 2), np.minimum(ranks[::-1], 2)
    result: Integers = np.where(first < 2, first, 4 - last)
    return result


#: The division of a row.
ROW: Division = row


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of ranks, the line of one of them, and how peers follow from a rank.

    Per message, sends first: the peer is ``shifts`` further on the circle of ranks where
    ``shifted``, else it is the rank XOR ``flips`` where ``flipped``, else the same for all.
    """

    members: Integers
    line: Line
    shifts: Integers
    flips: Integers
    shifted: Bools
    flipped: Bools

    def peers(self, size: int) -> Integers:
        """Return the peers of all members, (members, messages)."""
        ranks = self.members[:, None]
        fixed = (self.members[0] + self.shifts) % size
        others = np.where(self.flipped, ranks ^ self.flips, fixed)
        result: Integers = np.where(self.shifted, (ranks + self.shifts) % size, others)
        return result


def kinds(lines: Lines, size: int, divisions: Sequence[Division]) -> list[Kind] | None:
    """Return classes of ranks whose schedules are the same, or None where none are seen.

    Every rank is looked at up to ``ALL``, beyond that some of each class. What is concluded
    wrongly from those has sends without receives, which whoever replays it refuses.
    """
    for divide in divisions:
        classes = divide(np.arange(size))
        numbers = np.unique(classes)
        if numbers.size == size > 1:
            continue
        found = []
        for number in numbers:
            kind = _kind(np.flatnonzero(classes == number), lines, size)
            if kind is None:
                break
            found.append(kind)
        else:
            return found
    return None


def _kind(members: Integers, look: Lines, size: int) -> Kind | None:
    first = look(int(members[0]))
    peers = _peers(first)
    shifts, flips = (peers - members[0]) % size, peers ^ members[0]
    shifted = np.ones(peers.size, bool)
    flipped = np.full(peers.size, size & (size - 1) == 0)
    fixed = shifted.copy()
    for rank in _samples(members, size):
        other = look(rank)
        if not _alike(first, other):
            return None
        theirs = _peers(other)
        shifted &= (theirs - rank) % size == shifts
        flipped &= theirs ^ rank == flips
        fixed &= theirs == peers
        if not (shifted | flipped | fixed).all():
            return None
    return Kind(members, first, shifts, flips, shifted, flipped)


def _samples(members: Integers, size: int) -> list[int]:
    """Return which members are compared with the first: the last, others, the next one."""
    if size <= ALL:
        return [int(rank) for rank in members[1:]]
    most = SEVERAL if size <= MANY else FEW
    if members.size == 1:
        return []
    places = np.linspace(1, members.size - 1, most - 1).astype(int)
    return [int(rank) for rank in dict.fromkeys(members[places[::-1]].tolist())]


def _peers(line: Line) -> Integers:
    return np.concatenate([line.send_peers, line.recv_peers])


def _alike(one: Line, other: Line) -> bool:
    """Whether two lines are the same but for their peers."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("sends", "recvs", "send_units", "recv_units", "during", "after")
    )


def expanded(kinds: list[Kind], size: int) -> list[Line]:
    """Return the lines of all ranks."""
    lines: list[Line | None] = [None] * size
    for kind in kinds:
        line = kind.line
        for rank, peers in zip(kind.members, kind.peers(size), strict=True):
            sends = line.send_peers.size
            lines[rank] = Line(
                line.sends,
                line.recvs,
                peers[:sends],
                line.send_units,
                peers[sends:],
                line.recv_units,
                line.during,
                line.after,
            )
    return [line for line in lines if line is not None]

"""What every algorithm does, as closed formulas: steps, messages, bytes, local work.

A *profile* is a list of terms, each some equal steps. The formulas hold for blocks of equal
length and root 0; tests hold them to what is counted from the schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from mpicoll.schedule.peers import IN_FLIGHT


class Term(NamedTuple):
    """``deep`` equal steps one after the other; all ranks together take ``wide`` of them.

    A step has ``messages`` messages of the busier direction, with ``sent`` vectors in all,
    and reduces or copies ``local`` vectors. In ``sends`` of the steps of all ranks the rank
    sends them; in the rest it only receives, what is counted where it is sent.
    """

    deep: float
    wide: float
    messages: float = 0
    sent: float = 0
    local: float = 0
    sends: float = 1


class Group(NamedTuple):
    """``size`` ranks, log2 of it rounded up and down, what is beyond a power of two, batches
    of the direct algorithms, and the segments of a pipeline."""

    size: int
    lg: int
    fl: int
    rest: int
    batches: int
    segments: int


Terms: TypeAlias = tuple[Term, ...]


@lru_cache(maxsize=1024)
def profile(collective: str, algorithm: str, size: int, segments: int = 1) -> Terms:
    """Return what ``algorithm`` does on ``size`` ranks in ``segments`` segments."""
    fl = size.bit_length() - 1
    batches = -(-(size - 1) // IN_FLIGHT)
    group = Group(size, (size - 1).bit_length(), fl, size - (1 << fl), batches, segments)
    if size == 1:
        return (Term(1, 1, local=1),)
    return tuple(_PROFILES[collective, algorithm](group))


# -- phases, mirrors of those of the builders --------------------------------------------


def _work(g: Group, local: float) -> list[Term]:
    """Every rank works on its own."""
    return [Term(1, g.size, local=local)]


def _with_bit(size: int, k: int) -> int:
    """Return how many of the numbers below ``size`` have bit ``k``."""
    return (size >> (k + 1) << k) + max(0, (size & ((2 << k) - 1)) - (1 << k))


def _tree(g: Group, vector: bool = True, reduced: float = 0) -> list[Term]:
    """The rounds of a binomial tree, each message a whole vector or a subtree's blocks."""
    terms = []
    for k in range(g.lg):
        reach = 1 << k
        edges = len(range(reach, g.size, 2 * reach))
        first = 1 if vector else min(reach, g.size - reach) / g.size
        others = edges - 1 if vector else _with_bit(g.size, k) / g.size - first
        terms.append(Term(1, 2, 1, first, sends=0.5))  # the root's
        if edges > 1:
            terms.append(Term(0, 2 * (edges - 1), 1, others / (edges - 1), sends=0.5))
        if reduced:
            terms.append(Term(1, edges, local=reduced))
    return terms


def _ring(g: Group, reduced: float = 0) -> list[Term]:
    steps = (g.size - 1) * (g.segments if reduced else 1)
    share = 1 / g.size / (g.segments if reduced else 1)
    return [Term(steps, g.size * steps, 1, share, reduced * share)]


def _pipe(g: Group, deep: float, wait: int) -> list[Term]:
    """Segments go through all ranks; one is sent on ``wait`` steps after it came."""
    s = g.segments
    wide = (g.size - 2) * min(2 * s, s + wait) + 2 * s
    return [Term(deep, wide, 1, 1 / s, sends=(g.size - 1) * s / wide)]


def _chain(g: Group, reduced: float = 0) -> list[Term]:
    """Segments are received, worked on and sent on in three steps, which overlap."""
    deep = g.segments + (g.size - 2) * (1 if g.segments == 1 else 2)
    work = Term(deep, (g.size - 1) * g.segments, local=reduced / g.segments)
    return [*_pipe(g, deep, 2), work]


def _circulant(g: Group, vector: float = 1) -> list[Term]:
    """Allgather over the circulant graph; half of the ranges wrap round the end."""
    terms = []
    goal = g.size
    while goal > 1:
        skip = -(-goal // 2)
        wraps = (goal - skip - 1) / g.size * 2
        terms.append(Term(1, g.size, 1 + min(1.0, wraps), (goal - skip) / g.size * vector))
        goal = skip
    return terms


def _circulant_reduce(g: Group) -> list[Term]:
    terms = [Term(1, g.size, local=1 / g.size)] if g.size % 2 else []
    goal = g.size
    while goal > 1:
        skip = -(-goal // 2)
        share = (goal - skip) / g.size
        wraps = goal == g.size and goal - skip > 1
        terms.append(Term(1, g.size, 1 + wraps * min(1.0, 2 * share), share, share))
        goal = skip
    return terms


def _fold(g: Group, sent: float, reduced: float = 0, messages: int = 1) -> list[Term]:
    """Ranks beyond a power of two hand something to a partner, or get it back."""
    if not g.rest:
        return []
    return [Term(1, 2 * g.rest, messages, sent, sends=0.5), Term(1, g.rest, local=reduced)]


def _halving(g: Group) -> list[Term]:
    members = 1 << g.fl
    return [Term(1, members, 1, 0.5 / (1 << k), 0.5 / (1 << k)) for k in range(g.fl)]


def _doubling(g: Group) -> list[Term]:
    """Allgather among a power of two of ranks."""
    members = 1 << g.fl
    return [Term(1, members, 1, (1 << k) / members) for k in range(g.fl)]


def _bruck(g: Group) -> list[Term]:
    terms = []
    for k in range(g.lg):
        share = min(1 << k, g.size - (1 << k)) / g.size
        terms.append(Term(1, g.size, 1, share))
    return terms


def _direct(g: Group) -> list[Term]:
    """Every rank sends a block to every other."""
    messages = (g.size - 1) / g.batches
    return [Term(g.batches, g.size * g.batches, messages, messages / g.size)]


def _star(g: Group, share: float) -> list[Term]:
    """The root and every other rank exchange one message of ``share`` of the vector."""
    messages = (g.size - 1) / g.batches
    root = Term(g.batches, g.batches, messages, messages * share, sends=0)
    return [root, Term(0, g.size - 1, 1, share)]


def _fold_all(g: Group) -> list[Term]:
    """The root keeps its own vector beside the others and folds all."""
    return [Term(1, 1, local=g.size)]


# -- algorithms ---------------------------------------------------------------------------


def _scan_doubling(g: Group, exclusive: bool) -> list[Term]:
    terms = [] if exclusive else [Term(0, 1, local=1)]
    for k in range(g.lg):
        reach = 1 << k
        pairs = g.size - reach
        wide = min(g.size, 2 * pairs)
        terms.append(Term(1, wide, 1, 1, sends=pairs / wide))
        terms.append(Term(1, pairs, local=1))
        if exclusive and g.size > 3 * reach:
            terms.append(Term(1, g.size - 3 * reach, local=1))
    return terms


def _scan_direct(g: Group, exclusive: bool) -> list[Term]:
    folds = ((g.size - 1 - exclusive) * (g.size - exclusive) / 2 + 1) / g.size
    return _work(g, 1 / g.size) + _direct(g) + _work(g, folds) + _direct(g)


def _neighbours(g: Group) -> list[Term]:
    members = g.size - g.size % 2
    terms = [*_work(g, 1 / g.size)]
    if g.size % 2:
        terms.append(Term(1, 2, 1, 1 / g.size, sends=0.5))
        terms.append(Term(1, 2, 1, (g.size - 1) / g.size, sends=0.5))
    rounds = members // 2 - 1
    terms.append(Term(1, members, 1, 1 / g.size))
    if rounds:
        share = (2 + g.size % 2 / rounds) / g.size  # the last pair of an odd group are three
        terms.append(Term(rounds, members * rounds, 1, share))
    return terms


def _alltoall_bruck(g: Group) -> list[Term]:
    terms = []
    home = 0
    for k in range(g.lg):
        slots = _with_bit(g.size, k)
        home += slots == 1
        terms.append(Term(1, g.size, 1, slots / g.size))
        terms.append(Term(1, g.size, local=slots * (slots > 1) / g.size))
    return terms + _work(g, 1 - home / g.size)


def _allreduce_rabenseifner(g: Group) -> list[Term]:
    return _fold(g, 1, 1) + _halving(g) + _doubling(g) + _fold(g, 1)


def _reduce_rabenseifner(g: Group) -> list[Term]:
    members = 1 << g.fl
    up = [Term(1, members >> k, 1, 0.5 ** (g.fl - k), sends=0.5) for k in range(g.fl)]
    return _fold(g, 1, 1) + _halving(g) + up


def _recursive_halving(g: Group) -> list[Term]:
    return [
        Term(g.rest == 0, (1 << g.fl) - g.rest, local=1),  # packing, or part of the fold
        *_work(g, 1 / g.size),
        *_fold(g, 1, 1),
        *_halving(g),
        *_fold(g, 1 / g.size),
    ]


_PROFILES: dict[tuple[str, str], Callable[[Group], list[Term]]] = {
    ("allgather", "bruck"): lambda g: _work(g, 1 / g.size) + _bruck(g) + _work(g, 1),
    ("allgather", "circulant"): lambda g: _work(g, 1 / g.size) + _circulant(g),
    ("allgather", "neighbour_exchange"): _neighbours,
    ("allgather", "recursive_doubling"): lambda g: (
        _work(g, 1 / g.size)
        + _fold(g, 1 / g.size)
        + _doubling(g)
        + _fold(g, (g.size - 1) / g.size, messages=2)
    ),
    ("allgather", "ring"): lambda g: _work(g, 1 / g.size) + _ring(g),
    ("allreduce", "circulant"): lambda g: _circulant_reduce(g) + _circulant(g),
    ("allreduce", "direct"): lambda g: (
        _work(g, 1 / g.size) + _direct(g) + _work(g, (g.size - 1) / g.size) + _circulant(g)
    ),
    ("allreduce", "gather"): lambda g: _work(g, 1) + _circulant(g, g.size) + _work(g, g.size - 1),
    ("allreduce", "rabenseifner"): _allreduce_rabenseifner,
    ("allreduce", "recursive_doubling"): lambda g: (
        [*_fold(g, 1, 1), Term(g.fl, g.fl << g.fl, 1, 1, 1), *_fold(g, 1)]
    ),
    ("allreduce", "reduce_bcast"): lambda g: _tree(g, True, 1) + _tree(g),
    ("allreduce", "ring"): lambda g: _ring(g, 1) + _ring(g),
    ("alltoall", "bruck"): _alltoall_bruck,
    ("alltoall", "linear"): lambda g: _work(g, 1 / g.size) + _direct(g),
    ("alltoall", "pairwise"): lambda g: _work(g, 1 / g.size) + _ring(g),
    ("alltoall", "two_phase_bruck"): _alltoall_bruck,
    ("barrier", "dissemination"): lambda g: [Term(g.lg, g.size * g.lg, 1, 1)],
    ("bcast", "binomial"): lambda g: _tree(g),
    ("bcast", "chain"): lambda g: _pipe(g, g.segments + g.size - 2, 1),
    ("bcast", "circulant"): lambda g: _pipe(g, g.segments + g.lg - 1, 1),
    ("bcast", "scatter_allgather"): lambda g: _tree(g, False) + _ring(g),
    ("exscan", "direct"): lambda g: _scan_direct(g, True),
    ("exscan", "linear"): lambda g: _chain(g, 2 - 1 / (g.size - 1)),
    ("exscan", "recursive_doubling"): lambda g: _scan_doubling(g, True),
    ("gather", "binomial"): lambda g: [*_tree(g, False), Term(1, g.size / 2, local=1 / g.size)],
    ("gather", "linear"): lambda g: [Term(1, 1, local=1 / g.size), *_star(g, 1 / g.size)],
    ("reduce", "binomial"): lambda g: _tree(g, True, 1),
    ("reduce", "chain"): lambda g: _chain(g, 1),
    ("reduce", "direct"): lambda g: _work(g, 1) + _direct(g) + _star(g, 1 / g.size),
    ("reduce", "linear"): lambda g: _star(g, 1) + _fold_all(g),
    ("reduce", "rabenseifner"): _reduce_rabenseifner,
    ("reduce_scatter", "circulant"): _circulant_reduce,
    ("reduce_scatter", "direct"): lambda g: _direct(g) + _work(g, (g.size - 1) / g.size),
    ("reduce_scatter", "pairwise"): lambda g: _ring(g._replace(segments=1), 1),
    ("reduce_scatter", "recursive_halving"): _recursive_halving,
    ("reduce_scatter", "ring"): lambda g: _ring(g, 1),
    ("scan", "direct"): lambda g: _scan_direct(g, False),
    ("scan", "linear"): lambda g: [*_chain(g, 1), Term(0, 1, local=1)],
    ("scan", "recursive_doubling"): lambda g: _scan_doubling(g, False),
    ("scatter", "binomial"): lambda g: [*_tree(g, False), Term(1, g.size / 2, local=1 / g.size)],
    ("scatter", "linear"): lambda g: [Term(1, 1, local=1 / g.size), *_star(g, 1 / g.size)],
}

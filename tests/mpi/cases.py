"""The levels of the matrix, which of them may meet, and the verdict on one case."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import layouts
import numpy as np
import quirks
import reference
from cover import Cover, Levels
from exchange import METHODS, Case, Exchange
from kinds import Bytes, Kind, kinds, operators
from layouts import IN_PLACE, PLAIN, SAME, VECTORS
from mpi4py import MPI
from quirks import DERIVED

from mpicoll import Comm
from mpicoll.algorithms import find, names
from mpicoll.schedule.contracts import REDUCTIONS, ROOTED

UNEVEN = frozenset({"Gatherv", "Scatterv", "Allgatherv", "Alltoallv", "Alltoallw"})
#: Bytes of a segment: the choice of mpicoll, none, and a few items.
SEGMENTS = (None, 0, 24)
MANY = 5

_ONE = (*PLAIN, *DERIVED)
_BLOCKS = tuple(layout for layout in _ONE if layout != "zero_d")
# Reductions take predefined types only; derived ones are kinds of their own.
_WHOLE = (*PLAIN, IN_PLACE, SAME)
_PARTS = tuple(layout for layout in PLAIN if layout != "zero_d")


def _readable(*layouts: str) -> tuple[str, ...]:
    return tuple(one for one in layouts if one != "readonly")


def _layouts(method: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the layouts of send and receive side."""
    both = (IN_PLACE, SAME)
    return {
        "Bcast": (_ONE, _readable(*_ONE)),
        "Gather": ((*_ONE, *both), _readable(*_BLOCKS)),
        "Gatherv": ((*_BLOCKS, *both), VECTORS),
        "Scatter": (_BLOCKS, (*_readable(*_ONE), *both)),
        "Scatterv": (VECTORS, (*_readable(*_BLOCKS), *both)),
        "Allgather": ((*_ONE, *both), _readable(*_BLOCKS)),
        "Allgatherv": ((*_BLOCKS, *both), VECTORS),
        "Alltoall": ((*_BLOCKS, *both), _readable(*_BLOCKS)),
        "Alltoallv": ((*VECTORS, *both), VECTORS),
        "Alltoallw": (("w", IN_PLACE), ("w",)),
        "Reduce_scatter_block": ((*_PARTS, IN_PLACE), _readable(*_PARTS)),
        "Reduce_scatter": ((*_PARTS, IN_PLACE), _readable(*_PARTS)),
    }.get(method, (_WHOLE, _readable(*PLAIN)))


def algorithms(method: str) -> tuple[str | None, ...]:
    """Return the names that a method takes; None is mpicoll's own choice."""
    collective = METHODS[method]
    fit = [
        name
        for name in names(collective)
        if not (method in UNEVEN and find(collective, name).uniform)
    ]
    return (None, *fit)


def levels(method: str, size: int) -> Levels:
    """Return the levels of every factor of a method."""
    collective = METHODS[method]
    reduces = collective in REDUCTIONS
    send, recv = _layouts(method)
    # Whole vectors are long enough for the automatic choice to leave its first threshold.
    large = 2053 if {collective} <= _LAYOUTS_OF_ONE else 509
    return {
        "algorithm": algorithms(method),
        "kind": [name for name, kind in kinds().items() if _has(kind, reduces)],
        "operator": list(operators()) if reduces else [""],
        "root": range(size) if collective in ROOTED else [0],
        "send": send,
        "recv": recv,
        "count": sorted({0, 1, size - 1, size, size + 1, large}),
        "segment": SEGMENTS,
        "order": (None, "rank") if _orders(method) else (None,),
        "form": ("blocking", "non-blocking", "persistent"),
    }


_LAYOUTS_OF_ONE = frozenset({"bcast", "reduce", "allreduce", "scan", "exscan"})


def _alike(likeness: Callable[[Kind], Any]) -> dict[str, list[str]]:
    """Return the kinds that something can not tell apart, under the first of them."""
    groups: dict[Any, list[str]] = {}
    for name, kind in kinds().items():
        groups.setdefault(likeness(kind), []).append(name)
    return {group[0]: group for group in groups.values()}


def _movement(kind: Kind) -> tuple[Any, ...]:
    return kind.inferred, kind.datatype is None, kind.extent, kind.nbytes


def _arithmetic(kind: Kind) -> tuple[Any, ...]:
    own = kind.name if kind.dtype is None or kind.datatype is None else ""
    return kind.inferred, kind.family, str(kind.dtype), own


def _orders(method: str) -> bool:
    return METHODS[method] in ("reduce", "allreduce", "reduce_scatter")


def _has(kind: Kind, reduces: bool) -> bool:
    if not reduces:
        return True
    return any(operator.allows(kind) for operator in operators().values())


def meets(method: str) -> Callable[[str, Any, str, Any], bool]:
    """Return the rules of a method: which levels of two factors may meet."""
    collective = METHODS[method]

    def algorithm_segment(name: str | None, segment: int | None) -> bool:
        return name is None or segment is None or find(collective, name).segmented

    def algorithm_operator(name: str | None, operator: str) -> bool:
        if not operator or name is None or operators()[operator].commutative:
            return True
        return find(collective, name).order != "any"

    def algorithm_order(name: str | None, order: str | None) -> bool:
        return order is None or name is None or find(collective, name).order == "sequential"

    def kind_operator(kind: str, operator: str) -> bool:
        if operator == "AVG" and collective in ("scan", "exscan"):
            return False
        return suits(operator, kind)

    def kind_layout(kind: str, layout: str) -> bool:
        if layout == "w":
            return kinds()[kind].datatype is not None
        return layouts.fits(layout, kinds()[kind])

    def layout_count(layout: str, count: int) -> bool:
        return layout != "zero_d" or count == 1

    def send_recv(send: str, recv: str) -> bool:
        dense = ("array", "typed", "counts")
        if recv == SAME:
            return send in dense
        return send != SAME or recv in dense or collective in REDUCTIONS

    rules: dict[tuple[str, str], Callable[[Any, Any], bool]] = {
        ("algorithm", "segment"): algorithm_segment,
        ("algorithm", "operator"): algorithm_operator,
        ("algorithm", "order"): algorithm_order,
        ("kind", "operator"): kind_operator,
        ("kind", "send"): kind_layout,
        ("kind", "recv"): kind_layout,
        ("send", "count"): layout_count,
        ("recv", "count"): layout_count,
        ("send", "recv"): send_recv,
    }

    def decide(one: str, level: Any, other: str, its: Any) -> bool:
        if (one, other) in rules:
            return rules[one, other](level, its)
        return (other, one) not in rules or rules[other, one](its, level)

    return decide


def cover(method: str, size: int, seed: int) -> Iterator[Case]:
    """Yield cases, numbered, in which any two levels of any two factors meet.

    Kinds that data movement can not tell apart take turns; so do names of the same
    arithmetic where many ranks make a case dear.
    """
    factors = levels(method, size)
    turns: dict[str, Iterator[str]] = {}
    reduces = METHODS[method] in REDUCTIONS
    if not reduces or size >= MANY:
        alike = _alike(_arithmetic if reduces else _movement)
        factors["kind"] = [name for name in alike if name in factors["kind"]]
        turns = {name: cycle(alike[name]) for name in factors["kind"]}
    salt = zlib.crc32(method.encode())
    for number, chosen in enumerate(Cover(factors, meets(method), seed ^ salt).pairs()):
        if chosen["kind"] in turns:
            turn = turns[chosen["kind"]]
            chosen["kind"] = next(name for name in turn if suits(chosen["operator"], name))
        yield Case(method=method, number=salt + number, **chosen)


def product(method: str, algorithm: str | None, size: int, seed: int) -> Iterator[Case]:
    """Yield all cases of one algorithm, numbered, by kind, operator, root and layout.

    Counts, segments and the layout of the receive side are drawn for each.
    """
    factors = levels(method, size)
    factors["algorithm"] = [algorithm]
    salt = zlib.crc32(f"{method} {algorithm}".encode())
    every = Cover(factors, meets(method), seed ^ salt).product(
        ("algorithm", "kind", "operator", "root", "send")
    )
    for number, chosen in enumerate(every):
        yield Case(method=method, number=salt + number, **chosen)


def suits(operator: str, kind: str) -> bool:
    """Return whether an operator, or none, is defined for a kind."""
    return not operator or operators()[operator].allows(kinds()[kind])


# -- the verdict ------------------------------------------------------------------------


def attempt(case: Case, comm: Comm, seed: int) -> tuple[str, Bytes | None]:
    """Run a case; return what is wrong with it, and the result of this rank."""
    exchange = Exchange(case, comm.rank, comm.size, seed)
    keywords: dict[str, Any] = {"algorithm": case.algorithm, "segment": case.segment}
    if _orders(case.method):
        keywords["order"] = case.order
    try:
        outcome = exchange.run(comm, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    native = None
    known = exchange.operator is None or exchange.operator.native
    if known and exchange.kind.datatype is not None and quirks.native(case, comm.size):
        native = exchange.run(MPI.Intracomm(comm)).result()
    result = outcome.result()
    return outcome.damage() or _judge(exchange, result, native), result


def _judge(exchange: Exchange, result: Bytes | None, native: Bytes | None) -> str:
    if result is None:
        return ""
    kind, operator = exchange.kind, exchange.operator
    if operator is None:
        moved = exchange.moved()
        return _differs(kind, result, moved) or _of_native(_differs(kind, native, moved))
    inputs = exchange.operands()
    if operator.exact(kind):
        expected = reference.fold(kind, operator, inputs)
        if expected is None:
            return "" if native is None else _differs(kind, result, native)
        wrong = _differs(kind, result, expected)
        return wrong or _of_native(_differs(kind, native, expected))
    if exchange.case.order == "rank" and operator.name != "AVG":
        expected = reference.fold(kind, operator, inputs)
        assert expected is not None
        wrong = _differs(kind, result, expected)
        if wrong:
            return f"not the bits of a loop over ranks: {wrong}"
    wrong = reference.excess(kind, operator, inputs, result, exchange.case.sequential)
    if wrong or native is None:
        return wrong
    return _of_native(reference.excess(kind, operator, inputs, native, wide=False))


def _differs(kind: Kind, result: Bytes | None, expected: Bytes) -> str:
    if result is None:
        return ""
    if result.size != expected.size:
        return f"{result.size} bytes, expected {expected.size}"
    if np.array_equal(result, expected):
        return ""
    wrong = np.flatnonzero(reference.solid(kind, result) != reference.solid(kind, expected))
    if not wrong.size:
        return ""
    return f"{wrong.size} of {result.size} bytes are wrong, from {wrong[0]} on"


def _of_native(wrong: str) -> str:
    return wrong and f"of the native call: {wrong}"

"""Schedules of all ranks for the command line: built, counted, timed by the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import lru_cache

from mpicoll.algorithms import Algorithm, find, names
from mpicoll.algorithms.alltoall import transit
from mpicoll.schedule.contracts import REDUCTIONS
from mpicoll.schedule.cost import Machine, cost, predicted_seconds
from mpicoll.schedule.ir import Call, Schedule
from mpicoll.schedule.partition import split
from mpicoll.selection.choose import Wanted, default, default_segment

ITEM_BYTES = {"barrier": 1}  #: of an element; others are float64
BLOCKED = frozenset({"allgather", "gather", "reduce_scatter", "scatter"})

DOES = {
    "bcast": "every rank gets the vector of the root",
    "reduce": "the root gets the reduction of the vectors of all ranks",
    "allreduce": "every rank gets the reduction of the vectors of all ranks",
    "gather": "the root gets one block of each rank",
    "allgather": "every rank gets one block of each rank",
    "scatter": "each rank gets its block of the root's vector",
    "reduce_scatter": "each rank gets its block of the reduction of all vectors",
    "alltoall": "block d of every rank goes to rank d",
    "barrier": "nobody leaves before all have entered",
    "scan": "rank r gets the reduction over ranks 0 to r",
    "exscan": "rank r gets the reduction over ranks 0 to r - 1",
}

ORDERS = {
    "any": "reorders the operands: the operator must commute",
    "rank": "operands in rank order, bracketed as a tree: for operators that don't commute too",
    "sequential": "the bits of a sum from left to right over the ranks",
}

#: (collective, what is needed instead, when that is enough)
CHEAPER = (
    ("allgather", "gather", "only one rank reads the result"),
    ("allgather", "allreduce", "the blocks are only summed afterwards"),
    ("allgather", "bcast", "only one rank has something to send"),
    ("allreduce", "reduce", "only one rank reads the result"),
    ("allreduce", "reduce_scatter", "each rank reads only its share of the result"),
    ("alltoall", "scatter", "only one rank has something to send"),
    ("alltoall", "gather", "only one rank reads what it gets"),
    ("bcast", "scatter", "each rank reads only its share"),
    ("gather", "reduce", "the root only sums the blocks"),
    ("reduce", "reduce_scatter", "the result may stay spread over the ranks"),
)


def item_bytes(collective: str) -> int:
    """Return the bytes of an element: a float64, or the byte of a barrier."""
    return ITEM_BYTES.get(collective, 8)


def calls(
    algorithm: Algorithm, size: int, count: int, root: int = 0, segment: int = 0
) -> list[Call]:
    """Return the calls of all ranks; ``count`` elements a vector or of all blocks together."""
    collective = algorithm.collective
    if collective == "alltoall":
        blocks = (max(1, count // size),) * size
        made = [Call(rank, size, blocks, recv_counts=blocks) for rank in range(size)]
        if algorithm.knows == "transit":
            made = [transit(call, lambda source, target: blocks[target]) for call in made]
        return made
    if collective == "barrier":
        counts: tuple[int, ...] = (1,)
    elif collective in BLOCKED:
        counts = (max(1, count // size),) * size if algorithm.uniform else split(count, size)
    else:
        counts = (count,)
    return [Call(rank, size, counts, root, segment) for rank in range(size)]


def build(
    algorithm: Algorithm, size: int, count: int, root: int = 0, segment: int = 0
) -> list[Schedule]:
    """Return the schedules of all ranks."""
    return [algorithm.build(call) for call in calls(algorithm, size, count, root, segment)]


def automatic(collective: str, size: int, nbytes: int) -> str:
    """Return the name of what runs when no algorithm is named."""
    name = default(Wanted(collective, size, nbytes))
    return name if name in names(collective) else names(collective)[0]


def most(schedules: Sequence[Schedule], item: int) -> dict[str, int]:
    """Return the most that any rank does: steps, messages, bytes; and bytes of all ranks."""
    costs = [cost(schedule) for schedule in schedules]
    return {
        "steps": max(one.steps for one in costs),
        "messages": max(one.messages_sent for one in costs),
        "bytes_sent": max(one.sent for one in costs) * item,
        "bytes_received": max(one.received for one in costs) * item,
        "bytes_reduced": max(one.reduced for one in costs) * item,
        "bytes_sent_by_all": sum(one.sent for one in costs) * item,
        "scratch_bytes": max(schedule.work for schedule in schedules) * item,
    }


@lru_cache(maxsize=256)
def timed(algorithm: Algorithm, size: int, nbytes: int, machine: Machine) -> float:
    """Return the predicted time for ``nbytes``, with the segment of the automatic choice."""
    wanted = Wanted(algorithm.collective, size, nbytes)
    item = item_bytes(algorithm.collective) if algorithm.collective in REDUCTIONS else 1
    segment = default_segment(algorithm, wanted) // item
    schedules = build(algorithm, size, nbytes // item, segment=segment)
    return predicted_seconds(schedules, item, machine)


def sent_by_all(collective: str, size: int, nbytes: int) -> int:
    """Return the bytes that all ranks together send in the automatic choice."""
    algorithm = find(collective, automatic(collective, size, nbytes))
    return most(build(algorithm, size, nbytes), 1)["bytes_sent_by_all"]


def cheaper(collective: str, size: int, nbytes: int) -> list[tuple[str, str, int]]:
    """Return collectives that may do, when, and the bytes all ranks send in them.

    Only those are named that send fewer bytes.
    """
    own = sent_by_all(collective, size, nbytes)
    found = []
    for here, instead, when in CHEAPER:
        if here != collective:
            continue
        # Summed blocks have the length of one of them.
        summed = instead in ("allreduce", "reduce") and collective in ("allgather", "gather")
        need = sent_by_all(instead, size, nbytes // size if summed else nbytes)
        if need < own:
            found.append((instead, when, need))
    return found


def source(algorithm: Algorithm) -> str:
    """Return the paper that the docstring names."""
    found = re.search(r"^Source: (.*?)(?:\n\n|\Z)", _doc(algorithm), re.M | re.S)
    return found[1].replace("\n", " ") if found else "this package"


def use(algorithm: Algorithm) -> str:
    """Return when the docstring says the algorithm is good."""
    found = re.search(r"\bGood (?:for|where)\b.*?\.(?=\s|\Z)", _doc(algorithm), re.S)
    return found[0].replace("\n", " ") if found else ""


def _doc(algorithm: Algorithm) -> str:
    return inspect.getdoc(algorithm.build) or ""

"""Two comparisons of `mpicoll bench --study`: how ranks are placed, and one that is slow.

Loads mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter

import numpy as np

from mpicoll.cli import timing
from mpicoll.cli.bench_rivals import afterwards
from mpicoll.cli.bench_study import (
    DOUBLE,
    Comparison,
    Entry,
    Figure,
    Lines,
    called_on,
    times_as_long,
)
from mpicoll.cli.cases import Case, even
from mpicoll.cli.common import human_bytes, human_seconds
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender
from mpicoll.cli.world import native
from mpicoll.comm import Comm

MAPPED = 1 << 20  #: bytes of the allreduce whose ranks are placed anew
LATE_BYTES = 64 << 10
LATE = (5e-3, 0.1)  #: least and most seconds by which one rank is late


# -- rank mapping --------------------------------------------------------------------------


def orders(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return different orders of the ranks, given the node of each: who comes at which place.

    Packed: neighbours share a node. Spread: the nodes take turns. Halves interleaved: far
    ranks become neighbours, which on one node are other cores.
    """
    ranks = range(len(nodes))
    names = list(dict.fromkeys(nodes))
    number = {rank: sum(nodes[other] == nodes[rank] for other in range(rank)) for rank in ranks}
    half = (len(nodes) + 1) // 2
    found = {
        "as started": list(ranks),
        "packed": sorted(ranks, key=lambda rank: (names.index(nodes[rank]), rank)),
        "spread": sorted(ranks, key=lambda rank: (number[rank], names.index(nodes[rank]))),
        "halves interleaved": sorted(ranks, key=lambda rank: (rank % half, rank)),
    }
    return {
        name: order
        for at, (name, order) in enumerate(found.items())
        if order not in list(found.values())[:at]
    }


def mapping(comm: Comm, who: Sequence[str], stack: ExitStack) -> Comparison:
    """A ring allreduce on the ranks as they were started, and in other orders."""
    names = native(comm).allgather(MPI.Get_processor_name())
    found = orders(names) if comm.size > 2 else {}
    parts = {name: comm.Split(0, order.index(comm.rank)) for name, order in found.items()}
    entries = []
    for part in parts.values():
        afterwards(stack, part.Free)
    for one in who:
        for name, part in parts.items():
            case = Case(part, even("allreduce", comm.size, MAPPED, DOUBLE))
            keywords = {"algorithm": "ring"} if one == "mpicoll" else {}
            call = case.bound(called_on(part, one), **keywords)
            contender = Contender(f"{one}, {name}", call, case.poison, case.wrong)
            entries.append(Entry(contender, f"{one}, as started"))

    def conclude(lines: Lines) -> str:
        if not lines:
            return "Two ranks are neighbours in any order; start at least three to see more."
        changed = [
            f"{one} takes {times_as_long(line)} with {name}"
            for one in who
            for name in list(found)[1:]
            if (line := lines[f"{one}, {name}"])["verdict"] != "same"
        ]
        nodes = len(set(names))
        where = f"{nodes} node{'s' * (nodes != 1)}"
        if not changed:
            return f"On {where} the order of the ranks makes no difference beyond the noise."
        return f"On {where} the order of the ranks matters: {'; '.join(changed)}."

    what = (
        f"allreduce of {human_bytes(MAPPED)}, ours by a ring, where each rank sends to the next: "
        f"{', '.join(found) or 'as started'}."
    )
    return Comparison("Rank mapping", what, entries, conclude)


# -- one slow rank -------------------------------------------------------------------------


class Watched:
    """A call that the last rank may enter late, and how long this rank was inside of it."""

    def __init__(self, call: Callable[[], object], late: float) -> None:
        self._call, self._late = call, late
        self.inside: list[float] = []

    def __call__(self) -> None:
        """Compute for as long as the rank is late, then take part."""
        end = perf_counter() + self._late
        while perf_counter() < end:
            pass
        start = perf_counter()
        self._call()
        self.inside.append(perf_counter() - start)


def slow_rank(comm: Comm, who: Sequence[str], stack: ExitStack) -> Comparison:
    """Collectives that the last rank enters late: how much of it the others wait."""
    world = native(comm)
    cases = {
        name: Case(comm, even(name, comm.size, LATE_BYTES, DOUBLE))
        for name in ("allreduce", "reduce", "bcast")
    }
    late = delay(world, cases["allreduce"])
    watched: dict[str, Watched] = {}
    entries = []
    for one in who if comm.size > 1 else ():
        for name, case in cases.items():
            in_time = f"{one} {name}"
            for label, seconds in ((in_time, 0.0), (f"{in_time}, one late", late)):
                own = seconds if comm.rank == comm.size - 1 else 0.0
                watched[label] = Watched(case.bound(called_on(comm, one)), own)
                contender = Contender(label, watched[label], case.poison, case.wrong)
                entries.append(Entry(contender, in_time))

    def ask(rounds: int) -> dict[str, float]:
        """Return how long the ranks but the last were inside, the median of them."""
        own = [float(np.median(call.inside[-rounds:])) for call in watched.values()]
        others = world.allgather(own)[:-1]
        return dict(zip(watched, np.median(others, axis=0).tolist(), strict=True))

    def conclude(lines: Lines) -> str:
        if not lines:
            return "One rank waits for nobody."
        parts = {
            f"{one} {name}": _passed_on(lines, f"{one} {name}", late)
            for one in who
            for name in cases
        }
        shown = ", ".join(f"{100 * part:.0f}% in {label}" for label, part in parts.items())
        wait = [label for label, part in parts.items() if part > 0.5]
        lesson = (
            f"most of the delay is passed on by {', '.join(wait)}"
            if wait
            else "less than half of the delay is passed on"
        )
        return (
            f"When rank {comm.size - 1} comes {human_seconds(late)} late, the others (their "
            f"median) wait for {shown}: {lesson}."
        )

    what = (
        f"{human_bytes(LATE_BYTES)}, root 0; rank {comm.size - 1} computes for "
        f"{human_seconds(late)} before it takes part. What the other ranks wait is the time that "
        "they are inside of the call."
    )
    figure = Figure("others are inside", ask, human_seconds)
    return Comparison("One slow rank", what, entries, conclude, figure)


def delay(world: MPI.Intracomm, case: Case) -> float:
    """Return the seconds by which the slow rank is late: some calls long, alike on all ranks."""
    call = Contender("", case.bound(world), case.poison, case.wrong)
    usual = timing.race(world, [call], 0.0, 5)[0].summary()["median"]
    return min(LATE[1], max(LATE[0], 3 * usual))


def _passed_on(lines: Lines, label: str, late: float) -> float:
    """Return the share of the delay that the others spent inside of the call."""
    extra = lines[f"{label}, one late"]["figure"] - lines[label]["figure"]
    return max(0.0, float(extra) / late)

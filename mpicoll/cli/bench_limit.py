"""What the machine gives to plain messages and copies: the limit of a collective. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpicoll.cli import timing
from mpicoll.cli.memory import HOST, Array, Memory
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender

SIZES = (64 << 10, 1 << 20, 8 << 20)  #: bytes of a message; the best of them is the limit
KINDS = {
    "one_way": "one message from rank 0 to the last",
    "both_ways": "every rank sends to the next and receives from the one before, at once",
    "memcpy": "every rank copies, at once",
}
DEFINITION = (
    "share = busbw / limit. The limit of bcast, reduce, gather and scatter is one way, that of "
    "the others both ways (what one rank sends while it receives as much)."
)
_ONE_WAY = frozenset(("bcast", "reduce", "gather", "scatter"))
_TAG = 1


def measure_limit(
    world: MPI.Intracomm, seconds: float, most: int, memory: Memory = HOST
) -> dict[str, Any]:
    """Return by kind the highest bandwidth in bytes/s, at which size, and a fault if any.

    Timed as the collectives are. With one rank there is no message, only memcpy. Messages
    are of host memory where the MPI does not take addresses of ``memory``.
    """
    best: dict[str, Any] = {}
    for nbytes in SIZES:
        contenders = [_contender(world, kind, nbytes, memory) for kind in KINDS]
        kept = [one for one in contenders if world.size > 1 or one.name == "memcpy"]
        for found in timing.race(world, kept, seconds / len(SIZES), most, memory):
            rate = nbytes / found.summary()["median"]
            fault = found.fault or best.get(found.name, {}).get("fault", "")
            if rate > best.get(found.name, {"rate": 0.0})["rate"]:
                best[found.name] = {"rate": rate, "bytes": nbytes}
            best[found.name]["fault"] = fault
    return best


def share(
    collective: str, busbw: float, limit: Mapping[str, Any]
) -> tuple[str | None, float | None]:
    """Return the kind of limit of a collective and the share of it, or None where none is."""
    kind = "one_way" if collective in _ONE_WAY else "both_ways"
    if collective == "barrier" or kind not in limit:
        return None, None
    return kind, busbw / float(limit[kind]["rate"])


def _contender(world: MPI.Intracomm, kind: str, nbytes: int, memory: Memory = HOST) -> Contender:
    if kind != "memcpy" and not memory.addressed:
        memory = HOST
    rank, last = world.rank, world.size - 1
    source = memory.put(np.full(nbytes, _byte(rank), np.uint8))
    target = memory.put(np.zeros(nbytes, np.uint8))
    sent, result = memory.message(source), memory.message(target)
    expected: int | None = _byte(rank)
    call: Callable[[], object] = lambda: memory.copy(target, source)  # noqa: E731
    if kind == "both_ways":
        right, left = (rank + 1) % world.size, (rank - 1) % world.size
        expected = _byte(left)

        def call() -> None:
            world.Sendrecv(sent, right, _TAG, result, left, _TAG)
    elif kind == "one_way":
        expected = _byte(0) if rank == last else None

        def call() -> None:
            if rank == 0:
                world.Send(sent, last, _TAG)
            elif rank == last:
                world.Recv(result, 0, _TAG)

    def wrong() -> str:
        return _wrong(rank, memory.fetch(target), expected)

    return Contender(kind, call, lambda: memory.poison(target), wrong)


def _byte(rank: int) -> int:
    """Return what a rank sends over and over: never zero, nor what poison is."""
    return 1 + rank % 64


def _wrong(rank: int, result: Array, expected: int | None) -> str:
    if expected is None or (result == expected).all():
        return ""
    return f"rank {rank}: a plain message of {result.nbytes} bytes arrived with wrong data"

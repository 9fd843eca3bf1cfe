"""What the machine gives to plain messages and copies: the limit of a collective. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpicoll.cli import timing
from mpicoll.cli.cases import Array
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


def measure_limit(world: MPI.Intracomm, seconds: float, most: int) -> dict[str, Any]:
    """Return by kind the highest bandwidth in bytes/s, at which size, and a fault if any.

    Timed as the collectives are. With one rank there is no message, only memcpy.
    """
    best: dict[str, Any] = {}
    for nbytes in SIZES:
        contenders = [_contender(world, kind, nbytes) for kind in KINDS]
        kept = [one for one in contenders if world.size > 1 or one.name == "memcpy"]
        for found in timing.race(world, kept, seconds / len(SIZES), most):
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


def _contender(world: MPI.Intracomm, kind: str, nbytes: int) -> Contender:
    rank, last = world.rank, world.size - 1
    sent = np.full(nbytes, rank + 1, np.uint8)
    result = np.zeros(nbytes, np.uint8)
    expected: int | None = rank + 1
    call: Callable[[], object] = lambda: np.copyto(result, sent)  # noqa: E731
    if kind == "both_ways":
        right, left = (rank + 1) % world.size, (rank - 1) % world.size
        expected = left + 1

        def call() -> None:
            world.Sendrecv(sent, right, _TAG, result, left, _TAG)
    elif kind == "one_way":
        expected = 1 if rank == last else None

        def call() -> None:
            if rank == 0:
                world.Send(sent, last, _TAG)
            elif rank == last:
                world.Recv(result, 0, _TAG)

    return Contender(kind, call, lambda: result.fill(0), lambda: _wrong(rank, result, expected))


def _wrong(rank: int, result: Array, expected: int | None) -> str:
    if expected is None or (result == expected % 256).all():
        return ""
    return f"rank {rank}: a plain message of {result.nbytes} bytes arrived with wrong data"

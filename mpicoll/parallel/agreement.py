"""What all ranks must pass alike: checked by one small exchange, refused on all ranks or none.

A collective that one rank enters with other counts than the rest hangs or spoils memory. So
whatever decides counts is compared first, and a rank's own bad argument travels along.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Comm


def wrapped(comm: MPI.Intracomm | None) -> Comm:
    """Return ``comm`` with mpicoll's collectives; None is the world."""
    if isinstance(comm, Comm):
        return comm
    return Comm(MPI.COMM_WORLD if comm is None else comm)


def agree(
    comm: Comm,
    where: str,
    entries: Sequence[str],
    number: int = 0,
    problem: str | None = None,
) -> tuple[int, ...]:
    """Return the ``number`` of every rank, in rank order, if all gave equal ``entries``.

    Collective. One allgather of 24 bytes per rank; only when it fails, the words go round.
    Raises ValueError on every rank: with the ``problem`` of the lowest rank that has one, or
    with the first entry that differs from rank 0's, on the lowest rank where it does.
    """
    own = np.array([number, _digest(entries), problem is not None], np.int64)
    rows = np.empty((comm.size, own.size), np.int64)
    comm.Allgather(own, rows)
    troubled = np.flatnonzero(rows[:, 2])
    if troubled.size:
        first = int(troubled[0])
        raise ValueError(
            f"{where} on rank {comm.rank}: rank {first} passed {comm.bcast(problem, root=first)}"
        )
    if (rows[:, 1] != rows[0, 1]).any():
        raise ValueError(f"{where} on rank {comm.rank}: {_difference(comm, entries)}")
    return tuple(rows[:, 0].tolist())


def _digest(entries: Sequence[str]) -> int:
    digest = blake2b(repr(list(entries)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _difference(comm: Comm, entries: Sequence[str]) -> str:
    """Say what differs first; collective, off the usual path, so by pickles."""
    model: Sequence[str] = comm.bcast(list(entries), root=0)
    pairs = zip_longest(model, entries, fillvalue="nothing more")
    own = next(
        ((at, comm.rank, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]),
        (sys.maxsize, comm.rank, "", ""),
    )
    _, rank, expected, actual = min(comm.allgather(own))
    return f"rank {rank} has {actual} where rank 0 has {expected}; all ranks must pass the same"

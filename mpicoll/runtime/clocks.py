"""How far the clocks of ranks are apart: ping-pong, and the shortest round trip counts.

Rank 0 asks, a rank answers with its time. The answer was given somewhere between question and
its arrival, so the middle of the two is wrong by half the round trip at most, whatever the
network did. F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDS = 40  #: questions to each clock
_TAG = 1


class Sample(NamedTuple):
    """``offset``: own clock minus that of world rank ``reference``, wrong by ``error`` at most.

    ``at`` is when, on the own clock; ``run`` names the run of the reference. Seconds.
    """

    reference: int
    run: str
    at: float
    offset: float
    error: float


def best(rounds: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return (at, offset, error) of the shortest of rounds (asked, answered, arrived)."""
    asked, answered, arrived = min(rounds, key=lambda one: one[2] - one[0])
    return answered, answered - (asked + arrived) / 2, (arrived - asked) / 2


def compare(
    comm: MPI.Intracomm, world_rank: int, run: str, token: str, clock: Callable[[], float]
) -> Sample:
    """Return how this rank's clock stands to that of rank 0 of ``comm``; collective.

    Ranks with an equal ``token`` read the same clock, and the first of them answers for all.
    """
    tokens: list[str] = comm.allgather(token)
    leaders = {one: tokens.index(one) for one in dict.fromkeys(tokens)}
    me = comm.Get_rank()
    found: dict[str, tuple[float, float, float]] = {}
    if me == 0:
        found = {one: best(_ask(comm, leader, clock)) for one, leader in leaders.items() if leader}
    elif leaders[token] == me:
        _answer(comm, clock)
    reference, run, found = comm.bcast((world_rank, run, found), root=0)
    # Two readings of one clock differ by nothing.
    return Sample(reference, run, *found.get(token, (clock(), 0.0, 0.0)))


def _ask(
    comm: MPI.Intracomm, peer: int, clock: Callable[[], float]
) -> list[tuple[float, float, float]]:
    answer = np.zeros(1)
    rounds = []
    for _ in range(ROUNDS):
        asked = clock()
        comm.Send(answer, peer, _TAG)
        comm.Recv(answer, peer, _TAG)
        rounds.append((asked, float(answer[0]), clock()))
    return rounds


def _answer(comm: MPI.Intracomm, clock: Callable[[], float]) -> None:
    answer = np.zeros(1)
    for _ in range(ROUNDS):
        comm.Recv(answer, 0, _TAG)
        answer[0] = clock()
        comm.Send(answer, 0, _TAG)

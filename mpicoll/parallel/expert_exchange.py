"""What the ranks send each other in an expert dispatch: sizes, and rows there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree
from mpicoll.parallel.library import Array, gather, library, scatter
from mpicoll.parallel.routing import DTYPES, Assignment, Choices, Ints
from mpicoll.schedule.partition import offsets

#: Over what the capacity of an expert is counted: the tokens of one rank, or of all.
Over = Literal["rank", "world"]

#: What goes along with the sizes: whether this rank refuses its arguments, what all ranks
#: must pass alike (dispatch, choices, hidden size, dtype), and the tokens of this rank.
_HEADER = 6


class Settings(NamedTuple):
    """What the ranks agree on when an `ExpertDispatch` is made; ``number`` names it."""

    experts: int
    owners: tuple[int, ...]
    factor: Fraction | None
    over: Over
    algorithm: str | None
    number: int = 0

    def owned(self, rank: int) -> range:
        """Return the numbers of the experts of a rank."""
        first = offsets(self.owners)
        return range(first[rank], first[rank + 1])


class Batch(NamedTuple):
    """The arguments of a dispatch, or what is wrong with them."""

    rows: Array
    choices: Choices
    problem: str | None = None

    @classmethod
    def of(cls, check: Callable[[], tuple[Array, Choices]]) -> Batch:
        """Look at arguments; whatever is wrong must not keep this rank from its exchange."""
        try:
            return cls(*check())
        except Exception as error:
            nothing = np.zeros((0, 1), np.int64)
            return cls(np.zeros((0, 0)), Choices(nothing, None, False), problem_of(error))

    def entries(self) -> list[str]:
        """Return what all ranks must pass alike, in words."""
        return [
            f"tokens of {self.rows.dtype} of size {self.rows.shape[1]}",
            f"{self.choices.count} choices per token",
        ]


def problem_of(error: Exception) -> str:
    """Return the words of a check, and of other errors their type too."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def exchange_sizes(
    comm: Comm, settings: Settings, call: int, batch: Batch, counts: Ints
) -> tuple[int, Ints]:
    """Return the tokens of all ranks, and how many rows (rank, own expert) get.

    One Alltoall. The validity of each rank's arguments goes along; if one is not valid, or
    they do not fit together, all ranks see it and raise the same ValueError.
    """
    tokens, width = batch.rows.shape
    dtype = DTYPES.index(batch.rows.dtype)
    refused = batch.problem is not None
    header = np.array([refused, call, batch.choices.count, width, dtype, tokens], np.int64)
    send = np.zeros((comm.size, _HEADER + max(settings.owners)), np.int64)
    receive = np.empty_like(send)
    send[:, :_HEADER] = header
    for rank, owned in enumerate(settings.owners):
        own = settings.owned(rank)
        send[rank, _HEADER : _HEADER + owned] = counts[own.start : own.stop]
    comm.Alltoall(send, receive)
    headers, sizes = receive[:, :_HEADER], receive[:, _HEADER:]
    if headers[:, 0].any() or (headers[:, 1:-1] != headers[0, 1:-1]).any():
        # All ranks come here or none: they have seen the same headers.
        entries = [f"dispatch {call} of ExpertDispatch {settings.number}", *batch.entries()]
        agree(comm, "dispatch", entries, problem=batch.problem)
        raise AssertionError("headers differ, words do not")
    return int(headers[:, -1].sum()), sizes[:, : settings.owners[comm.rank]]


def exchange_taken(comm: Comm, settings: Settings, taken: Ints) -> Ints:
    """Tell each rank how many of its rows the experts here take; return what this one is told.

    ``taken`` is (rank, own expert); the result has one entry per expert. One Alltoall.
    """
    owners = settings.owners
    send = np.zeros((comm.size, max(owners)), np.int64)
    receive = np.empty_like(send)
    send[:, : taken.shape[1]] = taken
    comm.Alltoall(send, receive)
    return np.concatenate([row[:owned] for row, owned in zip(receive, owners, strict=True)])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How the rows of one dispatch go there and back.

    ``sends`` and ``receives`` are rows per rank; ``to_expert`` is the order that brings
    rows as they arrive to experts, None where it changes nothing.
    """

    comm: Comm
    settings: Settings
    call: int
    choices: Choices
    assignment: Assignment
    sends: list[int]
    receives: list[int]
    to_expert: Ints | None

    def agreed(self, where: str, check: Callable[[], Array]) -> Array:
        """Return what ``check`` does, if it does on all ranks and all pass alike.

        Collective; raises the same ValueError on every rank if not.
        """
        problem, entries, rows = None, [], np.empty(0)
        try:
            rows = check()
            entries = [
                where,
                f"dispatch {self.call} of ExpertDispatch {self.settings.number}",
                f"rows of {rows.dtype} of size {rows.shape[-1]}",
            ]
        except Exception as error:  # whatever it is, the other ranks wait for this one
            problem = problem_of(error)
        agree(self.comm, where, entries, problem=problem)
        return rows

    def send(self, rows: Array) -> Array:
        """Bring rows in the order of the assignment to the experts."""
        received = self._exchange(rows, self.sends, self.receives)
        return received if self.to_expert is None else gather(received, self.to_expert)

    def back(self, rows: Array) -> Array:
        """Bring rows of the experts back into the order of the assignment."""
        if self.to_expert is not None:
            arranged = library(rows).empty(rows.shape, rows.dtype)
            scatter(arranged, self.to_expert, rows)
            rows = arranged
        return self._exchange(rows, self.receives, self.sends)

    def _exchange(self, rows: Array, sends: list[int], receives: list[int]) -> Array:
        width = rows.shape[1]
        received: Array = library(rows).empty((sum(receives), width), rows.dtype)
        self.comm.Alltoallv(
            [rows, [count * width for count in sends]],
            [received, [count * width for count in receives]],
            algorithm=self.settings.algorithm,
        )
        return received

"""What all collectives of a communicator share: its link, the call's tag, agreements."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms import find
from mpicoll.errors import ShortMessageError
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.link import Link, attach
from mpicoll.runtime.stats import Stats
from mpicoll.schedule.ir import Call
from mpicoll.selection.choose import Choice, Wanted

_Method = TypeVar("_Method", bound=Callable[..., Any])


def placed(method: _Method) -> _Method:
    """Add the method and the rank to what bad arguments raise; keep the class."""

    @wraps(method)
    def placed(self: Base, *args: Any, **keywords: Any) -> Any:
        try:
            return method(self, *args, **keywords)
        except CallError as error:
            where = f"{method.__name__} on rank {self._rank_for_errors()}"
            raise CallError(error.Get_error_class(), f"{where}: {error.message}") from None
        except (BufferError, KeyError, ShortMessageError, TypeError, ValueError) as error:
            what = error.args[0] if error.args else error
            error.args = (f"{method.__name__} on rank {self._rank_for_errors()}: {what}",)
            raise

    return cast(_Method, placed)


def in_place(buffer: object) -> bool:
    """Whether a buffer argument says in place; mpi4py takes None for that, too."""
    return buffer is None or buffer is MPI.IN_PLACE


def end(finish: Callable[[], None] | None) -> None:
    if finish is not None:
        finish()


class Base:
    """State and helpers of a wrapped communicator; mixed into `mpicoll.Comm`."""

    @property
    def _link(self) -> Link:
        link = self.__dict__.get("_mpicoll_link")
        if not isinstance(link, Link):
            # Absent after Idup alone: a duplicate may not be made in a non-blocking call.
            if self == MPI.COMM_NULL:
                raise CallError(MPI.ERR_COMM, "this is the null communicator")
            settings = self.__dict__.get("_mpicoll_settings")
            link = attach(cast(MPI.Intracomm, self), settings)
            self.__dict__["_mpicoll_link"] = link
        return link

    @property
    def stats(self) -> Stats:
        """What this rank called, sent and received on this communicator."""
        link = self.__dict__.get("_mpicoll_link")
        # Looking is local: the link of a duplicate by request is made at its first collective.
        return link.stats if isinstance(link, Link) else Stats()

    def _rank_for_errors(self) -> str:
        comm = cast(MPI.Intracomm, self)
        return str(comm.Get_rank()) if comm != MPI.COMM_NULL else "?"

    def _begin(self, root: int = 0) -> int:
        """Consume a sequence number, then refuse a wrong root; return the call's tag."""
        link = self._link
        tag = link.next_tag()
        if not 0 <= root < link.size:
            raise CallError(
                MPI.ERR_ROOT, f"root {root!r}, expected a rank from 0 to {link.size - 1}"
            )
        return tag

    def _choose(
        self,
        collective: str,
        algorithm: str | None,
        segment: int | None,
        nbytes: int | None = None,
        uniform: bool = True,
    ) -> Choice:
        wanted = Wanted(collective, self._link.size, nbytes, uniform=uniform)
        return self._link.choose(wanted, algorithm, segment)

    def _agree(self, own: int, tag: int) -> tuple[int, ...]:
        """Return the numbers that all ranks pass, in rank order."""
        link = self._link
        numbers = np.empty(link.size, np.int64)
        schedule = find("allgather", "bruck").build(Call(link.rank, link.size, (1,) * link.size))
        source = np.array([own], np.int64)
        link.exchange(schedule, tag, source.view(np.uint8), numbers.view(np.uint8), "bruck")
        return tuple(numbers.tolist())

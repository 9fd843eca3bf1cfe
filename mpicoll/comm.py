"""`Comm`: an mpi4py communicator whose collectives are ours.

Signatures, buffer specifications and error classes are mpi4py's. Every collective has its
three forms, such as ``Allreduce``, ``Iallreduce`` and ``Allreduce_init``. Four keywords are
added, which must agree on all ranks:

- ``algorithm``: the name of an algorithm; an unknown or unfit one raises AlgorithmError;
- ``segment``: the most bytes of a pipelined piece, 0 for no cutting;
- ``order``: "rank" gives the bits of a left-to-right reduction over ranks (reductions);
- ``timeout``: the time limit in seconds, 0 for none, in place of the communicator's.

Methods of objects (``bcast``, ``allreduce`` and their kin) and the making of communicators
have no non-blocking form in the MPI, and so no time limit; but what is in flight on the
communicator is completed first, under its own. `Free` waits for the other ranks under that
of the communicator.

Bad arguments raise before anything is sent and leave every buffer as it was. Where ranks
must first agree on counts (reduce-scatter without ``recvcounts``, gatherv and scatterv by
trees) that agreement goes before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, cast

from mpi4py import MPI

from mpicoll.collectives.movement import Movement
from mpicoll.collectives.reductions import Reductions
from mpicoll.runtime.flight import RECORDER
from mpicoll.runtime.link import Link, attach
from mpicoll.selection.settings import limit


# The requests of non-blocking collectives are ours and not the MPI's: mypy must let it pass.
class Comm(Movement, Reductions, MPI.Intracomm):  # type: ignore[misc]
    """An intracommunicator whose collectives are mpicoll's.

    ``mpicoll.Comm(MPI.COMM_WORLD)`` wraps; it shares the handle, so point-to-point
    traffic and everything else stay as they were. Wrapping is collective the first time
    a communicator is wrapped. `Dup`, `Split`, `Split_type`, `Create`, `Create_group` and
    the topology constructors return wrapped communicators; what `Create_from_group` and
    the merge of an intercommunicator return has to be wrapped.

    ``timeout`` (seconds, 0 for none) is the time limit of every call on it, ``check=True``
    makes the ranks compare their calls, ``progress="thread"`` drives non-blocking calls by
    a thread, ``memory`` says where buffers mostly are, which keys the tuning table; all
    ranks must pass the same. What is left out stays as it is: as the
    environment has it, or the communicator that this one is derived from.

    Raises TypeError for anything but an intracommunicator; SettingError, on every rank,
    when an ``MPICOLL_`` variable on rank 0 is wrong or an MPI without
    MPI_THREAD_MULTIPLE can not have the thread; ValueError for a limit that is none.
    """

    def __new__(
        cls,
        comm: MPI.Comm | None = None,
        *,
        timeout: float | None = None,
        check: bool | None = None,
        progress: Literal["thread"] | None = None,
        memory: Literal["host", "device"] | None = None,
    ) -> Comm:
        """Wrap ``comm``; without one make a null communicator, as mpi4py does."""
        wishes = _wishes(timeout, check, progress, memory)
        if not (comm is None or isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL):
            raise TypeError(
                f"Comm wraps intracommunicators, got {type(comm).__name__}; an "
                "intercommunicator keeps its own collectives"
            )
        if comm is not None and cls is Comm and comm != MPI.COMM_NULL:
            cls = _CLASSES.get(comm.Get_topology(), Comm)
        # The base that mpi4py's own constructor belongs to: Intracomm or a topology.
        base: Any = next(one for one in cls.__mro__ if one.__module__ == MPI.__name__)
        new = cast("Comm", base.__new__(cls, comm))
        if comm is not None and new != MPI.COMM_NULL:
            link = new.__dict__["_mpicoll_link"] = attach(new)
            if wishes:
                link.apply(replace(link.settings, **wishes))
        return new

    def _adopt(self, comm: MPI.Intracomm) -> Any:
        """Wrap a communicator derived from this one, with this one's settings."""
        if comm == MPI.COMM_NULL:
            return comm
        attach(comm, self._link.settings)
        return Comm(comm)

    def Free(self) -> None:
        """Free the communicator and the duplicate behind it; collective.

        What is in flight on it is completed first. After a time-out it does nothing:
        ranks that are gone could not take part.
        """
        link = self.__dict__.get("_mpicoll_link")
        if isinstance(link, Link):
            if link.poison:
                return
            link.free()  # here, where a time-out can be raised
        super().Free()
        self.__dict__.pop("_mpicoll_link", None)

    def Set_name(self, name: str) -> None:
        """Name the communicator; the flight recorder shows the name."""
        super().Set_name(name)
        link = self.__dict__.get("_mpicoll_link")
        if isinstance(link, Link):
            RECORDER.rename(link.identity, self.Get_name())

    def _complete(self) -> None:
        """Complete the non-blocking collectives in flight here.

        Before a call of all ranks in which this one can not drive them. Raises PoisonedError
        where a call has timed out.
        """
        link = self.__dict__.get("_mpicoll_link")
        if isinstance(link, Link):
            link.learn()
            link.complete(persistent=False)

    def _native(self, native: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Call a method that stays the MPI's own, and count it.

        Under a time limit a blocking one runs as its non-blocking form, where the MPI has one.
        Else the non-blocking collectives in flight here are completed first, since nothing
        drives them while the MPI waits.
        """
        link, name = self._link, native.__name__
        link.stats.add_native(name)
        link.learn()
        begin = getattr(MPI.Topocomm, f"I{name[:1].lower()}{name[1:]}", None)
        if link.settings.timeout is None or begin is None or name[0].islower():
            # The same form on all ranks, be there something in flight or not: they do not match.
            if not name.startswith("I") and not name.endswith("_init"):
                self._complete()
            return native(self, *args, **keywords)
        link.wait_native(name, lambda: begin(self, *args, **keywords), link.settings.timeout)
        return None

    # -- constructors -----------------------------------------------------------------

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Duplicate the communicator; the settings go along, the counters do not."""
        self._complete()
        return self._adopt(super().Dup(info))

    def Clone(self) -> Any:
        """Duplicate the communicator, hints included."""
        self._complete()
        return self._adopt(super().Clone())

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Duplicate the communicator with hints."""
        self._complete()
        return self._adopt(super().Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """Duplicate by request; the duplicate behind it is made at its first collective."""
        self._link.learn()
        comm, request = super().Idup(info)
        comm.__dict__["_mpicoll_settings"] = self._link.settings
        return comm, request

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Split by colour, ordered by key."""
        self._complete()
        return self._adopt(cast(MPI.Intracomm, super().Split(color, key)))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Split by kind, such as MPI.COMM_TYPE_SHARED."""
        self._complete()
        return self._adopt(cast(MPI.Intracomm, super().Split_type(split_type, key, info)))

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group; collective over this one."""
        self._complete()
        return self._adopt(cast(MPI.Intracomm, super().Create(group)))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator of a group; collective over the group."""
        # Of the ranks of the group only: nothing is completed, for which all would have to come.
        self._link.learn()
        return self._adopt(super().Create_group(group, tag))

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Make a Cartesian communicator."""
        self._complete()
        return self._adopt(super().Create_cart(dims, periods, reorder))

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> Any:
        """Make a graph communicator."""
        self._complete()
        return self._adopt(super().Create_graph(index, edges, reorder))

    def Create_dist_graph(self, *args: Any, **keywords: Any) -> Any:
        """Make a distributed-graph communicator; mpi4py's arguments."""
        self._complete()
        return self._adopt(super().Create_dist_graph(*args, **keywords))

    def Create_dist_graph_adjacent(self, *args: Any, **keywords: Any) -> Any:
        """Make a distributed-graph communicator of adjacent ranks; mpi4py's arguments."""
        self._complete()
        return self._adopt(super().Create_dist_graph_adjacent(*args, **keywords))


class Cartcomm(MPI.Cartcomm, Comm):  # type: ignore[misc]
    """A Cartesian communicator whose collectives are mpicoll's."""

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Keep some dimensions; one communicator per slice."""
        self._complete()
        return self._adopt(super().Sub(remain_dims))


class Graphcomm(MPI.Graphcomm, Comm):  # type: ignore[misc]
    """A graph communicator whose collectives are mpicoll's."""


class Distgraphcomm(MPI.Distgraphcomm, Comm):  # type: ignore[misc]
    """A distributed-graph communicator whose collectives are mpicoll's."""


def _wishes(
    timeout: float | None, check: bool | None, progress: str | None, memory: str | None
) -> dict[str, Any]:
    """Return the settings that a wrap asks for."""
    wishes: dict[str, Any] = {}
    if timeout is not None:
        wishes["timeout"] = limit(timeout)
    if check is not None:
        wishes["check"] = bool(check)
    if progress is not None:
        if progress != "thread":
            raise ValueError(f"progress={progress!r}; known: None, 'thread'")
        wishes["progress"] = progress
    if memory is not None:
        if memory not in ("host", "device"):
            raise ValueError(f"memory={memory!r}; known: None, 'host', 'device'")
        wishes["memory"] = memory
    return wishes


def _counted(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return an inherited method, which stays the MPI's own, counted as such."""

    @wraps(native)
    def method(self: Comm, *args: Any, **keywords: Any) -> Any:
        return self._native(native, args, keywords)

    name = native.__name__
    if name.startswith("I") or name.endswith("_init"):
        limited = "it has no time limit"
    elif name[0].isupper():
        limited = "under a time limit it runs as its non-blocking form"
    else:
        limited = "it has no time limit, since the MPI has no non-blocking form of it"
    method.__doc__ = f"{native.__doc__}\n\nThis is the MPI's own; {limited}."
    return method


_CLASSES: dict[int, type[Comm]] = {
    MPI.CART: Cartcomm,
    MPI.GRAPH: Graphcomm,
    MPI.DIST_GRAPH: Distgraphcomm,
}
_PICKLED = ("allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "reduce", "scan")
for _name in (*_PICKLED, "scatter"):
    setattr(Comm, _name, _counted(getattr(MPI.Intracomm, _name)))
for _class in _CLASSES.values():
    for _name in dir(MPI.Topocomm):
        if _name.lower().startswith(("neighbor_", "ineighbor_")):
            setattr(_class, _name, _counted(getattr(MPI.Topocomm, _name)))

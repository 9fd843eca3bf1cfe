"""`Comm`: an mpi4py communicator whose collectives are ours.

Signatures, buffer specifications and error classes are mpi4py's. Three keywords are
added, which must agree on all ranks:

- ``algorithm``: the name of an algorithm; an unknown or unfit one raises AlgorithmError;
- ``segment``: the most bytes of a pipelined piece, 0 for no cutting;
- ``order``: "rank" gives the bits of a left-to-right reduction over ranks (reductions).

Bad arguments raise before anything is sent and leave every buffer as it was. Where ranks
must first agree on counts (reduce-scatter without ``recvcounts``, gatherv and scatterv by
trees) that agreement goes before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

from mpi4py import MPI

from mpicoll.collectives.movement import Movement
from mpicoll.collectives.reductions import Reductions
from mpicoll.runtime.link import Link, attach


class Comm(Movement, Reductions, MPI.Intracomm):
    """An intracommunicator whose collectives are mpicoll's.

    ``mpicoll.Comm(MPI.COMM_WORLD)`` wraps; it shares the handle, so point-to-point
    traffic and everything else stay as they were. Wrapping is collective the first time
    a communicator is wrapped. `Dup`, `Split`, `Split_type`, `Create`, `Create_group` and
    the topology constructors return wrapped communicators; what `Create_from_group` and
    the merge of an intercommunicator return has to be wrapped.

    Raises TypeError for anything but an intracommunicator, SettingError (on every rank)
    when an ``MPICOLL_`` variable on rank 0 is wrong.
    """

    def __new__(cls, comm: MPI.Comm | None = None) -> Comm:
        """Wrap ``comm``; without one make a null communicator, as mpi4py does."""
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
            new.__dict__["_mpicoll_link"] = attach(new)
        return new

    def _adopt(self, comm: MPI.Intracomm) -> Any:
        """Wrap a communicator derived from this one, with this one's settings."""
        if comm == MPI.COMM_NULL:
            return comm
        attach(comm, self._link.settings)
        return Comm(comm)

    def Free(self) -> None:
        """Free the communicator and the duplicate behind it; collective."""
        super().Free()
        self.__dict__.pop("_mpicoll_link", None)

    def _count_native(self, name: str) -> None:
        link = self.__dict__.get("_mpicoll_link")
        if isinstance(link, Link):
            link.stats.add((name, "native"))

    # -- constructors -----------------------------------------------------------------

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Duplicate the communicator; the settings go along, the counters do not."""
        return self._adopt(super().Dup(info))

    def Clone(self) -> Any:
        """Duplicate the communicator, hints included."""
        return self._adopt(super().Clone())

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Duplicate the communicator with hints."""
        return self._adopt(super().Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Any, MPI.Request]:
        """Duplicate by request; the duplicate behind it is made at its first collective."""
        comm, request = super().Idup(info)
        comm.__dict__["_mpicoll_settings"] = self._link.settings
        return comm, request

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Split by colour, ordered by key."""
        return self._adopt(cast(MPI.Intracomm, super().Split(color, key)))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Split by kind, such as MPI.COMM_TYPE_SHARED."""
        return self._adopt(cast(MPI.Intracomm, super().Split_type(split_type, key, info)))

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group; collective over this one."""
        return self._adopt(cast(MPI.Intracomm, super().Create(group)))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator of a group; collective over the group."""
        return self._adopt(super().Create_group(group, tag))

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Make a Cartesian communicator."""
        return self._adopt(super().Create_cart(dims, periods, reorder))

    def Create_graph(
        self, index: Sequence[int], edges: Sequence[int], reorder: bool = False
    ) -> Any:
        """Make a graph communicator."""
        return self._adopt(super().Create_graph(index, edges, reorder))

    def Create_dist_graph(self, *args: Any, **keywords: Any) -> Any:
        """Make a distributed-graph communicator; mpi4py's arguments."""
        return self._adopt(super().Create_dist_graph(*args, **keywords))

    def Create_dist_graph_adjacent(self, *args: Any, **keywords: Any) -> Any:
        """Make a distributed-graph communicator of adjacent ranks; mpi4py's arguments."""
        return self._adopt(super().Create_dist_graph_adjacent(*args, **keywords))


class Cartcomm(MPI.Cartcomm, Comm):
    """A Cartesian communicator whose collectives are mpicoll's."""

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Keep some dimensions; one communicator per slice."""
        return self._adopt(super().Sub(remain_dims))


class Graphcomm(MPI.Graphcomm, Comm):
    """A graph communicator whose collectives are mpicoll's."""


class Distgraphcomm(MPI.Distgraphcomm, Comm):
    """A distributed-graph communicator whose collectives are mpicoll's."""


def _counted(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return an inherited method, which stays the MPI's own, counted as such."""

    @wraps(native)
    def method(self: Comm, *args: Any, **keywords: Any) -> Any:
        self._count_native(native.__name__)
        return native(self, *args, **keywords)

    return method


_CLASSES: dict[int, type[Comm]] = {
    MPI.CART: Cartcomm,
    MPI.GRAPH: Graphcomm,
    MPI.DIST_GRAPH: Distgraphcomm,
}
_OURS = (
    *("Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier"),
    *("Bcast", "Exscan", "Gather", "Gatherv", "Reduce", "Reduce_scatter"),
    *("Reduce_scatter_block", "Scan", "Scatter", "Scatterv"),
)
_PICKLED = ("allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "reduce", "scan")
for _name in (
    *(f"I{name.lower()}" for name in _OURS),
    *(f"{name}_init" for name in _OURS),
    *(*_PICKLED, "scatter"),
):
    setattr(Comm, _name, _counted(getattr(MPI.Intracomm, _name)))
for _class in _CLASSES.values():
    for _name in dir(MPI.Topocomm):
        if _name.lower().startswith(("neighbor_", "ineighbor_")):
            setattr(_class, _name, _counted(getattr(MPI.Topocomm, _name)))

"""What saving and loading of sharded state share: the parts, the keys, one verdict for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.errors import MpicollError
from mpicoll.parallel.flat import Entry, Group
from mpicoll.parallel.library import Array
from mpicoll.parallel.sharded_files import DamagedError

#: Reasons that are shown; a thousand ranks mostly have the same one.
_SHOWN = 4


class SavedStateError(MpicollError, ValueError):
    """A state could not be saved, or what is there is foreign, incomplete or damaged."""


@dataclass(slots=True)
class Part:
    """This rank's elements of a group from ``low`` on, by kind; all of one length."""

    group: Group
    low: int
    arrays: dict[str, Array]


def verdict(comm: Comm, what: str, fault: str) -> None:
    """Raise SavedStateError on all ranks if one has a fault; else one allreduce of 8 bytes."""
    found = np.array([bool(fault)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    if not found[0]:
        return
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(comm.allgather(fault)):
        if text:
            ranks.setdefault(text, []).append(rank)
    said = [_whose(ranks[text]) + f": {text}" for text in [*ranks][:_SHOWN]]
    raise SavedStateError(f"{what}: " + "; ".join(said) + ("; …" if len(ranks) > _SHOWN else ""))


def _whose(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, DamagedError) else f"{type(error).__name__}: {error}"


def named(kind: str, group: Group, full: Array) -> Iterator[tuple[str, Array]]:
    """Yield a group's arrays of a kind, by key and in the shape of the parameter."""
    for entry in group.entries:
        flat = full[entry.start : entry.stop]
        if kind == "value":
            flat = flat.view(group.dtype)
        yield f"{kind}:{entry.name}", flat.reshape(_shape(kind, group, entry))


def _shape(kind: str, group: Group, entry: Entry) -> tuple[int, ...]:
    parts = kind != "value" and group.dtype.kind == "c"
    return (*entry.shape, 2) if parts else entry.shape

"""What stands behind a wrapped communicator: our own duplicate, and its state.

Law 2: user traffic never meets ours. The duplicate is made when a communicator is
wrapped, kept as an MPI attribute of it, freed with it and before Finalize, and not
copied by Dup.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms import Algorithm
from mpicoll.runtime.executor import Bytes, Program, Reduction, compiled, run
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.stats import Stats
from mpicoll.schedule.ir import Call, Schedule
from mpicoll.selection.choose import Choice, Wanted, choose
from mpicoll.selection.settings import Settings, gather, parse

#: Scratch up to this size is kept between calls, since fresh pages cost more than the
#: copy into them.
KEPT_WORK_BYTES = 64 << 20

EMPTY: Bytes = np.empty(0, np.uint8)


class Link:
    """The hidden duplicate of a communicator, its settings, sequence and counters."""

    def __init__(self, comm: MPI.Intracomm, settings: Settings | None) -> None:
        """Duplicate ``comm``; collective. ``settings`` None: agree on those of rank 0."""
        # Split and not Dup: it runs none of the user's attribute callbacks.
        self.hidden = cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.Get_rank()))
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.stats = Stats()
        self._sequence = 0
        # TAG_UB is at least 32767; the upper half is left to persistent plans.
        upper = self.hidden.Get_attr(MPI.TAG_UB)
        self._tags = ((upper if isinstance(upper, int) else 32767) + 1) // 2
        self._work = EMPTY
        if settings is None:
            variables = gather(os.environ) if self.rank == 0 else None
            try:
                settings = parse(self.hidden.bcast(variables, root=0))
            except BaseException:
                self.hidden.Free()
                raise
        self.settings = settings
        _LINKS.append(self)

    @property
    def freed(self) -> bool:
        """Whether the communicator was freed."""
        return self.hidden == MPI.COMM_NULL

    def next_tag(self) -> int:
        """Consume a sequence number and return the tag that goes with it.

        Called first in every collective, before anything is validated, so that an error
        on one rank does not mispair the next call.
        """
        if self.freed:
            raise CallError(MPI.ERR_COMM, "this communicator was freed")
        self._sequence += 1
        tag = self._sequence % self._tags
        if tag == 0:
            self._sweep()
        return tag

    def _sweep(self) -> None:
        """Throw away messages that nobody received, before their tags come round.

        They are left where a call raised on one rank and the others sent to it. All ranks
        have the same sequence number, so all are here.
        """
        self.hidden.Barrier()
        status = MPI.Status()
        while message := self.hidden.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            message.Recv([bytearray(status.count), MPI.BYTE])
        self.hidden.Barrier()

    def choose(
        self, wanted: Wanted, algorithm: str | None = None, segment_bytes: int | None = None
    ) -> Choice:
        """Return what runs for a call; equal on all ranks."""
        if algorithm is None and segment_bytes is None:
            return _chosen(wanted, self.settings)
        return choose(wanted, self.settings, algorithm, segment_bytes)

    def run(
        self,
        choice: Choice,
        call: Call,
        tag: int,
        *,
        item_bytes: int = 1,
        source: Bytes = EMPTY,
        target: Bytes = EMPTY,
        reduction: Reduction | None = None,
        alias: int | None = None,
    ) -> None:
        """Run one collective, and count it.

        ``source`` and ``target`` are input and output as dense bytes; ``alias`` is the
        byte of ``target`` where ``source`` begins when they share memory.
        """
        program = programmed(choice.algorithm, call, item_bytes)
        self.execute(program, tag, source, target, reduction, alias)
        self._count(program, choice.algorithm.collective, choice.algorithm.name)

    def exchange(
        self, schedule: Schedule, tag: int, source: Bytes, target: Bytes, name: str
    ) -> None:
        """Run a schedule of int64 items that prepares a collective, and count it."""
        program = compiled(schedule, np.dtype(np.int64).itemsize)
        self.execute(program, tag, source, target, None, None)
        self._count(program, "agreement", name)

    def execute(
        self,
        program: Program,
        tag: int,
        source: Bytes,
        target: Bytes,
        reduction: Reduction | None,
        alias: int | None,
    ) -> None:
        """Run a program in this communicator's scratch."""
        work = self._take_work(program.work_bytes)
        try:
            run(program, self.hidden, tag, (source, target, work), reduction, alias)
        finally:
            if self._work.size < work.size <= KEPT_WORK_BYTES:
                self._work = work

    def _take_work(self, nbytes: int) -> Bytes:
        """Return scratch of at least ``nbytes`` that nobody else uses."""
        if nbytes == 0:
            return EMPTY
        # Taken away while in use: a user operator may call a collective of its own.
        work, self._work = self._work, EMPTY
        return work if work.size >= nbytes else np.empty(nbytes, np.uint8)

    def _count(self, program: Program, collective: str, name: str) -> None:
        self.stats.add(
            (collective, name),
            messages_sent=program.messages_sent,
            messages_received=program.messages_received,
            bytes_sent=program.bytes_sent,
            bytes_received=program.bytes_received,
        )

    def free(self) -> None:
        """Free the duplicate; collective, harmless the second time."""
        if self in _LINKS:
            _LINKS.remove(self)
        if not self.freed and not MPI.Is_finalized():
            self.hidden.Free()


@lru_cache(maxsize=128)  # a program of 1000 ranks may have half a megabyte
def programmed(algorithm: Algorithm, call: Call, item_bytes: int) -> Program:
    """Build and compile a schedule, or return the one of an equal earlier call."""
    return compiled(algorithm.build(call), item_bytes)


_chosen = lru_cache(maxsize=4096)(choose)


# -- attribute and end of the process ---------------------------------------------------

_LINKS: list[Link] = []
_keyval: int | None = None


def _release(comm: MPI.Comm, keyval: int, link: Link) -> None:
    link.free()


def _release_all(*_: object) -> None:
    # Links were made by collective calls, so all ranks free them in the same order.
    for link in list(_LINKS):
        link.free()


def _key() -> int:
    """Return the attribute key; made at first use, with the hooks that end all links."""
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_release)
        # MPI.Finalize deletes the attributes of COMM_SELF first, while MPI still works.
        # mpi4py's own Finalize runs after the interpreter's end, too late for Python
        # code, hence the second hook.
        at_finalize: Callable[..., None] = _release_all
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=at_finalize), None)
    return _keyval


def _at_exit() -> None:
    # After an uncaught exception the other ranks are elsewhere: a collective free would
    # wait for them for ever.
    if not MPI.Is_finalized() and not hasattr(sys, "last_value"):
        _release_all()


# At import, so that hooks which users register later run before it.
atexit.register(_at_exit)


def attach(comm: MPI.Intracomm, settings: Settings | None = None) -> Link:
    """Return the link of ``comm``, made now if it has none; collective then."""
    found = comm.Get_attr(_key())
    if isinstance(found, Link):
        return found
    link = Link(comm, settings)
    comm.Set_attr(_key(), link)
    return link

"""The end of the process, or of MPI: what is in flight is completed, links are freed.

A link is kept as an attribute of its communicator, so that `Free` frees both. Where MPI is
finalised, by the user or, after the program's last line, by mpi4py, the ranks meet on those
that are left and free them. A rank that ends by an exception does not wait for the others,
nor do they for it. After a time-out the process ends by Abort.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import progress, watchdog
from mpicoll.runtime.abort import say
from mpicoll.runtime.flight import FINALIZE, deafen

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link

#: The links of this process, in the order in which they were made.
LINKS: list[Link] = []

#: Seconds for which a rank that fails goes on with what it has in flight.
FAIL_SECONDS = 1.0

_PID = os.getpid()
_keyval: int | None = None


def key() -> int:
    """Return the attribute key of links; made at first use, with the hook that ends them all."""
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_release)
        # MPI.Finalize deletes the attributes of COMM_SELF first, while MPI still works.
        # mpi4py's own Finalize runs after the interpreter's end, too late for Python
        # code, hence the second hook.
        at_finalize: Callable[..., None] = _release_all
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=at_finalize), None)
    return _keyval


def _release(comm: MPI.Comm, keyval: int, link: Link) -> None:
    link.free()


def _release_all(*_: object) -> None:
    _leave_if_poisoned()
    progress.stop_thread()
    try:
        # All are begun before one is waited for: threads may have made them in another order
        # on other ranks.
        for link, meeting in [(link, link.meet(FINALIZE)) for link in LINKS]:
            link.wait_for_all(meeting)
        _close_trace()
        for link in sorted(LINKS, key=lambda link: link.identity):
            if link.met:
                link.free()
    except CollectiveTimeout as error:
        say(f"mpicoll: {error}\n")
        _leave_if_poisoned()
    _forget()


def _fail() -> None:
    """End after an uncaught exception: the others may be anywhere, so nobody is waited for.

    What is in flight goes on for a short while: the others may wait for it.
    """
    progress.stop_thread()
    sent = watchdog.fail(LINKS)
    start = time.perf_counter()

    def over() -> bool:
        seconds = time.perf_counter() - start
        told = MPI.Request.Testall(sent) or seconds > watchdog.LEAVE_SECONDS
        return told and (not progress.ACTIVE or seconds > FAIL_SECONDS)

    progress.await_(over, lambda: None)
    _close_trace()
    _forget()


def _forget() -> None:
    """Leave what is still in flight to MPI, which may use its memory until it ends.

    That is after the interpreter, which frees all that it can: so one reference is never given
    back.
    """
    LINKS.clear()
    left = ([*progress.ACTIVE], watchdog.PARKED)
    if any(left):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))


def _close_trace() -> None:
    """End the trace; where all ranks have met, they compare their clocks once more.

    No fault of it keeps the process from its end.
    """
    with contextlib.suppress(OSError, ValueError):
        _end_trace()


def _end_trace() -> None:
    traced = [link for link in LINKS if link.tracer is not None]
    if traced and (tracer := traced[0].tracer) is not None:
        worlds = [link for link in traced if link.size == MPI.COMM_WORLD.size]
        world = min(worlds, key=lambda link: link.identity, default=None)
        tracer.close(world.hidden if world is not None and world.met else None)


def _leave_if_poisoned() -> None:
    poisoned = [link for link in LINKS if link.poison]
    if poisoned:
        _close_trace()
        watchdog.leave(poisoned)


def _at_exit() -> None:
    # A child of `os.fork` has no part in the job.
    if MPI.Is_finalized() or os.getpid() != _PID:
        return
    _leave_if_poisoned()
    if hasattr(sys, "last_value"):
        _fail()
    else:
        _release_all()
    deafen()


# At import, so that hooks which users register later run before it.
atexit.register(_at_exit)

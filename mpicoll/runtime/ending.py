"""The end of the process, or of MPI: what is in flight is completed, links are freed.

A link is kept as an attribute of its communicator, so that `Free` frees both. Those that
are left are freed when MPI is finalised, by the user or, after the program's last line, by
mpi4py. After a time-out nothing can be freed, and the process ends by Abort.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import progress, watchdog

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link

#: The links of this process, in the order in which they were made.
LINKS: list[Link] = []

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
        for link in LINKS:
            link.meet()
    except CollectiveTimeout as error:
        print(f"mpicoll: {error}", file=sys.stderr)
        _leave_if_poisoned()
    _close_trace(everywhere=True)
    # Links were made by collective calls, so all ranks free them in the same order.
    for link in list(LINKS):
        link.free()


def _close_trace(everywhere: bool) -> None:
    """End the trace; with ``everywhere`` all ranks do, and compare their clocks once more."""
    traced = [link for link in LINKS if link.tracer is not None]
    if traced and (tracer := traced[0].tracer) is not None:
        worlds = [link.hidden for link in traced if link.size == MPI.COMM_WORLD.size]
        tracer.close(worlds[0] if everywhere and worlds else None)


def _leave_if_poisoned() -> None:
    poisoned = [link for link in LINKS if link.poison]
    if poisoned:
        _close_trace(everywhere=False)
        watchdog.leave(poisoned)


def _at_exit() -> None:
    if MPI.Is_finalized():
        return
    _leave_if_poisoned()
    # After an uncaught exception the other ranks are elsewhere: a collective free would
    # wait for them for ever.
    if hasattr(sys, "last_value"):
        progress.stop_thread()
        _close_trace(everywhere=False)
    else:
        _release_all()


# At import, so that hooks which users register later run before it.
atexit.register(_at_exit)

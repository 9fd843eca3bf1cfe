"""Requests of non-blocking and persistent collectives, with mpi4py's methods."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Literal

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import progress
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.progress import Operation
from mpicoll.runtime.record import Record
from mpicoll.runtime.request_lists import Lists, empty, listed

#: Persistent plans that were dropped without `Free`: their last run, and what frees them. That is
#: not done where they are dropped, perhaps by the garbage collector, inside of anything.
FORGOTTEN: list[tuple[Operation | None, Callable[[], None]]] = []

#: What was under way on a communicator where a call has timed out: its buffers may still be
#: sent from and written to, until the process ends.
_GIVEN_UP: list[Operation] = []


class Request(Lists):
    """A collective that was started and is completed by `Wait` or `Test`.

    Lists given to the class methods may hold requests of mpi4py as well. A request that
    is dropped while its collective is under way gives a ResourceWarning; the collective
    is still completed, at the latest before MPI is finalised.

    mpi4py's own ``MPI.Request.Waitall`` and its kin hand C handles to the MPI and can not
    drive what runs in Python: on a communicator with ``progress="thread"`` the requests of
    ``I…`` methods work there too, without a time limit; elsewhere, and for persistent
    collectives, TypeError is raised.
    """

    _operation: Operation | None

    def __init__(self, operation: Operation | None = None) -> None:
        """Make the request of an operation."""
        self._operation = operation

    def __bool__(self) -> bool:
        """Whether there is something that is not waited for yet, as in mpi4py."""
        return self._is_active()

    def _is_active(self) -> bool:
        return self._operation is not None

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is None or operation.done:
            return
        if operation.link.poison:
            _GIVEN_UP.append(operation)
            return
        progress.adopt(operation)  # its start may have been interrupted
        if not operation.left:  # else the caller never had it
            record = operation.record
            _warn(
                f"a request was dropped before {record.collective} #{record.sequence}, started at "
                f"{record.site}, was complete",
                self,
            )

    # -- one request --------------------------------------------------------------------

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the collective is complete; raise what went wrong.

        CollectiveTimeout is raised when its time limit is over, counted from the first
        wait or test.
        """
        operation = self._operation
        if operation is not None:
            try:
                operation.wait()
            finally:
                if operation.done:
                    self._over()
        empty(status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is complete, and drive it; raise as `Wait` does."""
        operation = self._operation
        if operation is not None:
            operation.hold()
            progress.progress()
            if not operation.advance():
                operation.watch()
                return False
            progress.discard(operation)
            self._over()
            if operation.error is not None:
                raise operation.error
        empty(status)
        return True

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait until the collective is complete, as `Wait`; there is no object to return."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Return whether the collective is complete, and None for the object."""
        return self.Test(status), None

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is complete, and drive it; the request stays as it is.

        CollectiveTimeout is raised as by `Wait`.
        """
        progress.progress()
        done = self._is_done()
        if done:
            empty(status)
        return done

    def get_status(self, status: MPI.Status | None = None) -> bool:
        """Return what `Get_status` does."""
        return self.Get_status(status)

    def _is_done(self) -> bool:
        """Drive it alone; look at its time limit, if it is not complete."""
        if self._operation is None or self._operation.advance():
            return True
        self._watch()
        return False

    def _is_right(self) -> bool:
        """Drive it alone; return whether it is complete, and nothing went wrong."""
        self._hold()
        operation = self._operation
        return operation is None or (operation.advance() and operation.error is None)

    def Cancel(self) -> None:
        """Raise: MPI allows no collective to be cancelled."""
        raise CallError(MPI.ERR_REQUEST, "a collective can not be cancelled; wait for it")

    def cancel(self) -> None:
        """Raise, as `Cancel`."""
        self.Cancel()

    def Free(self) -> None:
        """Give up a request that is complete; one under way raises, as MPI rules.

        After a time-out on its communicator it is given up as it is.
        """
        operation = self._operation
        if operation is not None and not operation.done:
            if not operation.link.poison:
                raise CallError(
                    MPI.ERR_REQUEST,
                    "the request of a collective under way can not be freed; wait for it",
                )
            _GIVEN_UP.append(operation)
        self._over()

    def free(self) -> None:
        """Give up a request, as `Free`."""
        self.Free()

    def _over(self) -> None:
        self._operation = None

    def _is_limited(self) -> bool:
        return self._operation is not None and self._operation.limit is not None

    def _hold(self) -> None:
        """Let its time limit run from now on, unless it runs already."""
        if self._operation is not None:
            self._operation.hold()

    def _watch(self) -> None:
        """Look at the time limit, if it is not complete."""
        self._hold()
        if self._operation is not None and not self._operation.done:
            self._operation.watch()


class Prequest(Request):
    """A persistent collective: `Start` begins it, `Wait` or `Test` completes it, again and again.

    Arguments are checked, memory is sliced and MPI's requests are made once. The buffers
    belong to it until `Free`, which is local. One that is dropped without gives a
    ResourceWarning, and is freed when the next plan is made, or with its communicator.
    """

    def __init__(
        self,
        begin: Callable[[], Operation],
        free: Callable[[], None],
        made: Record,
    ) -> None:
        """Make a request from what makes the operation of a run, and what frees the plan.

        ``made`` is the call that made the plan.
        """
        super().__init__()
        self._made = made
        # Both hold the plan, and with it the caller's buffers.
        self._begin: Callable[[], Operation] | None = begin
        self._release: Callable[[], None] | None = free

    def __bool__(self) -> bool:
        """Whether it was not freed, as in mpi4py."""
        return self._release is not None

    def __del__(self) -> None:
        operation: Operation | None = getattr(self, "_operation", None)
        release: Callable[[], None] | None = getattr(self, "_release", None)
        over = sys.is_finalizing() or MPI.Is_finalized()
        if release is None or over or (operation is not None and operation.link.poison):
            super().__del__()
            return
        FORGOTTEN.append((operation, release))
        super().__del__()
        made = self._made
        _warn(
            f"{made.collective} #{made.sequence}, made at {made.site}, was dropped without Free",
            self,
        )

    def Start(self) -> None:
        """Begin the collective once more; on all ranks. One that is active raises.

        One that an interrupt leaves active is under way and has to be waited for, else nothing
        was begun.
        """
        if self._begin is None:
            raise CallError(MPI.ERR_REQUEST, "this persistent collective was freed")
        if self._operation is not None:
            raise CallError(
                MPI.ERR_REQUEST, "this persistent collective is active; wait for it first"
            )
        # Known before it sends anything: an interrupt can not lose a run that others wait for.
        operation = self._operation = self._begin()
        try:
            progress.launch(operation)
        except (CollectiveTimeout, MPI.Exception):
            self._operation = None
            raise

    @classmethod
    def Startall(cls, requests: Iterable[Prequest | MPI.Prequest]) -> None:
        """Begin all of them."""
        for request in listed(requests, (Prequest, MPI.Prequest), "a persistent request"):
            request.Start()

    def Free(self) -> None:
        """Free the plan; local. One that is active raises, as MPI rules.

        After a time-out on its communicator it is given up as it is.
        """
        operation = self._operation
        super().Free()
        if self._release is not None and (operation is None or operation.done):
            self._release()
        self._release = self._begin = None


class GeneralRequest(Request, MPI.Request):
    """A request that mpi4py's own ``MPI.Request.Waitall`` takes: the progress thread runs it.

    It is a generalised request of the MPI, which the end of the operation completes.
    """

    def __del__(self) -> None:
        operation = self.__dict__.get("_operation")
        try:
            super().__del__()
        finally:  # warnings may be errors
            if not (operation is None or sys.is_finalizing() or MPI.Is_finalized()):
                self._give_back()

    def _give_back(self) -> None:
        # The MPI does so when it is complete, be that before or after this.
        with contextlib.suppress(MPI.Exception):
            if MPI.Request.__bool__(self):
                MPI.Request.Free(self)

    def _is_active(self) -> bool:
        return super()._is_active() and MPI.Request.__bool__(self)

    def _over(self) -> None:
        operation = self._operation
        super()._over()
        self.__dict__["_heard"].append(True)  # what it raised is in the operation
        if MPI.Is_finalized():
            return
        if operation is not None and not operation.done:
            self._give_back()
            return
        with contextlib.suppress(MPI.Exception):  # an interrupt of the query
            MPI.Request.Wait(self)


def request_for(operation: Operation) -> Request:
    """Return the request of an operation that was not launched yet."""
    if not operation.link.threaded:
        return _Driven(operation)
    heard: list[bool] = []
    general = MPI.Grequest.Start(_query(operation, heard), None, _cancel)
    operation.on_end.append(general.Complete)
    request = GeneralRequest.__new__(GeneralRequest, general)
    Request.__init__(request, operation)
    request.__dict__["_heard"] = heard
    return request


def _query(operation: Operation, heard: list[bool]) -> Callable[[MPI.Status], None]:
    """Return what tells the MPI of an error, unless the caller has ``heard`` of it from us.

    mpi4py prints what it raises.
    """

    def query(status: MPI.Status) -> None:
        empty(status)
        if operation.error is not None and not heard:
            raise MPI.Exception(
                operation.error.Get_error_class()
                if isinstance(operation.error, MPI.Exception)
                else MPI.ERR_OTHER
            )

    return query


def _cancel(completed: bool) -> None:
    if not completed:
        raise MPI.Exception(MPI.ERR_REQUEST)


def persistent_for(
    begin: Callable[[], Operation], free: Callable[[], None], made: Record
) -> Prequest:
    """Return the request of a persistent plan."""
    return _DrivenPlan(begin, free, made)


def free_forgotten() -> None:
    """Free the plans that were dropped without `Free`, but for those under way; local."""
    for one in list(FORGOTTEN):
        operation, release = one
        if operation is None or operation.done:
            release()  # harmless the second time, if an interrupt or another thread comes between
            with contextlib.suppress(ValueError):
                FORGOTTEN.remove(one)


def _warn(text: str, source: Request) -> None:
    """Warn of a request that is dropped, where that is done."""
    warnings.warn(text, ResourceWarning, stacklevel=3, source=source)


# The name is what mpi4py says when it is given one: "Cannot convert … to mpi4py.MPI.Request".
_Driven: type[Request] = type(
    "a collective of mpicoll (mpicoll.Request.Waitall and its kin take it, those of MPI.Request "
    "do not)",
    (Request,),
    {},
)
_DrivenPlan: type[Prequest] = type(
    "a persistent collective of mpicoll (mpicoll.Prequest.Startall, Waitall and their kin take "
    "it, mpi4py's do not)",
    (Prequest,),
    {},
)

"""Requests of non-blocking and persistent collectives, with mpi4py's methods."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import progress
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.progress import Operation
from mpicoll.runtime.watchdog import LOOK_SECONDS

_Any: TypeAlias = "Request | MPI.Request"


class Request:
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
    _limit: float | None

    def __init__(self, operation: Operation | None = None, limit: float | None = None) -> None:
        """Make the request of an operation; ``limit`` seconds are what a wait may take."""
        self._operation = operation
        self._limit = limit

    def __bool__(self) -> bool:
        """Whether there is something that is not waited for yet, as in mpi4py."""
        return self._is_active()

    def _is_active(self) -> bool:
        return self._operation is not None

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None and not operation.done:
            progress.adopt(operation)  # its start may have been interrupted
            if operation.left:
                return  # the caller never had it
            warnings.warn(
                f"a request was dropped before {operation.record.collective} "
                f"#{operation.record.sequence}, started at {operation.record.site}, was complete",
                ResourceWarning,
                stacklevel=2,
                source=self,
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
                operation.wait(self._limit)
            finally:
                if operation.done:
                    self._over()
        _empty(status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is complete, and drive it; raise as `Wait` does."""
        operation = self._operation
        if operation is not None:
            operation.hold_to(self._limit)
            progress.progress()
            if not operation.advance():
                operation.watch()
                return False
            progress.discard(operation)
            self._over()
            if operation.error is not None:
                raise operation.error
        _empty(status)
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
            _empty(status)
        return done

    def _is_done(self) -> bool:
        """Drive it alone; look at its time limit, if it is not complete."""
        if self._operation is None or self._operation.advance():
            return True
        self._watch()
        return False

    def Cancel(self) -> None:
        """Raise: MPI allows no collective to be cancelled."""
        raise CallError(MPI.ERR_REQUEST, "a collective can not be cancelled; wait for it")

    def cancel(self) -> None:
        """Raise, as `Cancel`."""
        self.Cancel()

    def Free(self) -> None:
        """Give up a request that is complete; one under way raises, as MPI rules."""
        if self._operation is not None and not self._operation.done:
            raise CallError(
                MPI.ERR_REQUEST,
                "the request of a collective under way can not be freed; wait for it",
            )
        self._over()

    def free(self) -> None:
        """Give up a request, as `Free`."""
        self.Free()

    def _over(self) -> None:
        self._operation = None

    # -- many requests ------------------------------------------------------------------

    @classmethod
    def Waitall(
        cls, requests: Sequence[_Any], statuses: list[MPI.Status] | None = None
    ) -> Literal[True]:
        """Wait until all are complete; raise the first error, after all are.

        The time limits of all count from now on, and one that is over ends the wait at once:
        those that were not waited for by then are as they were.
        """
        errors = []
        watch = _watch_of(requests)
        for number, request in enumerate(requests):
            try:
                _waited(request, _status(statuses, number), watch)
            except CollectiveTimeout:
                raise
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    @classmethod
    def Testall(cls, requests: Sequence[_Any], statuses: list[MPI.Status] | None = None) -> bool:
        """Return whether all are complete; if not, none of them is given up."""
        ours = [request for request in requests if isinstance(request, Request)]
        progress.progress()
        done = [request._is_done() for request in ours]  # and watched, each of them
        if not all(done):
            return False
        others: list[MPI.Request] = []
        found: list[MPI.Status] = []
        for number, request in enumerate(requests):
            status = _status(statuses, number)
            if isinstance(request, Request):
                _empty(status)
            else:
                others.append(request)
                found.append(MPI.Status() if status is None else status)
        return MPI.Request.Testall(others, found) and cls.Waitall(ours)

    @classmethod
    def Waitany(cls, requests: Sequence[_Any], status: MPI.Status | None = None) -> int:
        """Wait until one is complete and return its index, MPI.UNDEFINED if none is active."""
        return _until(lambda: cls.Testany(requests, status))[0]

    @classmethod
    def Testany(
        cls, requests: Sequence[_Any], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of one that is complete and True; (MPI.UNDEFINED, True) if none
        is active."""
        active = False
        for number, request in enumerate(requests):
            known, over = _tested(request, status)
            if known and over:
                return number, True
            active = active or known
        if active:
            return MPI.UNDEFINED, False
        _empty(status)
        return MPI.UNDEFINED, True

    @classmethod
    def Waitsome(
        cls, requests: Sequence[_Any], statuses: list[MPI.Status] | None = None
    ) -> list[int] | None:
        """Wait until some are complete and return their indices, None if none is active."""
        return _until(lambda: _some(requests, statuses))[0]

    @classmethod
    def Testsome(
        cls, requests: Sequence[_Any], statuses: list[MPI.Status] | None = None
    ) -> list[int] | None:
        """Return the indices of those that are complete, None if none is active."""
        return _some(requests, statuses)[0]

    @classmethod
    def waitall(
        cls, requests: Sequence[_Any], statuses: list[MPI.Status] | None = None
    ) -> list[Any]:
        """Wait for all and return their objects; a collective has None."""
        watch = _watch_of(requests)
        found: list[Any] = []
        for number, request in enumerate(requests):
            status = _status(statuses, number)
            if isinstance(request, Request):
                _waited(request, status, watch)
                found.append(None)
            else:
                found.append(_until(partial(_object, request, status), watch or _unwatched)[0])
        return found

    def _hold(self) -> None:
        """Let its time limit run from now on, unless it runs already."""
        if self._operation is not None:
            self._operation.hold_to(self._limit)

    def _watch(self) -> None:
        """Look at the time limit, if it is not complete."""
        self._hold()
        if self._operation is not None and not self._operation.done:
            self._operation.watch()


class Prequest(Request):
    """A persistent collective: `Start` begins it, `Wait` or `Test` completes it, again and again.

    Arguments are checked, memory is sliced and MPI's requests are made once. The buffers
    belong to it until `Free`, which is local.
    """

    def __init__(
        self,
        begin: Callable[[], Operation],
        free: Callable[[], None],
        limit: float | None = None,
    ) -> None:
        """Make a request from what makes the operation of a run, and what frees the plan."""
        super().__init__(None, limit)
        # Both hold the plan, and with it the caller's buffers.
        self._begin: Callable[[], Operation] | None = begin
        self._release: Callable[[], None] | None = free

    def __bool__(self) -> bool:
        """Whether it was not freed, as in mpi4py."""
        return self._release is not None

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
            progress.launch(operation, self._limit)
        except (CollectiveTimeout, MPI.Exception):
            self._operation = None
            raise

    @classmethod
    def Startall(cls, requests: Sequence[Prequest | MPI.Prequest]) -> None:
        """Begin all of them."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Free the plan; local. One that is active raises, as MPI rules."""
        super().Free()
        if self._release is not None:
            self._release()
            self._release = self._begin = None


class GeneralRequest(Request, MPI.Request):
    """A request that mpi4py's own ``MPI.Request.Waitall`` takes: the progress thread runs it.

    It is a generalised request of the MPI, which the end of the operation completes.
    """

    def __del__(self) -> None:
        operation = self.__dict__.get("_operation")
        super().__del__()
        if operation is None or sys.is_finalizing() or MPI.Is_finalized():
            return
        # The MPI gives it back when it is complete, be that before or after this.
        with contextlib.suppress(MPI.Exception):
            if MPI.Request.__bool__(self):
                MPI.Request.Free(self)

    def _is_active(self) -> bool:
        return super()._is_active() and MPI.Request.__bool__(self)

    def _over(self) -> None:
        super()._over()
        self.__dict__["_heard"].append(True)  # what it raised is in the operation
        with contextlib.suppress(MPI.Exception):  # an interrupt of the query
            MPI.Request.Wait(self)


def _empty(status: MPI.Status | None) -> None:
    """Make a status that of no message."""
    if status is not None:
        status.Set_source(MPI.ANY_SOURCE)
        status.Set_tag(MPI.ANY_TAG)
        status.Set_error(MPI.SUCCESS)
        status.Set_elements(MPI.BYTE, 0)


def _status(statuses: list[MPI.Status] | None, number: int) -> MPI.Status | None:
    """Return the status of a request; mpi4py lengthens the list, too."""
    if statuses is None:
        return None
    while len(statuses) <= number:
        statuses.append(MPI.Status())
    return statuses[number]


def _tested(request: _Any, status: MPI.Status | None) -> tuple[bool, bool]:
    """Return whether a request is active, and whether it is complete then."""
    if isinstance(request, Request):
        active = request._is_active()
        return active, active and request.Test(status)
    # Persistent ones of mpi4py are not null where they are not active; this knows them.
    index, over = MPI.Request.Testany([request], status)
    return index == 0 or not over, over


def _watch_of(requests: Sequence[_Any]) -> Callable[[], None] | None:
    """Let the time limits of requests run from now on; return what looks at them, if any."""
    limited = [one for one in requests if isinstance(one, Request) and one._limit]
    for one in limited:
        one._hold()

    looked = 0.0

    def watch() -> None:
        nonlocal looked
        now = time.perf_counter()
        if now - looked > LOOK_SECONDS:
            looked = now
            for one in limited:
                one._watch()

    return watch if limited else None


def _waited(request: _Any, status: MPI.Status | None, watch: Callable[[], None] | None) -> None:
    """Wait for one request while all operations are driven and some are watched."""
    if watch is None and (isinstance(request, Request) or not progress.active()):
        request.Wait(status)
        return
    operation = request._operation if isinstance(request, Request) else None
    start = time.perf_counter()
    waits = operation is not None and not operation.done
    progress.await_(lambda: request.Test(status), watch or _unwatched)
    if operation is not None and waits:
        operation.note_wait(start)


def _object(request: MPI.Request, status: MPI.Status | None) -> tuple[Any, bool]:
    """Return the object that has come for a request, and whether it has."""
    done, found = request.test(status)
    return found, done


def _unwatched() -> None:
    """Watch nothing: that is done by each test."""


_Answer = TypeVar("_Answer")


def _until(
    ask: Callable[[], tuple[_Answer, bool]], watch: Callable[[], None] = _unwatched
) -> tuple[_Answer, bool]:
    """Ask until the answer is true, driving all operations meanwhile."""
    found = ask()
    if not found[1]:

        def asked() -> bool:
            nonlocal found
            found = ask()
            return found[1]

        progress.await_(asked, watch)
    return found


def _some(
    requests: Sequence[_Any], statuses: list[MPI.Status] | None
) -> tuple[list[int] | None, bool]:
    active = False
    done: list[int] = []
    for number, request in enumerate(requests):
        known, over = _tested(request, _status(statuses, len(done)))
        if known and over:
            done.append(number)
        active = active or known
    return (done, bool(done)) if active else (None, True)


def request_for(operation: Operation, limit: float | None) -> Request:
    """Return the request of an operation that was not launched yet."""
    if not operation.link.threaded:
        return _Driven(operation, limit)
    heard: list[bool] = []
    general = MPI.Grequest.Start(_query(operation, heard), None, _cancel)
    operation.on_end.append(general.Complete)
    request = GeneralRequest.__new__(GeneralRequest, general)
    Request.__init__(request, operation, limit)
    request.__dict__["_heard"] = heard
    return request


def _query(operation: Operation, heard: list[bool]) -> Callable[[MPI.Status], None]:
    """Return what tells the MPI of an error, unless the caller has ``heard`` of it from us.

    mpi4py prints what it raises.
    """

    def query(status: MPI.Status) -> None:
        _empty(status)
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
    begin: Callable[[], Operation], free: Callable[[], None], limit: float | None
) -> Prequest:
    """Return the request of a persistent plan."""
    return _DrivenPlan(begin, free, limit)


# The name is what mpi4py says when it is given one: "Cannot convert … to mpi4py.MPI.Request".
_Driven: type[Request] = type("Request, to be waited for by mpicoll.Request,", (Request,), {})
_DrivenPlan: type[Prequest] = type(
    "Prequest, to be started and waited for by mpicoll.Prequest,", (Prequest,), {}
)

"""Lists of requests: collectives of ours beside requests of mpi4py, in mpi4py's functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import progress
from mpicoll.runtime.watchdog import LOOK_SECONDS

if TYPE_CHECKING:
    from mpicoll.runtime.requests import Request

_Either: TypeAlias = "Request | MPI.Request"
_Statuses: TypeAlias = "list[MPI.Status] | None"
#: Of a list, the requests of ours and those of mpi4py, by index.
_Parted: TypeAlias = "tuple[dict[int, Request], dict[int, MPI.Request]]"


class Lists:
    """The class methods of `Request`; each takes any iterable, and goes through it once.

    Those of lower case also return the objects that have come, None for a collective.
    """

    @classmethod
    def Waitall(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> Literal[True]:
        """Wait until all are complete; raise the first error, after all are.

        The time limits of all count from now on, and one that is over ends the wait at once:
        those that were not waited for by then are as they were.
        """
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> list[Any]:
        """Wait for all, as `Waitall`, and return their objects."""
        members = listed(requests)
        watch = _watch_of(members)
        return _each(
            partial(_waited, request, _status(statuses, number), watch)
            for number, request in enumerate(members)
        )

    @classmethod
    def Testall(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> bool:
        """Return whether all are complete; if not, none of them is given up."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(
        cls, requests: Iterable[_Either], statuses: _Statuses = None
    ) -> tuple[bool, list[Any] | None]:
        """Return what `Testall` does, and their objects if all are complete."""
        return _all(_parted(requests), statuses, keep=False)

    @classmethod
    def Waitany(cls, requests: Iterable[_Either], status: MPI.Status | None = None) -> int:
        """Wait until one is complete and return its index, MPI.UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(
        cls, requests: Iterable[_Either], status: MPI.Status | None = None
    ) -> tuple[int, Any]:
        """Return what `Waitany` does, and its object."""
        ask = partial(_any, _parted(requests), status, keep=False)
        number, _, found = _until(ask, lambda answer: answer[1])
        return number, found

    @classmethod
    def Testany(
        cls, requests: Iterable[_Either], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of one that is complete and True; (MPI.UNDEFINED, True) if none
        is active."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(
        cls, requests: Iterable[_Either], status: MPI.Status | None = None
    ) -> tuple[int, bool, Any]:
        """Return what `Testany` does, and its object."""
        return _any(_parted(requests), status, keep=False)

    @classmethod
    def Waitsome(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> list[int] | None:
        """Wait until some are complete and return their indices, None if none is active.

        A collective that has failed raises if no other one is complete, else at a later call.
        """
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Iterable[_Either], statuses: _Statuses = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return what `Waitsome` does, and their objects."""
        ask = partial(_some, _parted(requests), statuses, keep=False)
        return _until(ask, lambda answer: answer[0] != [])

    @classmethod
    def Testsome(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> list[int] | None:
        """Return the indices of those that are complete, None if none is active; raise as
        `Waitsome`."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Iterable[_Either], statuses: _Statuses = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return what `Testsome` does, and their objects."""
        return _some(_parted(requests), statuses, keep=False)

    # These leave the requests as they are, and what went wrong for who completes them.

    @classmethod
    def Get_status_all(cls, requests: Iterable[_Either], statuses: _Statuses = None) -> bool:
        """Return what `Testall` does."""
        return _all(_parted(requests), statuses, keep=True)[0]

    @classmethod
    def Get_status_any(
        cls, requests: Iterable[_Either], status: MPI.Status | None = None
    ) -> tuple[int, bool]:
        """Return what `Testany` does; requests of mpi4py need MPI 4.1, as in mpi4py."""
        return _any(_parted(requests), status, keep=True)[:2]

    @classmethod
    def Get_status_some(
        cls, requests: Iterable[_Either], statuses: _Statuses = None
    ) -> list[int] | None:
        """Return what `Testsome` does; requests of mpi4py need MPI 4.1, as in mpi4py."""
        return _some(_parted(requests), statuses, keep=True)[0]

    get_status_all = Get_status_all
    get_status_any = Get_status_any
    get_status_some = Get_status_some


_Kind = TypeVar("_Kind")


def listed(
    requests: Iterable[_Kind],
    kinds: tuple[type, ...] = (Lists, MPI.Request),
    what: str = "a request",
) -> list[_Kind]:
    """Return the members of a list of requests; TypeError if one of them is something else."""
    members = list(requests)
    for number, member in enumerate(members):
        if not isinstance(member, kinds):
            raise TypeError(
                f"requests[{number}] is of type {type(member).__name__}, expected {what} of "
                "mpicoll or mpi4py"
            )
    return members


def empty(status: MPI.Status | None) -> None:
    """Make a status that of no message."""
    if status is not None:
        status.Set_source(MPI.ANY_SOURCE)
        status.Set_tag(MPI.ANY_TAG)
        status.Set_error(MPI.SUCCESS)
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


def _status(statuses: _Statuses, number: int) -> MPI.Status | None:
    """Return the status of a request; mpi4py lengthens the list, too."""
    if statuses is None:
        return None
    while len(statuses) <= number:
        statuses.append(MPI.Status())
    return statuses[number]


def _parted(requests: Iterable[_Either]) -> _Parted:
    members = listed(requests)
    ours = {n: one for n, one in enumerate(members) if isinstance(one, Lists)}
    theirs = {n: cast(MPI.Request, one) for n, one in enumerate(members) if n not in ours}
    return ours, theirs


# -- tests ------------------------------------------------------------------------------
#
# Requests of mpi4py are asked all at once, by its functions in lower case: both cases need the
# same but for the objects. Then those of ours; with ``keep`` none is given up.


def _all(parted: _Parted, statuses: _Statuses, keep: bool) -> tuple[bool, list[Any] | None]:
    """Return whether all are complete, and their objects then."""
    ours, theirs = parted
    progress.progress()
    done = [one._is_done() for one in ours.values()]  # and watched, each of them
    if not all(done):
        return False, None
    known = [_status(statuses, number) or MPI.Status() for number in theirs]
    found: list[Any] | None = None
    if keep:
        over = all(map(MPI.Request.Get_status, theirs.values(), known))
    else:
        over, found = MPI.Request.testall(list(theirs.values()), known)
    if not over:
        return False, None
    _each(
        partial(one.Get_status if keep else one.Test, _status(statuses, number))
        for number, one in ours.items()
    )
    objects = dict(zip(theirs, found or (), strict=False))
    return True, [objects.get(number) for number in range(len(ours) + len(theirs))]


def _any(parted: _Parted, status: MPI.Status | None, keep: bool) -> tuple[int, bool, Any]:
    """Return the index of one that is complete, whether it or else none is active, its object."""
    ours, theirs = parted
    progress.progress()
    active, found = False, None
    if theirs:
        requests = list(theirs.values())
        if keep:
            number, over = MPI.Request.Get_status_any(requests, status)
        else:
            number, over, found = MPI.Request.testany(requests, status)
        if number != MPI.UNDEFINED:
            return list(theirs)[number], True, found
        active = not over
    for number, one in ours.items():
        if one._is_active():
            active = True
            if one._is_done():
                (one.Get_status if keep else one.Test)(status)
                return number, True, None
    if not active:
        empty(status)
    return MPI.UNDEFINED, not active, None


def _some(
    parted: _Parted, statuses: _Statuses, keep: bool
) -> tuple[list[int] | None, list[Any] | None]:
    """Return the indices and objects of those that are complete, None if none is active."""
    ours, theirs = parted
    progress.progress()
    active = False
    indices: list[int] = []
    objects: list[Any] = []
    if theirs:
        requests = list(theirs.values())
        if keep:
            some = MPI.Request.Get_status_some(requests, statuses)
            objects = [None] * len(some or ())
        else:
            some, found = MPI.Request.testsome(requests, statuses)
            objects = list(found or ())
        active = some is not None
        indices = [list(theirs)[number] for number in some or ()]
    others = []
    for number, one in ours.items():
        if not one._is_active():
            continue
        active = True
        if one._is_right() or (keep and one._is_done()):
            (one.Get_status if keep else one.Test)(_status(statuses, len(indices)))
            indices.append(number)
            objects.append(None)
        else:
            others.append(one)
    if not indices:  # else what is wrong with one would cost the caller those that are complete
        for one in others:
            if one._is_done() and not (keep or one._is_right()):
                one.Test()
    return (indices, objects) if active else (None, None)


# -- waits ------------------------------------------------------------------------------


_Answer = TypeVar("_Answer")


def _each(calls: Iterable[Callable[[], _Answer]]) -> list[_Answer]:
    """Return what the calls do; raise the first error when all are made, a time-out at once."""
    answers, errors = [], []
    for call in calls:
        try:
            answers.append(call())
        except CollectiveTimeout:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def _watch_of(requests: list[_Either]) -> Callable[[], None] | None:
    """Let the time limits of requests run from now on; return what looks at them, if any."""
    ours = [one for one in requests if isinstance(one, Lists)]
    limited = [one for one in ours if one._is_limited()]
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


def _waited(request: _Either, status: MPI.Status | None, watch: Callable[[], None] | None) -> Any:
    """Wait for one request while all operations are driven and some are watched; return its
    object."""
    ours = request if isinstance(request, Lists) else None
    if watch is None and (ours is not None or not progress.active()):
        return request.wait(status)
    operation = ours._operation if ours is not None else None
    start = time.perf_counter()
    waits = operation is not None and not operation.done
    found = _until(partial(request.test, status), lambda answer: answer[0], watch or _unwatched)
    if operation is not None and waits:
        operation.note_wait(start)
    return found[1]


def _unwatched() -> None:
    """Watch nothing: that is done by each test."""


def _until(
    ask: Callable[[], _Answer],
    is_over: Callable[[_Answer], bool],
    watch: Callable[[], None] = _unwatched,
) -> _Answer:
    """Ask until the answer is one, driving all operations meanwhile."""
    answers: list[_Answer] = []

    def asked() -> bool:
        answers[:] = [ask()]
        return is_over(answers[0])

    progress.await_(asked, watch)
    return answers[0]

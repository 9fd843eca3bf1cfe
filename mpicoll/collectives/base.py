"""What all collectives of a communicator share: their three forms, and agreements.

A collective is written once, as a planner: a method that parses the arguments of one call
and returns a `Plan`, or, where ranks have to agree on something first, a generator that
yields what has to run for that and returns the plan. `forms` makes the blocking, the
non-blocking and the persistent method of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms import find
from mpicoll.collectives.claims import claims
from mpicoll.collectives.words import (
    HELD,
    ORDER,
    documentation,
    keywords,
    signature_of,
)
from mpicoll.runtime import agreement, progress
from mpicoll.runtime.executor import Execution
from mpicoll.runtime.faults import CallError, located
from mpicoll.runtime.link import Link, attach
from mpicoll.runtime.opened import Opened
from mpicoll.runtime.plan import Plan
from mpicoll.runtime.requests import (
    Prequest,
    Request,
    free_forgotten,
    persistent_for,
    request_for,
)
from mpicoll.runtime.stats import Stats
from mpicoll.runtime.tags import code_of
from mpicoll.schedule.ir import Call
from mpicoll.selection.settings import limit

Planning: TypeAlias = Plan | Generator[Execution, None, Plan]
_P = ParamSpec("_P")
_C = TypeVar("_C", bound="Base")


def forms(
    planner: Callable[Concatenate[_C, Opened, _P], Planning],
) -> tuple[
    Callable[Concatenate[_C, _P], None],
    Callable[Concatenate[_C, _P], Request],
    Callable[..., Prequest],
]:
    """Return the blocking, the non-blocking and the persistent method of a planner.

    A planner ``_allreduce`` gives ``Allreduce``, ``Iallreduce`` and ``Allreduce_init``.
    """
    collective = planner.__name__[1:]
    name = collective.capitalize()
    known = keywords(planner)
    signature = signature_of(planner, known)
    accepted = frozenset(signature.parameters)

    def plan(
        self: Base, opened: Opened, args: Any, options: dict[str, Any], fault: Exception | None
    ) -> Planning:
        if fault is not None:
            raise fault
        if options and options.keys() - accepted:
            unknown = ", ".join(sorted(options.keys() - accepted))
            raise TypeError(f"unexpected keyword argument {unknown}; known: {', '.join(known)}")
        return planner(self, opened, *args, **options)  # type: ignore[arg-type]

    def blocking(self: Base, *args: Any, **options: Any) -> None:
        link = self._link
        time_limit, fault = _limit(link, options)
        opened = link.open(collective)
        if link.plain and time_limit is None and not progress.ACTIVE:
            # The usual case, without what the others need. It does what `_course` does.
            try:
                planned = plan(self, opened, args, options, fault)
                if type(planned) is Plan and planned.lane is None:
                    link.run(planned, opened.record)
                    link.closed(opened.record, None)
                    return
                again = partial(plan, self, opened, args, options, fault)
                course = self._course(_first(planned, again), name, opened, {})
                operation = progress.Operation(link, opened.record, course, time_limit)
            except BaseException as error:
                make = partial(plan, self, opened, args, options, fault)
                if not link.has_begun(opened.record) and _is_foreign(error, make, opened):
                    course = self._course(make, name, opened, {}, error)
                    progress.keep(progress.Operation(link, opened.record, course, told=True))
                    raise
                raised = located(error, name, self._rank_for_errors())
                opened.release()
                link.closed(opened.record, raised)
                raise raised.with_traceback(error.__traceback__) from None
        else:
            given = claims(name, planner, args, options, time_limit) if link.settings.check else {}
            course = self._course(
                lambda: plan(self, opened, args, options, fault), name, opened, given
            )
            operation = progress.Operation(link, opened.record, course, time_limit)
        operation.wait()

    def nonblocking(self: Base, *args: Any, **options: Any) -> Request:
        link = self._link
        time_limit, fault = _limit(link, options)
        opened = link.open(collective, "non-blocking")
        # It belongs together with a blocking one on another rank.
        given = claims(name, planner, args, options, time_limit) if link.settings.check else {}
        course = self._course(
            lambda: plan(self, opened, args, options, fault), f"I{collective}", opened, given
        )
        operation = progress.Operation(link, opened.record, course, time_limit)
        try:
            request = request_for(operation)
            progress.launch(operation)
        except BaseException:
            operation.left = True  # nobody has its request
            progress.keep(operation)
            raise
        if operation.error is not None and not operation.begun:
            request.Free()
            raise operation.error  # refused: nothing was started
        return request

    def persistent(self: Base, *args: Any, **options: Any) -> Prequest:
        args = args[:-1] if args and isinstance(args[-1], MPI.Info) else args
        options.pop("info", None)
        link = self._link
        time_limit, fault = _limit(link, options)
        opened = link.open(collective, "persistent")
        called = f"{name}_init"
        given = claims(called, planner, args, options, time_limit) if link.settings.check else {}
        return self._prepare(
            lambda: plan(self, opened, args, options, fault),
            called,
            opened,
            given,
            time_limit,
        )

    for method, called, summary in (
        (blocking, name, ""),
        (nonblocking, f"I{collective}", f"Start `{name}` and return its request."),
        (persistent, f"{name}_init", f"Prepare `{name}` and return its persistent request."),
    ):
        method.__name__ = called
        method.__qualname__ = f"Comm.{called}"
        method.__module__ = planner.__module__
        text = planner.__doc__ or ""
        if summary:
            text = f"{summary}\n\n{HELD[method is persistent]}"
        if "op" in signature.parameters:
            text = f"{inspect.cleandoc(text)}\n\n{ORDER}"
        method.__doc__ = documentation(text, known)
        cast(Any, method).__signature__ = signature
    made: Any = (blocking, nonblocking, persistent)
    return made  # type: ignore[no-any-return]


def _limit(link: Link, options: dict[str, Any]) -> tuple[float | None, Exception | None]:
    """Take the time limit of a call out of its keywords; return what is wrong with it, too."""
    usual = link.settings.timeout
    if not options:
        return usual, None
    given = options.pop("timeout", None)
    if given is None:
        return usual, None
    try:
        seconds = limit(given)
    except Exception as error:  # by whatever the argument is; it is raised once the call is open
        return usual, error
    if seconds is not None:
        link.watch()  # on all ranks, be their calls complete at once or not
    return seconds, None


def check_root(link: Link, root: int) -> int:
    """Return a root as a plain int; refuse one that is no rank.

    Other integers, such as NumPy's, are equal to it but have other words, on which tags
    rest, and arithmetic of their own.
    """
    rank = index(root)
    if not 0 <= rank < link.size:
        raise CallError(MPI.ERR_ROOT, f"root {root!r}, expected a rank from 0 to {link.size - 1}")
    return rank


class Base:
    """State and helpers of a wrapped communicator; mixed into `mpicoll.Comm`."""

    @property
    def _link(self) -> Link:
        link: Link | None = self.__dict__.get("_mpicoll_link")
        if link is None:
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

    def _course(
        self,
        make: Callable[[], Planning],
        name: str,
        opened: Opened,
        given: dict[str, str],
        fault: BaseException | None = None,
    ) -> progress.Course:
        """Yield all that a call has to run, from its planning to its end.

        With ``fault`` it does nothing but tell the others, who wait for it.
        """
        link, record = opened.link, opened.record
        plan: Plan | None = None
        try:
            if fault is None:
                try:
                    plan = yield from _planned(link, make, opened, given)
                    yield from link.course(plan, record)
                    return
                except BaseException as error:
                    begun = bool(record.algorithm)
                    if begun or (plan is None and not _is_foreign(error, make, opened)):
                        raise
                    fault = error
            if plan is None:
                plan = yield from _planned(link, make, opened, given)
            yield from link.course(plan, record, fault)
        except Exception as error:
            raised = located(error, name, self._rank_for_errors())
            raise raised.with_traceback(error.__traceback__) from None
        finally:
            opened.release()

    def _prepare(
        self,
        make: Callable[[], Planning],
        name: str,
        opened: Opened,
        given: dict[str, str],
        time_limit: float | None,
    ) -> Prequest:
        """Plan a persistent collective and set it up."""
        link, first = self._link, opened.record
        opened.plan = link.tags.wanted
        plans: list[Plan] = []
        unwanted = False

        def take() -> None:
            # Before anything else can fail: all ranks take one. In checked calls they do once
            # they know that all make a plan.
            if not link.settings.check:
                opened.take_plan(opened.plan)

        def planning() -> progress.Course:
            fault: BaseException | None = None
            try:
                try:
                    free_forgotten()
                    take()
                except CallError as error:
                    raise located(error, name, self._rank_for_errors()) from None
                except BaseException as error:  # the others know of none, and wait
                    fault = error
                    take()
                try:
                    plan = yield from _planned(link, make, opened, given)
                except BaseException as error:
                    if not _is_foreign(error, make, opened):
                        raised = located(error, name, self._rank_for_errors())
                        raise raised.with_traceback(error.__traceback__) from None
                    fault = fault or error
                    plan = yield from _planned(link, make, opened, given)  # the others wait
                if fault is not None:
                    raise fault
                plans.append(plan)
            finally:
                if unwanted:
                    opened.release()

        operation = progress.Operation(link, first, planning(), time_limit)
        try:
            operation.wait()
            plan = plans[0]
            assert opened.plan_tag is not None
            plan.tag = opened.plan_tag
            execution = link.prepare(plan, replace(first))
        except BaseException:
            # One that is interrupted goes on planning with the others, before the next call.
            unwanted = operation.left = True
            if operation.done:
                opened.release()
            raise

        def begin() -> progress.Operation:
            record = link.reopen(first)
            try:
                if plan.lane is not None:
                    plan.lane.again()
                course = progress.primed(link.again(plan, execution, record, name))
                return progress.Operation(link, record, course, time_limit)
            except BaseException as error:
                link.over(record, error)  # else dumps would show a run that never began
                raise

        def free() -> None:
            execution.free()
            opened.release()

        return persistent_for(begin, free, replace(first, collective=name))

    def _agree(self, own: int, opened: Opened) -> Generator[Execution, None, tuple[int, ...]]:
        """Return the numbers that all ranks pass, in rank order."""
        link = self._link
        numbers = np.empty(link.size, np.int64)
        schedule = find("allgather", "bruck").build(Call(link.rank, link.size, (1,) * link.size))
        source = np.array([own], np.int64)
        tag = opened.tag(code_of(opened.record.collective, "agree"))
        memory = (source.view(np.uint8), numbers.view(np.uint8))
        yield from link.exchange(schedule, tag, *memory, opened.record, "bruck")
        return tuple(numbers.tolist())


def _planned(
    link: Link, make: Callable[[], Planning], opened: Opened, given: dict[str, str]
) -> Generator[Execution, None, Plan]:
    """Yield what has to run before there is a plan, and return the plan."""
    if link.settings.check:
        return (yield from agreement.checked(link, opened, given, make))
    planned = make()
    return planned if isinstance(planned, Plan) else (yield from planned)


def _first(planned: Planning, again: Callable[[], Planning]) -> Callable[[], Planning]:
    """Return what hands over what was planned, and asks the planner when called once more."""
    left = [planned]
    return lambda: left.pop() if left else again()


def _is_foreign(error: BaseException, make: Callable[[], Planning], opened: Opened) -> bool:
    """Whether what a call raised before it has sent anything is no error of its arguments.

    A planner that is asked again says so. What it raises once alone came by a handler of signals,
    or for want of memory: the other ranks know of no error, and wait for this one.
    """
    nothing_sent = not opened.record.rounds and not isinstance(error, GeneratorExit)
    return nothing_sent and not _refuses(make)


def _refuses(make: Callable[[], Planning]) -> bool:
    """Whether a planner raises an error, up to what it has to run before there is a plan."""
    try:
        planned = make()
        if not isinstance(planned, Plan):
            next(planned, None)
    except BaseException:
        return True
    return False

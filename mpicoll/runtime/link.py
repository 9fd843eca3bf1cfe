"""What stands behind a wrapped communicator: our own duplicate, and its state.

Law 2: user traffic never meets ours. The duplicate is made when a communicator is
wrapped, kept as an MPI attribute of it, freed with it and before Finalize, and not
copied by Dup.
"""

from __future__ import annotations

import os
import time
import zlib
from array import array
from collections.abc import Callable
from itertools import count
from typing import TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms import Algorithm
from mpicoll.errors import MismatchError, PoisonedError, SettingError
from mpicoll.runtime import ending, progress, staging, watchdog
from mpicoll.runtime.device_run import DeviceExecution, Direct, Staged, rounds
from mpicoll.runtime.executor import Bytes, Execution, Native, compiled
from mpicoll.runtime.faults import CallError, located, words
from mpicoll.runtime.flight import FINALIZE, RECORDER, listen
from mpicoll.runtime.opened import Opened
from mpicoll.runtime.persistent import PersistentExecution
from mpicoll.runtime.place import place
from mpicoll.runtime.plan import EMPTY, Plan, Recipe
from mpicoll.runtime.record import Record
from mpicoll.runtime.requests import free_forgotten
from mpicoll.runtime.scratch import Scratch
from mpicoll.runtime.stats import Stats
from mpicoll.runtime.tags import Tags
from mpicoll.runtime.trace import Tracer, open_trace
from mpicoll.schedule.ir import Schedule
from mpicoll.selection.choose import Choice, Wanted, choose
from mpicoll.selection.settings import Settings, parse, read

#: Choices of an algorithm that a communicator remembers.
CHOICES = 4096
#: What a rank is in where it waits for what is due between two calls; it has the sequence number
#: of the call that follows.
BETWEEN = "turn of the tags"
#: What a rank is in where it waits for the others to free a communicator, too.
FREE = "Free"
#: What has the sequence number of another call.
UNNUMBERED = (BETWEEN, FREE, FINALIZE)

_E = TypeVar("_E", bound=Execution)


class Link:
    """The hidden duplicate of a communicator, its settings, sequence and counters.

    ``watched`` is set once a time limit was in force: from then on every call looks
    whether another rank has run into its limit. ``poison`` is why the communicator can not
    be used any more, "" while it can; ``asked`` whether this rank has asked the others why.
    ``threaded`` says whether the progress thread drives its operations, ``plain`` whether a
    blocking call may simply wait inside MPI. ``pids`` are the processes of the ranks, each on
    its host, ``ranks`` those in the world. ``met`` says that all have come to the end, or to
    `free`, and none has ended by an exception.
    """

    def __init__(self, comm: MPI.Intracomm, settings: Settings | None) -> None:
        """Duplicate ``comm``; collective. ``settings`` None: agree on those of rank 0."""
        # Split and not Dup: it runs none of the user's attribute callbacks.
        self.hidden = cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.Get_rank()))
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.stats = Stats()
        self.watched = False
        self.poison = ""
        self.asked = False
        self.next_look = 0.0
        self.states: dict[int, watchdog.State] = {}
        self.expired: list[int] = []
        self.leaving: set[int] = set()
        self.met = False
        self.tags = Tags(self.hidden, self._wait_request)
        self.scratch = Scratch()
        if settings is None:
            where = place(self.hidden)
            found = read(os.environ, where) if self.rank == 0 else None
            try:
                settings = parse(*self.hidden.bcast(found, root=0))
            except BaseException:
                self.hidden.Free()
                raise
        self.ranks = ranks = _world_ranks(comm)
        own = [MPI.Query_thread(), os.getpid(), _draw(ranks) if self.rank == 0 else 0]
        every = np.empty((self.size, len(own)), np.int64)
        self.hidden.Allgather(np.array(own, np.int64), every)
        self._thread_level = int(every[:, 0].min())
        self.pids = array("q", every[:, 1].tolist())
        self.identity = f"{zlib.crc32(repr(ranks).encode()):08x}.{every[0, 2]}"
        self.tracer: Tracer | None = None
        try:
            if settings.trace:
                self.tracer = open_trace(self.hidden, settings.trace)
            self.apply(settings)
        except BaseException:
            self.hidden.Free()
            raise
        RECORDER.join(self.identity, comm.Get_name() or self.identity, self.rank, ranks)
        if not ending.LINKS:
            listen(settings.flight)
        if self.tracer is not None:
            self.tracer.join(self.identity, comm.Get_name() or self.identity, self.rank, ranks)
        ending.LINKS.append(self)

    def apply(self, settings: Settings) -> None:
        """Put settings in force, which are equal on all ranks; refuse them on all, or none."""
        threaded = settings.progress == "thread"
        if threaded and self._thread_level < MPI.THREAD_MULTIPLE:
            raise SettingError(
                "progress='thread' needs MPI_THREAD_MULTIPLE on all ranks, and one has level "
                f"{self._thread_level} (MPI_THREAD_MULTIPLE is {MPI.THREAD_MULTIPLE}); set "
                "mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported, or leave "
                "progress= out"
            )
        self.settings = settings
        self._choices: dict[Wanted, Choice] = {}
        self.threaded = threaded
        if threaded:
            progress.start_thread()
        if settings.timeout is not None:
            self.watch()
        self._set_plain()

    def watch(self) -> None:
        """Look for what other ranks say about time limits, from now on."""
        if not self.watched:
            self.watched = True
            watchdog.WATCHED.append(self)
            self._set_plain()

    def _set_plain(self) -> None:
        self.plain = not (self.threaded or self.watched or self.settings.check)

    @property
    def failed(self) -> set[int]:
        """The ranks that are known to have ended by an exception."""
        if not watchdog.FAILED:
            return set()
        return {rank for rank, world in enumerate(self.ranks) if world in watchdog.FAILED}

    @property
    def freed(self) -> bool:
        """Whether the communicator was freed."""
        return self.hidden == MPI.COMM_NULL

    # -- one call ---------------------------------------------------------------------

    def open(self, collective: str, form: str = "blocking") -> Opened:
        """Consume a sequence number; the first thing in every collective.

        It comes before anything is validated, so that an error on one rank does not
        mispair the next call. Raises CallError on a freed communicator, PoisonedError on
        one where a call has timed out.
        """
        if not self.hidden:
            raise CallError(MPI.ERR_COMM, "this communicator was freed")
        if self.watched:
            self.learn()
        if progress.ACTIVE:
            progress.progress()
        sequence = self.tags.next_sequence(self.complete, form == "persistent")
        record = Record(self.identity, sequence, collective, form)
        record.start = time.perf_counter()
        record.site = RECORDER.site()
        RECORDER.keep(record)
        return Opened(self, sequence, record, form != "blocking")

    def reopen(self, first: Record) -> Record:
        """Return the record of one more run of a persistent plan.

        Ranks may start their plans in any order, so it has the sequence number of the
        plan.
        """
        if self.freed:
            raise CallError(MPI.ERR_COMM, "this communicator was freed")
        if self.watched:
            self.learn()
        if progress.ACTIVE:
            progress.progress()
        record = Record(first.communicator, first.sequence, first.collective, first.form)
        record.start = time.perf_counter()
        record.site = RECORDER.site()
        RECORDER.keep(record)
        return record

    def learn(self) -> None:
        """Raise PoisonedError if a call on this communicator has timed out, here or elsewhere."""
        if not self.watched:
            return
        if not self.poison:
            watchdog.learn(self)
            if self.poison:
                RECORDER.dump(self.settings.flight, self.poison)
        if self.poison:
            raise PoisonedError(self.poison)

    def closed(self, record: Record, error: BaseException | None) -> None:
        """Note that a blocking call is over, unless it goes on after an interrupt."""
        if error is None and self.tracer is None:  # the usual case
            record.end = time.perf_counter()
            self.tags.finish(record.sequence)
        elif error is None or not self._in_flight(record):
            self.over(record, error)

    def over(self, record: Record, error: BaseException | None) -> None:
        """Note that a call is over; harmless the second time."""
        if record.end:
            return
        record.end = time.perf_counter()
        if error is None:
            if record.collective not in UNNUMBERED:
                self.tags.finish(record.sequence)
        else:
            record.error = words(error)
            if record.step and _is_fault(error):
                RECORDER.dump(self.settings.flight, record.error)
        if self.tracer is not None:
            self.tracer.add(record)

    def complete(self, sequences: range | None = None, persistent: bool = True) -> None:
        """Complete the calls that are in flight here, all or those of an interval.

        Persistent ones have tags of their own and belong to no interval: other ranks may
        start them later.
        """
        for operation in progress.active(self):
            record = operation.record
            if record.form == "persistent":
                wanted = sequences is None and persistent
            else:
                wanted = sequences is None or record.sequence in sequences
            if wanted:
                self._complete_one(operation)

    def _complete_one(self, operation: progress.Operation) -> None:
        operation.hold()
        progress.await_(operation.advance, operation.watch)
        progress.discard(operation)

    def choose(
        self, wanted: Wanted, algorithm: str | None = None, segment_bytes: int | None = None
    ) -> Choice:
        """Return what runs for a call; equal on all ranks."""
        if algorithm is not None or segment_bytes is not None:
            return choose(wanted, self.settings, algorithm, segment_bytes)
        chosen = self._choices.get(wanted)
        if chosen is None:
            if len(self._choices) >= CHOICES:
                self._choices.clear()
            chosen = self._choices[wanted] = choose(wanted, self.settings)
        return chosen

    # -- the runs of a call -------------------------------------------------------------

    def run(self, plan: Plan, record: Record) -> None:
        """Run a plan on host memory to its end, waiting inside MPI; a simple case of `course`."""
        execution: Execution | None = None
        try:
            execution, work = self._bound(plan, record)
            plan.describe(record)
            execution.run()
            self.scratch.give(work)
        except MPI.Exception:
            raise  # nothing can be posted any more
        except BaseException as error:
            # The others wait for the rest of the schedule, which whoever calls next goes on with.
            course = self._rest(plan, execution or self._failing(plan, record, error))
            progress.keep(
                progress.Operation(self, record, course, self.settings.timeout, told=True)
            )
            raise
        self._over(plan, execution)

    def has_begun(self, record: Record) -> bool:
        """Whether anything of a call has run, or is left to whoever drives."""
        return bool(record.algorithm) or self._in_flight(record)

    def _in_flight(self, record: Record) -> bool:
        return any(one.record is record for one in progress.active(self))

    def _rest(self, plan: Plan, execution: Execution) -> progress.Course:
        """Yield what goes on when the call has been left."""
        yield execution
        self._over(plan, execution)

    def _bound(self, plan: Plan, record: Record) -> tuple[Execution, Bytes]:
        """Return a run of a plan on host memory, before its first step, and its scratch."""
        fault, work = None, EMPTY
        try:
            work = self.scratch.take(plan.recipe.program.work_bytes)
            plan.load()
        except BaseException as error:
            fault = error
        return Execution(plan, self.hidden, work, record, self.tracer is not None, fault), work

    def _failing(self, plan: Plan, record: Record, fault: BaseException) -> Execution:
        """Return a run of a plan that does nothing but tell the others, who wait for it."""
        kind = Execution if plan.lane is None else Staged
        return kind(plan, self.hidden, EMPTY, record, self._traces, fault)

    def course(
        self, plan: Plan, record: Record, fault: BaseException | None = None
    ) -> progress.Course:
        """Yield what runs a plan, and do what is to be done before and after it.

        With ``fault`` the run does nothing but tell the others.
        """
        if plan.lane is not None:
            try:
                if fault is not None:
                    raise fault
                bound: Execution = self._prepared(plan, record, Execution)
                plan.describe(record)
                steps = rounds(plan.lane, bound, plan.loads, plan.finish)
            except BaseException as error:
                bound = self._failing(plan, record, error)
                plan.describe(record)
                steps = rounds(plan.lane, bound, plan.loads, plan.finish)
            yield from steps
            self.stats.add(plan.recipe)
            return
        work = EMPTY
        try:
            if fault is not None:
                raise fault
            execution, work = self._bound(plan, record)
            plan.describe(record)
        except BaseException as error:
            execution = self._failing(plan, record, error)
            plan.describe(record)
        yield execution
        self.scratch.give(work)
        self._over(plan, execution)

    def prepare(self, plan: Plan, record: Record) -> PersistentExecution | DeviceExecution:
        """Bind a plan to memory of its own, for many runs.

        Where there is none, each run fails, and does not leave the others waiting.
        """
        try:
            return self._prepared(plan, record, PersistentExecution)
        except MemoryError as error:
            kind = PersistentExecution if plan.lane is None else Staged
            return kind(plan, self.hidden, EMPTY, record, self._traces, error)

    def again(
        self,
        plan: Plan,
        execution: PersistentExecution | DeviceExecution,
        record: Record,
        name: str,
    ) -> progress.Course:
        """Yield what runs a prepared plan once more; its lane has noted the caller's work.

        ``name`` is that of the method, for errors.
        To be `primed`: what interrupts it from then on is a failure of the run.
        """
        try:
            yield execution
            if execution.fault is not None:
                execution.fault.with_traceback(None)  # lest each run adds to it
            execution.begin(record)
            plan.describe(record)
            if plan.lane is None and execution.failed is None:
                plan.load()
        except GeneratorExit:
            raise
        except BaseException as error:
            execution.begin(record)
            execution.failed = execution.failed or error
        try:
            if plan.lane is not None:
                yield from rounds(plan.lane, execution, plan.loads, plan.finish)
                self.stats.add(plan.recipe)
            else:
                yield execution
                self._over(plan, execution)
        except Exception as error:
            raised = located(error, name, str(self.rank))
            raise raised.with_traceback(error.__traceback__) from None

    def _prepared(self, plan: Plan, record: Record, on_host: type[_E]) -> _E | DeviceExecution:
        """Bind a plan to memory of its own, on the host as ``on_host`` says."""
        lane, nbytes = plan.lane, plan.recipe.program.work_bytes
        if lane is None or lane.hosted:
            work = np.empty(nbytes, np.uint8)
            return on_host(plan, self.hidden, work, record, self._traces)
        direct = staging.takes_pointers(lane.backend, self.settings)
        work = cast(Bytes, lane.scratch(nbytes))
        on_device = Direct if direct else Staged
        return on_device(plan, self.hidden, work, record, self._traces)

    def _over(self, plan: Plan, execution: Execution) -> None:
        if execution.failed is not None:
            raise execution.failed
        plan.finish()
        self.stats.add(plan.recipe)

    def exchange(
        self, schedule: Schedule, tag: int, source: Bytes, target: Bytes, record: Record, name: str
    ) -> progress.Course:
        """Yield what runs a schedule of int64 items that prepares a collective, and count it."""
        program = compiled(schedule, np.dtype(np.int64).itemsize)
        recipe = Recipe(Algorithm("agreement", name, lambda _: schedule), program)
        execution, work = self._bound(Plan(recipe, tag, source, target), record)
        try:
            yield execution
        finally:
            record.rounds += 1
        self.scratch.give(work)
        execution.raise_failure()
        self.stats.add(recipe)

    @property
    def _traces(self) -> bool:
        return self.tracer is not None

    def wait_native(
        self, name: str, begin: Callable[[], MPI.Request], limit: float | None
    ) -> None:
        """Begin a non-blocking call of the MPI's own, and wait for it under a time limit."""
        record = self.open(name).record
        record.algorithm = "native"
        try:
            request = begin()
        except BaseException as error:
            self.over(record, error)
            raise
        progress.Operation(self, record, _native(request), limit).wait()

    def _wait_request(self, request: MPI.Request) -> None:
        """Wait for what is due between two calls, under the time limit."""
        record = Record(self.identity, self.tags.sequence, BETWEEN)
        record.start = time.perf_counter()
        progress.Operation(self, record, _native(request), self.settings.timeout).wait()

    def meet(self, name: str, limit: float | None = None) -> progress.Operation:
        """Begin to wait until all ranks do, for `wait_for_all`; ``name`` is for dumps and errors.

        At the end of the program without a limit: others may still save what they have.
        """
        self.watch()
        self.tags.catch_up(self.complete)  # else the barriers of a turn and this one would meet
        record = Record(self.identity, self.tags.sequence, name)
        record.start = time.perf_counter()
        record.site = RECORDER.site()
        RECORDER.keep(record)
        return progress.Operation(self, record, _native(self.hidden.Ibarrier()), limit)

    def wait_for_all(self, meeting: progress.Operation) -> None:
        """Wait until all ranks have come, or one fails, or a time limit is over."""
        looked = 0.0

        def watch() -> None:
            nonlocal looked
            meeting.watch()
            now = time.perf_counter()
            if now - looked > watchdog.LOOK_SECONDS:
                looked = now
                watchdog.hear(ending.LINKS)

        meeting.hold()
        progress.await_(lambda: meeting.advance() or bool(self.failed), watch)
        self.met = meeting.done and meeting.error is None

    def free(self) -> None:
        """Free the duplicate; collective, harmless the second time.

        What is in flight on it is completed first. After a time-out nothing is freed, nor where
        a rank has failed, which does not come.
        """
        if self.poison or self not in ending.LINKS:
            return  # a poisoned link stays among the links: the end of the process asks for it
        self.wait_for_all(self.meet(FREE, self.settings.timeout))
        if self.met:
            self.complete()
            free_forgotten()
            self.tags.settle()
            self.tags.sweep()
        ending.LINKS.remove(self)
        if self.watched:
            watchdog.WATCHED.remove(self)
        RECORDER.leave(self.identity)
        if self.met:
            self.hidden.Free()


def _is_fault(error: BaseException) -> bool:
    """Whether an error is worth a dump: no interrupt, and not of all ranks before they began."""
    return isinstance(error, Exception) and not isinstance(error, MismatchError)


def _native(request: MPI.Request) -> progress.Course:
    execution = Native(request)
    yield execution
    execution.raise_failure()


# -- making a link ------------------------------------------------------------------------


def _world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in MPI.COMM_WORLD of the ranks of ``comm``."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(group.size)), world))
    finally:
        group.Free()
        world.Free()


_MADE: dict[tuple[int, ...], count[int]] = {}


def _draw(ranks: tuple[int, ...]) -> int:
    """Return a number that no other communicator of the same ranks has.

    For the first of them to draw: threads may make communicators in another order elsewhere.
    """
    return next(_MADE.setdefault(ranks, count(1)))


def attach(comm: MPI.Intracomm, settings: Settings | None = None) -> Link:
    """Return the link of ``comm``, made now if it has none; collective then."""
    found = comm.Get_attr(ending.key())
    if isinstance(found, Link):
        return found
    link = Link(comm, settings)
    comm.Set_attr(ending.key(), link)
    return link

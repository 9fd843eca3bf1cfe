"""What stands behind a wrapped communicator: our own duplicate, and its state.

Law 2: user traffic never meets ours. The duplicate is made when a communicator is
wrapped, kept as an MPI attribute of it, freed with it and before Finalize, and not
copied by Dup.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpicoll.algorithms import Algorithm
from mpicoll.errors import (
    CollectiveTimeout,
    PeerError,
    PoisonedError,
    SettingError,
    ShortMessageError,
)
from mpicoll.runtime import progress, staging, watchdog
from mpicoll.runtime.buffers import Buffer
from mpicoll.runtime.device_run import DeviceExecution, DeviceReduction, Direct, Staged, rounds
from mpicoll.runtime.executor import (
    Bytes,
    Execution,
    Native,
    PersistentExecution,
    Program,
    compiled,
)
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.flight import RECORDER, listen
from mpicoll.runtime.operators import Reducer
from mpicoll.runtime.place import place
from mpicoll.runtime.plan import EMPTY, Plan
from mpicoll.runtime.record import Record
from mpicoll.runtime.stats import Stats
from mpicoll.runtime.tags import Tags
from mpicoll.runtime.trace import Tracer, open_trace
from mpicoll.schedule.ir import Call, Schedule
from mpicoll.selection.choose import Choice, Wanted, choose
from mpicoll.selection.settings import Settings, parse, read

#: Scratch up to this size in all is kept between calls, since fresh pages cost more than the
#: copy into them.
KEPT_WORK_BYTES = 64 << 20
KEPT_WORKS = 8

#: Choices of an algorithm that a communicator remembers.
CHOICES = 4096


class Opened:
    """A call that has its sequence number.

    ``keeps`` is set when the call goes on after it has returned: it then has copies of
    derived datatypes, in ``held``, since the caller may free them. ``lane`` is there when
    one of its buffers is on a device.
    """

    __slots__ = ("held", "keeps", "lane", "link", "record", "sequence")

    def __init__(self, link: Link, sequence: int, record: Record, keeps: bool) -> None:
        """Begin with nothing held."""
        self.link = link
        self.sequence = sequence
        self.record = record
        self.keeps = keeps
        self.held: list[MPI.Datatype] = []
        self.lane: staging.Lane | None = None

    def tag(self, *what: object) -> int:
        """Return the tag for messages of this call that belong to ``what``."""
        return self.link.tags.tag(self.sequence, *what)

    def hold(self, *buffers: Buffer | None) -> None:
        """Keep what the datatypes of the buffers need until the call is over."""
        if self.keeps:
            for buffer in buffers:
                if buffer is not None:
                    self.held += buffer.own_datatypes()
        if staging.MET:
            self.lane = staging.lane_of(buffers, self.link.settings, self.link.size)

    def folds(self, reduction: Reducer, compress: object) -> Reducer:
        """Return the reduction that works where the data is; call it after `hold`.

        What the device has no kernel for goes through the host, the whole call.
        """
        lane = self.lane
        if lane is None or lane.hosted:
            return reduction
        kernel = None
        if compress is None and self.link.size <= staging.MOST_OPERANDS:
            kernel = lane.backend.kernel(reduction)
        if kernel is None:
            lane.hosted = True
            return reduction
        return DeviceReduction(lane, kernel)

    def release(self) -> None:
        """Give up what was held."""
        while self.held:
            self.held.pop().Free()
        if self.lane is not None:
            self.lane.close()


_E = TypeVar("_E", bound=Execution)


class Link:
    """The hidden duplicate of a communicator, its settings, sequence and counters.

    ``watched`` is set once a time limit was in force: from then on every call looks
    whether another rank has run into its limit. ``poison`` is why the communicator can not
    be used any more, "" while it can. ``threaded`` says whether the progress thread drives
    its operations, ``plain`` whether a blocking call may simply wait inside MPI.
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
        self.next_look = 0.0
        self.states: dict[int, watchdog.State] = {}
        self.expired: list[int] = []
        self.leaving: set[int] = set()
        self.tags = Tags(self.hidden, self._wait_request)
        self._spare: list[Bytes] = []
        if settings is None:
            where = place(self.hidden)
            found = read(os.environ, where) if self.rank == 0 else None
            try:
                settings = parse(*self.hidden.bcast(found, root=0))
            except BaseException:
                self.hidden.Free()
                raise
        ranks = _world_ranks(comm)
        self.identity = _identity(ranks)
        try:
            self.apply(settings)
        except BaseException:
            self.hidden.Free()
            raise
        RECORDER.join(self.identity, comm.Get_name() or self.identity, self.rank, ranks)
        if not _LINKS:
            listen(settings.flight)
        if self.tracer is not None:
            self.tracer.join(self.identity, comm.Get_name() or self.identity, self.rank, ranks)
        _LINKS.append(self)

    def apply(self, settings: Settings) -> None:
        """Put settings in force, which are equal on all ranks; collective."""
        self.settings = settings
        self._choices: dict[Wanted, Choice] = {}
        self.tracer: Tracer | None = _traced(self.hidden, settings.trace)
        self.threaded = settings.progress == "thread"
        if self.threaded:
            _need_threads(self.hidden)
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
        if self.freed:
            raise CallError(MPI.ERR_COMM, "this communicator was freed")
        if self.watched:
            self.learn()
        if progress.ACTIVE:
            progress.progress()
        sequence = self.tags.next_sequence(self._complete)
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
        progress.progress()
        record = Record(first.communicator, first.sequence, first.collective, first.form)
        record.start = time.perf_counter()
        record.site = RECORDER.site()
        RECORDER.keep(record)
        return record

    def learn(self) -> None:
        """Raise PoisonedError if a call on this communicator has timed out, here or elsewhere."""
        if not self.poison:
            watchdog.learn(self)
            if self.poison:
                RECORDER.dump(self.settings.flight, self.poison)
        if self.poison:
            raise PoisonedError(self.poison)

    def closed(self, record: Record, error: BaseException | None) -> None:
        """Note that a call is over."""
        record.end = time.perf_counter()
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"
            self.tags.abandon(record.sequence)
            if record.step and isinstance(error, (MPI.Exception, PeerError, ShortMessageError)):
                RECORDER.dump(self.settings.flight, record.error)
        if self.tracer is not None:
            self.tracer.add(record)

    def _complete(self, sequences: range | None = None) -> None:
        """Complete the calls that are in flight here, all or those of an interval.

        Persistent ones have tags of their own and belong to no interval: other ranks may
        start them later.
        """
        for operation in progress.active(self):
            record = operation.record
            if sequences is None or (record.form != "persistent" and record.sequence in sequences):
                operation.hold_to(self.settings.timeout)
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
        work = self._take_work(plan.program.work_bytes)
        execution = self._bind(plan, record, work)
        plan.load()
        try:
            execution.run()
        except KeyboardInterrupt:
            # The others wait for the rest of the schedule, which whoever calls next goes on with.
            progress.launch(progress.Operation(self, record, self._rest(plan, execution)))
            raise
        self._give_work(work)
        self._over(plan, execution)

    def _rest(self, plan: Plan, execution: Execution) -> progress.Course:
        """Yield what goes on when the call has been left."""
        yield execution
        self._over(plan, execution)

    def course(self, plan: Plan, record: Record) -> progress.Course:
        """Yield what runs a plan, and do what is to be done before and after it."""
        if plan.lane is not None:
            yield from self._rounds(plan, self._prepared(plan, record, Execution), record)
            return
        work = self._take_work(plan.program.work_bytes)
        execution = self._bind(plan, record, work)
        plan.load()
        yield execution
        self._give_work(work)
        self._over(plan, execution)

    def prepare(self, plan: Plan, record: Record) -> PersistentExecution | DeviceExecution:
        """Bind a plan to memory of its own, for many runs."""
        return self._prepared(plan, record, PersistentExecution)

    def again(
        self, plan: Plan, execution: PersistentExecution | DeviceExecution, record: Record
    ) -> progress.Course:
        """Yield what runs a prepared plan once more."""
        _describe(plan, record)
        execution.restart(record)
        if plan.lane is not None:
            plan.lane.again()
            yield from self._rounds(plan, execution, record)
            return
        plan.load()
        yield execution
        self._over(plan, execution)

    def _prepared(self, plan: Plan, record: Record, on_host: type[_E]) -> _E | DeviceExecution:
        """Bind a plan to memory of its own, on the host as ``on_host`` says."""
        lane, nbytes = plan.lane, plan.program.work_bytes
        device = lane is not None and not lane.hosted
        work = cast(Bytes, lane.scratch(nbytes)) if lane and device else np.empty(nbytes, np.uint8)
        memory = (plan.source, plan.target, work)
        what = (plan.program, self.hidden, plan.tag, memory, plan.reduction, plan.alias)
        if lane is None or not device:
            return on_host(*what, record, self._traces)
        direct = staging.takes_pointers(lane.backend, self.settings)
        return (Direct if direct else Staged)(lane, *what, record, self._traces)

    def _rounds(self, plan: Plan, execution: Execution, record: Record) -> progress.Course:
        """Yield what runs a plan on device memory."""
        assert plan.lane is not None
        _describe(plan, record)
        yield from rounds(plan.lane, execution, plan.loads, plan.finish)
        self._count(plan.program, plan.algorithm.collective, plan.algorithm.name)

    def wait_native(self, name: str, request: MPI.Request, limit: float | None) -> None:
        """Wait for a non-blocking call of the MPI's own under a time limit."""
        record = self.open(name).record
        record.algorithm = "native"
        progress.Operation(self, record, _native(request)).wait(limit)

    def _wait_request(self, request: MPI.Request) -> None:
        """Wait for what is due between two calls, under the time limit."""
        record = Record(self.identity, self.tags.sequence, "turn of the tags")
        record.start = time.perf_counter()
        progress.Operation(self, record, _native(request)).wait(self.settings.timeout)

    def meet(self) -> None:
        """Wait until all ranks end, or one says that its time limit is over.

        Without a limit: others may still save what they have.
        """
        if self.watched:
            self.wait_native("finalize", self.hidden.Ibarrier(), None)

    def _bind(self, plan: Plan, record: Record, work: Bytes) -> Execution:
        _describe(plan, record)
        memory = (plan.source, plan.target, work)
        reduction, alias = plan.reduction, plan.alias
        return Execution(
            plan.program, self.hidden, plan.tag, memory, reduction, alias, record, self._traces
        )

    def _over(self, plan: Plan, execution: Execution) -> None:
        if execution.failed is not None:
            raise execution.failed
        plan.finish()
        self._count(plan.program, plan.algorithm.collective, plan.algorithm.name)

    def exchange(
        self, schedule: Schedule, tag: int, source: Bytes, target: Bytes, record: Record, name: str
    ) -> progress.Course:
        """Yield what runs a schedule of int64 items that prepares a collective, and count it."""
        program = compiled(schedule, np.dtype(np.int64).itemsize)
        work = np.empty(program.work_bytes, np.uint8)
        execution = Execution(
            program, self.hidden, tag, (source, target, work), None, None, record, self._traces
        )
        yield execution
        execution.raise_failure()
        self._count(program, "agreement", name)

    @property
    def _traces(self) -> bool:
        return self.tracer is not None

    def _take_work(self, nbytes: int) -> Bytes:
        """Return scratch of at least ``nbytes`` that nobody else uses."""
        if nbytes == 0:
            return EMPTY
        # Taken away while in use: other calls may be in flight, and a user operator may
        # call a collective of its own.
        for number, work in enumerate(self._spare):
            if work.size >= nbytes:
                return self._spare.pop(number)
        return np.empty(nbytes, np.uint8)

    def _give_work(self, work: Bytes) -> None:
        if 0 < work.size <= KEPT_WORK_BYTES:
            self._spare.append(work)
            while (
                len(self._spare) > KEPT_WORKS
                or sum([one.size for one in self._spare]) > KEPT_WORK_BYTES
            ):
                self._spare.pop(0)

    def _count(self, program: Program, collective: str, name: str) -> None:
        self.stats.add(
            (collective, name),
            messages_sent=program.messages_sent,
            messages_received=program.messages_received,
            bytes_sent=program.bytes_sent,
            bytes_received=program.bytes_received,
        )

    def free(self) -> None:
        """Free the duplicate; collective, harmless the second time.

        What is in flight on it is completed first. After a time-out nothing is freed.
        """
        if self.freed or MPI.Is_finalized() or self.poison:
            return  # a poisoned link stays among the links: the end of the process asks for it
        self._complete()
        self.tags.settle()
        self.tags.sweep()
        _LINKS.remove(self)
        if self.watched:
            watchdog.WATCHED.remove(self)
        RECORDER.leave(self.identity)
        self.hidden.Free()


def _native(request: MPI.Request) -> progress.Course:
    execution = Native(request)
    yield execution
    execution.raise_failure()


def _describe(plan: Plan, record: Record) -> None:
    """Put into the record of a call what its plan says."""
    record.algorithm = plan.algorithm.name
    record.operator = plan.operator
    record.dtype = plan.dtype
    record.root = plan.root
    record.count = plan.count
    record.nbytes = plan.source.size or plan.target.size


@lru_cache(maxsize=128)  # a program of 1000 ranks may have half a megabyte
def programmed(algorithm: Algorithm, call: Call, item_bytes: int) -> Program:
    """Build and compile a schedule, or return the one of an equal earlier call."""
    return compiled(algorithm.build(call), item_bytes)


# -- making a link ------------------------------------------------------------------------


def _world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in MPI.COMM_WORLD of the ranks of ``comm``."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(group.size)), world))
    finally:
        group.Free()
        world.Free()


_MADE: Counter[tuple[int, ...]] = Counter()


def _identity(ranks: tuple[int, ...]) -> str:
    """Return a name that is the same on all ranks of a communicator, and of no other.

    Communicators of the same ranks are made in the same order on all of them.
    """
    _MADE[ranks] += 1
    return f"{zlib.crc32(repr(ranks).encode()):08x}.{_MADE[ranks]}"


def _traced(comm: MPI.Intracomm, folder: str) -> Tracer | None:
    return open_trace(comm, folder) if folder else None


def _need_threads(comm: MPI.Intracomm) -> None:
    """Refuse a progress thread, on all ranks, where one of them may not have it."""
    level = comm.allreduce(MPI.Query_thread(), MPI.MIN)
    if level < MPI.THREAD_MULTIPLE:
        raise SettingError(
            f"progress='thread' needs MPI_THREAD_MULTIPLE on all ranks, and one has level {level} "
            f"(MPI_THREAD_MULTIPLE is {MPI.THREAD_MULTIPLE}); set mpi4py.rc.thread_level = "
            "'multiple' before mpi4py.MPI is imported, or leave progress= out"
        )


# -- attribute and end of the process ---------------------------------------------------

_LINKS: list[Link] = []
_keyval: int | None = None


def _release(comm: MPI.Comm, keyval: int, link: Link) -> None:
    link.free()


def _release_all(*_: object) -> None:
    _leave_if_poisoned()
    progress.stop_thread()
    try:
        for link in _LINKS:
            link.meet()
    except CollectiveTimeout as error:
        print(f"mpicoll: {error}", file=sys.stderr)
        _leave_if_poisoned()
    _close_trace(everywhere=True)
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


def _close_trace(everywhere: bool) -> None:
    """End the trace; with ``everywhere`` all ranks do, and compare their clocks once more."""
    traced = [link for link in _LINKS if link.tracer is not None]
    if traced and (tracer := traced[0].tracer) is not None:
        worlds = [link.hidden for link in traced if link.size == MPI.COMM_WORLD.size]
        tracer.close(worlds[0] if everywhere and worlds else None)


def _leave_if_poisoned() -> None:
    poisoned = [link for link in _LINKS if link.poison]
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


def attach(comm: MPI.Intracomm, settings: Settings | None = None) -> Link:
    """Return the link of ``comm``, made now if it has none; collective then."""
    found = comm.Get_attr(_key())
    if isinstance(found, Link):
        return found
    link = Link(comm, settings)
    comm.Set_attr(_key(), link)
    return link

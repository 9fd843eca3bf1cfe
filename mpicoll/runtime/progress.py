"""Collectives in flight: what drives them, and who waits for them.

An `Operation` is a call under way: a generator that yields the executions it needs, one
after another. Whoever calls into mpicoll drives all operations of the process a little; a
progress thread does so too where one is asked for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from operator import methodcaller
from typing import TYPE_CHECKING, TypeAlias

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.runtime import watchdog
from mpicoll.runtime.executor import NAP_SECONDS, SETTLED, Execution, nap
from mpicoll.runtime.record import Record

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link

#: What a call does: it yields executions, each of which is complete when it goes on.
Course: TypeAlias = Generator[Execution, None, None]


def primed(course: Course) -> Course:
    """Return a course that stands at its first yield, where it can catch an interrupt.

    Before, it would be over by one. What it yields there is not run.
    """
    next(course)
    return course


class Operation:
    """A collective call of this rank, from its start to its end.

    ``error`` is what it raised, once it is ``done``; ``begun`` says whether it came as far
    as a message; what is in ``on_end`` is called when it is done, once. Its buffers stay
    alive with it. ``limit`` are the seconds that it may take, from the first wait or test on,
    whoever waits for it.

    Calls on its communicator that an interrupt has ``left`` without a request come before it:
    their buffers are likely to be those of this one.
    """

    __slots__ = (
        "_before",
        "_busy",
        "_course",
        "_execution",
        "_told",
        "begun",
        "deadline",
        "done",
        "error",
        "left",
        "limit",
        "link",
        "on_end",
        "record",
    )

    def __init__(
        self,
        link: Link,
        record: Record,
        course: Course,
        limit: float | None = None,
        told: bool = False,
    ) -> None:
        """Take a call over; nothing is done before the first `advance`.

        ``told`` says that its interrupt has been raised already.
        """
        self.link = link
        self.record = record
        self.limit = limit
        self.begun = self.done = self.left = False
        self.error: BaseException | None = None
        self.deadline: float | None = None
        self.on_end: list[Callable[[], None]] = []
        self._course = course
        self._execution: Execution | None = None
        self._busy = threading.Lock()
        self._before = [one for one in active(link) if one.is_left()] if ACTIVE else []
        self._told = told

    def advance(self, begin: bool = False) -> bool:
        """Go as far as it goes without waiting, or only ``begin``; return whether it is done."""
        if self.done:
            return True
        # Another thread may be at it, or this one, from inside a user operator.
        taken: list[bool] = []
        try:
            # Taken and noted in the same moment, as by `executor.post`.
            taken += map(self._busy.acquire, (False,))
            if not taken[0] or not self._come():
                return False
            while not self.done:
                if self._execution is not None and (begin or not self._execution.advance()):
                    return False
                self._next()
        finally:
            if True in taken:
                self._busy.release()
        return True

    def _come(self) -> bool:
        """Return whether the turn of this call has come."""
        while self._before:
            if not self._before[0].advance():
                return False
            self._before.pop(0)
        return True

    def is_left(self) -> bool:
        """Whether an interrupt has left this call in flight, and nobody has a request of it."""
        return self.left or self.record.form == "blocking"

    def finish(self) -> None:
        """Run to the end, waiting inside MPI; for a call that nothing else depends on."""
        taken: list[bool] = []
        try:
            taken += map(self._busy.acquire, (True,))
            while not self.done:
                if self._execution is not None:
                    self._execution.run()
                self._next()
        finally:
            if True in taken:
                self._busy.release()

    def _next(self) -> None:
        """Go on with the call until it yields an execution, or to its end."""
        course = self._course
        try:
            # Not by a call of `next`: behind one an interrupt would lose what it has returned,
            # for which the other ranks would wait.
            for self._execution in course:
                self.begun = True
                return
        except BaseException as error:
            self.end(error)
            return
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Be done."""
        self._execution = None
        self.error = self.error or error  # the first, if an interrupt had it come here again
        self.link.over(self.record, self.error)
        ending = filter(methodcaller("__call__"), self.on_end)  # calls nothing yet
        # No interrupt comes between these two, nor within them, see `post`.
        self.done = True
        self.on_end[:] = ending

    def pending(self) -> tuple[int, ...]:
        """Return the ranks whose messages the present step waits for.

        While another thread is at it, and its requests may change, those that it receives from.
        """
        taken: list[bool] = []
        try:
            taken += map(self._busy.acquire, (False,))
            if not taken[0]:
                return self.record.waits
            return self._execution.pending() if self._execution is not None else ()
        finally:
            if True in taken:
                self._busy.release()

    def wait(self) -> None:
        """Wait until it is done, driving the others too; raise what it raised.

        CollectiveTimeout is raised when its limit is over. An interrupted wait leaves the
        operation in flight.
        """
        if not self.done:
            try:
                start = time.perf_counter()
                self._wait()
                self.note_wait(start)
            except (CollectiveTimeout, MPI.Exception):
                discard(self)  # nothing can be posted any more
                raise
            except BaseException:
                keep(self)  # the others wait for the rest
                raise
        if self.error is not None:
            raise self.error

    def note_wait(self, start: float) -> None:
        """Put a wait that ends now into the trace, if there is one."""
        if self.link.tracer is not None and self.record.form != "blocking":
            self.link.tracer.waited(self.record, start, time.perf_counter())

    def _wait(self) -> None:
        self.come()
        self.hold()
        others = self.link.watched or self.link.threaded or len(ACTIVE) > (self in ACTIVE)
        if self.deadline is None and not others:
            discard(self)
            self.finish()
        else:
            await_(self.advance, self.watch)
            discard(self)

    def come(self) -> None:
        """Wait for the calls before this one, under its limit where they have none."""
        for one in [*self._before]:
            one.limit = one.limit or self.limit
            one.hold()
            try:
                await_(one.advance, one.watch)
            except (CollectiveTimeout, MPI.Exception) as error:
                one.end(error)  # nothing can be posted of it any more
                if isinstance(error, CollectiveTimeout):
                    discard(one)
                    raise
            discard(one)

    def hold(self) -> None:
        """Let its time limit run from now on, unless it runs already."""
        if self.limit and self.deadline is None:
            self.deadline = time.perf_counter() + self.limit

    def watch(self) -> None:
        """Raise KeyboardInterrupt if one came, once; CollectiveTimeout if time is over, here
        or on another rank."""
        execution = self._execution
        failed = None if execution is None else execution.failed
        if isinstance(failed, KeyboardInterrupt) and not self._told:
            self._told = True
            raise KeyboardInterrupt
        if self.link.watched:
            try:
                watchdog.watch(self)
            except CollectiveTimeout:
                discard(self)  # nothing can be posted any more
                raise


def await_(done: Callable[[], bool], watch: Callable[[], None]) -> None:
    """Wait until ``done()``; drive all operations and call ``watch`` meanwhile.

    Where no step ends it naps, longer and longer.
    """
    start, steps = time.perf_counter(), SETTLED[0]
    while not done():
        progress()
        watch()
        if steps != SETTLED[0]:
            start, steps = time.perf_counter(), SETTLED[0]
            continue
        nap(time.perf_counter() - start)


#: Operations in flight that nobody may be waiting for at present, in the order of their start.
ACTIVE: dict[Operation, None] = {}


def launch(operation: Operation) -> None:
    """Start an operation and leave it to whoever drives.

    What interrupts this leaves it to them too, or not begun; any wait or test then begins it.
    """
    try:
        # First by this thread alone: what is wrong with the arguments is known before it
        # returns. In advancing, MPI may copy for long; the progress thread does that.
        operation.come()
        operation.advance(begin=operation.link.threaded)
    except (CollectiveTimeout, MPI.Exception) as error:
        operation.end(error)  # nothing can be posted any more
        raise
    except BaseException:
        keep(operation)
        raise
    keep(operation)


def keep(operation: Operation) -> None:
    """Leave an operation that was interrupted to whoever drives."""
    if not operation.done:
        ACTIVE.setdefault(operation)
    if operation.link.threaded:
        _THREAD.wake()


def adopt(operation: Operation) -> None:
    """Take over an operation whose request was dropped; whoever calls next drives it.

    Dropped perhaps by the garbage collector, inside of anything: no lock may be taken.
    """
    if not operation.link.poison:
        ACTIVE.setdefault(operation)


def discard(operation: Operation) -> None:
    """Drive an operation no more."""
    ACTIVE.pop(operation, None)  # another thread may have been faster


def progress(faults: type[Exception] = MPI.Exception) -> None:
    """Drive every operation in flight a little.

    What goes wrong with one is for whoever waits for it, and for no other caller. Of other
    errors than ``faults`` nobody can know whether they are the operation's: a handler of
    signals, too, raises what it likes.
    """
    for operation in list(ACTIVE):
        try:
            over = operation.advance()
        except MemoryError:
            continue  # it is tried again
        except faults as error:
            operation.end(error)  # nothing can be posted any more
            over = True
        if over:
            discard(operation)


def active(link: Link | None = None) -> list[Operation]:
    """Return the operations in flight, all or those of one communicator."""
    return [one for one in list(ACTIVE) if link is None or one.link is link]


class _Thread:
    """The progress thread: asleep while nothing is in flight, and seldom up while it waits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        # Free when there is something new. No threading.Event: what interrupts the Python inside
        # of one leaves its lock held for ever. No queue: CPython 3.11 may wait for ever in a
        # `SimpleQueue.get` whose time is over.
        self._work = threading.Lock()
        self._work.acquire()
        self._stop = False

    def start(self) -> None:
        if self._thread is None:
            self._stop = False
            self._thread = threading.Thread(target=self._run, name="mpicoll", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free already
            self._work.release()

    def stop(self) -> None:
        """End it, before MPI ends."""
        if self._thread is not None:
            self._stop = True
            self.wake()
            self._thread.join()
            self._thread = None

    def _own(self) -> list[Operation]:
        return [] if self._stop else [one for one in active() if one.link.threaded]

    def _run(self) -> None:
        while not self._stop:
            self._work.acquire()
            nap, busy = THREAD_NAP_SECONDS, 0
            while own := self._own():
                before = [one.record.step for one in own]
                start = time.thread_time()
                progress(Exception)  # no handler of signals runs here
                # While MPI has something to copy it stays awake: in its calls only does data
                # move. Else it sleeps longer and longer, until something new is started.
                if before != [one.record.step for one in own]:
                    nap, busy = THREAD_NAP_SECONDS, 0
                elif time.thread_time() - start > MOVING_SECONDS and busy < MOVING_TIMES:
                    nap, busy = THREAD_NAP_SECONDS, busy + 1
                    time.sleep(0)
                    continue
                if self._work.acquire(timeout=nap):
                    nap, busy = THREAD_NAP_SECONDS, 0
                nap = min(NAP_SECONDS, nap * 1.5)


THREAD_NAP_SECONDS = 0.00002
MOVING_SECONDS = 0.00003  #: of the processor; asking in vain mostly takes less
MOVING_TIMES = 1000  #: that it may without a step's end; then asking is what takes so long
_THREAD = _Thread()
start_thread: Callable[[], None] = _THREAD.start
stop_thread: Callable[[], None] = _THREAD.stop

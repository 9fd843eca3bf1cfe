"""The run of a schedule on device memory: by device pointers, or through pinned memory.

Both send and receive the messages of the schedule as they are, so the other end need not
know where its data comes from. Neither waits for the device in `advance`: what is not done
yet is looked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

from mpi4py import MPI

from mpicoll.runtime.backend import Event, Kernel
from mpicoll.runtime.executor import (
    CHECK_SHOWS,
    IRECV,
    ISEND,
    Bytes,
    Execution,
    Message,
    Posting,
    Work,
    _over,
    post,
)
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.plan import Plan
from mpicoll.runtime.record import Record
from mpicoll.runtime.staging import Lane, Region, Segment

_NOTHING = MPI.buffer.fromaddress(0, 0)


class Drain(Execution):
    """What waits for the device, driven as an execution is."""

    __slots__ = ("_done",)

    def __init__(self, done: Callable[[bool], bool]) -> None:
        """Take what asks whether the device is done, or waits until it is."""
        self._done = done
        self.failed = None

    def run(self) -> None:
        """Wait for the device."""
        self._ask(True)

    def advance(self) -> bool:
        """Return whether the device is done."""
        return self._ask(False)

    def _ask(self, wait: bool) -> bool:
        try:
            return self._done(wait)
        except Exception as error:
            self.failed = error
            return True

    def pending(self) -> tuple[int, ...]:
        """Return nothing: no rank is waited for."""
        return ()


def rounds(
    lane: Lane,
    execution: Execution,
    loads: Sequence[Callable[[], None] | None],
    finish: Callable[[], None],
) -> Generator[Execution, None, None]:
    """Yield what runs a plan on device memory, in the order of law 6.

    A fault of the device, or an interrupt, does not keep this rank from its messages, which
    the others wait for: they get empty ones, and raise too.
    """
    try:
        lane.enter()
        for load in loads:
            if load is not None and execution.failed is None:
                load()
                if lane.hosted:  # the next one may work on what is copied down
                    drain = Drain(lane.loaded)
                    yield drain
                    execution.failed = drain.failed
    except GeneratorExit:
        raise
    except BaseException as error:
        execution.failed = execution.failed or error
    yield execution
    try:
        if execution.failed is None:
            finish()
    except BaseException as error:  # raised when the device is done with the caller's memory
        execution.failed = error
    drain = Drain(lane.left)
    yield drain
    failed = execution.failed or drain.failed
    if failed is not None:
        raise failed


class DeviceExecution(Execution):
    """What the two have in common; each goes on by steps."""

    __slots__ = ("_lane",)

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm,
        work: Bytes,
        record: Record,
        traced: bool = False,
        fault: BaseException | None = None,
    ) -> None:
        """Bind a plan whose buffers are on a device."""
        super().__init__(plan, comm, work, record, traced, fault)
        assert plan.lane is not None
        self._lane = plan.lane

    def run(self) -> None:
        """Run to the end, waiting inside MPI and for the device."""
        while self._number < len(self._stages):
            self._step(True)

    def advance(self) -> bool:
        """Go as far as it goes without waiting; return whether the end is reached."""
        while self._number < len(self._stages):
            if not self._step(False):
                return False
        return True

    def free(self) -> None:
        """Give back what runs share; nothing."""

    def _step(self, wait: bool) -> bool:
        """Go on with the present step; return whether it is over."""
        raise NotImplementedError

    def _device(self, ask: Callable[[], bool]) -> bool:
        """Return whether the device is done with something; a fault of it is kept."""
        if self.failed is not None:
            return True
        try:
            return ask()
        except Exception as error:
            self._fail(error)
            return True

    def _work(self, local: Sequence[Work]) -> None:
        super()._work([work for work in local if work.target.stop > work.target.start])


class Direct(DeviceExecution):
    """Hands device pointers to the MPI, once what was queued before is done."""

    __slots__ = ()

    def _step(self, wait: bool) -> bool:
        complete = False
        if self._begun != self._number:
            if not self._device(lambda: self._lane.ready(wait)):
                return False
            self._post()
        else:
            complete = self._resumed()
        if not complete and not self._complete(wait):
            return False
        self._settle()
        return True

    def _complete(self, wait: bool) -> bool:
        """Return whether the messages of the step are complete."""
        if wait and self.failed is None:
            try:
                return MPI.Request.Waitall(self._requests, self._statuses)
            except MPI.Exception as error:
                self._fail(error)
        while not self._tested():
            if not wait:
                return False
            time.sleep(0)
        return True

    def _send_and_receive(self, recvs: Sequence[Message], sends: Sequence[Message]) -> None:
        post(self._requests, [*self._wanted(IRECV, recvs), *self._wanted(ISEND, sends)])

    def _post_empty(self) -> None:
        recvs, sends, _, _ = self._stages[self._number]
        nothing, known = [_NOTHING, 0, MPI.BYTE], len(self._requests)
        left = sends[max(0, known - len(recvs)) :]
        empty = [(ISEND, self._comm, nothing, message.peer, self._tag) for message in left]
        post(self._requests, [*self._wanted(IRECV, recvs[known:]), *empty])

    def _wanted(self, method: Any, messages: Sequence[Message]) -> list[Posting]:
        """Return what posts messages from device memory or into it."""
        comm, tag, byte = self._comm, self._tag, MPI.BYTE
        memory = [getattr(one, "address", 0) for one in self._memory]
        found: list[Posting] = []
        for peer, buffer, start, stop in messages:
            at = MPI.buffer.fromaddress(memory[buffer] + start, stop - start)
            found.append((method, comm, [at, stop - start, byte], peer, tag))
        return found


class Staged(DeviceExecution):
    """Sends from and receives into pinned memory, one segment per message.

    All copies down of a step are queued at its beginning at the latest, and each is sent as
    soon as it is over; each segment is copied up as soon as it has come. Copies down for the
    next step follow at once, as far as they do not wait for what this one receives: so
    copies, transfers and folds of different messages overlap.
    """

    __slots__ = ("_ahead", "_any", "_departing", "_landing", "_open")

    _ahead: list[tuple[Segment, Event]]
    _any: MPI.Status
    _departing: list[tuple[Segment, Event]]
    _landing: list[Segment | None]
    _open: list[int]

    def begin(self, record: Record) -> None:
        """Stand before the first step of a run."""
        super().begin(record)
        self._departing, self._ahead = [], []

    def _step(self, wait: bool) -> bool:
        if self._begun != self._number:
            self._post()
        elif self.failed is not None:  # perhaps interrupted before all was posted
            self._receive()
        if not self._depart(wait) or not self._arrive(wait) or not self._gone(wait):
            return False
        while self._departing:  # each leaves the list first, lest one is given back twice
            segment, event = self._departing.pop()
            # After a failure nobody has waited for the copy into it.
            self._lane.pool.give(segment, None if self.failed is None else event)
        self._settle()
        return True

    def _post(self) -> None:
        """Post the receives, queue the copies down and the local work."""
        number = self._number
        recvs, sends, local, self._record.waits = self._stages[number]
        self._record.step = number + 1
        if self._traced:
            self._posted = self._worked = time.perf_counter()
        self._landing = [self._lane.pool.take(stop - start) for _, _, start, stop in recvs]
        self._requests = []
        self._statuses = [MPI.Status() for _ in (*recvs, *sends)]
        self._any = MPI.Status()
        self._open = list(range(len(recvs)))
        try:
            # From here on an interrupt is a failure, before it the step is not begun.
            self._begun = number
            self._departing, self._ahead = self._ahead, []
            self._receive()
            if self.failed is None:
                self._queue(sends, local)
                self._look_ahead(recvs)
            if self._traced:
                self._worked = time.perf_counter()
        except BaseException as error:
            self._fail(error)
            self._receive()

    def _receive(self) -> None:
        """Post the receives that are not posted yet."""
        comm, tag, byte = self._comm, self._tag, MPI.BYTE
        known = len(self._requests)
        wanted: list[Posting] = []
        recvs = self._stages[self._number].recvs[known:]
        for segment, (peer, _, start, stop) in zip(self._landing[known:], recvs, strict=True):
            assert segment is not None  # it has not come, so it was not taken away
            wanted.append((IRECV, comm, [segment.memory, stop - start, byte], peer, tag))
        post(self._requests, wanted)

    def _queue(self, sends: Sequence[Message], local: Sequence[Work]) -> None:
        self._lane.step()
        for message in sends[len(self._departing) :]:
            self._departing.append(self._down(self._region(message)))
        if local:
            self._work(local)

    def _look_ahead(self, recvs: Sequence[Message]) -> None:
        """Queue copies down for the next step, up to the first of what this one receives.

        As far as there is pinned memory for it.
        """
        if self._number + 1 == len(self._stages):
            return
        coming = [self._region(message) for message in recvs]
        for message in self._stages[self._number + 1].sends:
            source = self._region(message)
            low, high = source.address, source.address + source.size
            if any(low < one.address + one.size and one.address < high for one in coming):
                return
            segment = self._lane.pool.spare(source.size)
            if segment is None:
                return
            self._ahead.append((segment, self._lane.down(segment, source)))

    def _region(self, message: Message) -> Region:
        """Return where a message is on the device."""
        return cast(Region, self._memory[message.buffer][message.start : message.stop])

    def _down(self, source: Region) -> tuple[Segment, Event]:
        """Queue a copy down."""
        segment = self._lane.pool.take(source.size)
        return segment, self._lane.down(segment, source)

    def _depart(self, wait: bool) -> bool:
        """Send what has been copied down; return whether all is sent."""
        sends, received = self._stages[self._number].sends, len(self._landing)
        while (sent := len(self._requests) - received) < len(sends):
            peer, _, start, stop = sends[sent]
            at: list[Any] = [_NOTHING, 0, MPI.BYTE]
            if self.failed is None:
                segment, event = self._departing[sent]
                if not self._device(lambda event=event: self._lane.is_down(event, wait)):  # type: ignore[misc]
                    return False
                if self.failed is None:
                    at = [segment.memory, stop - start, MPI.BYTE]
            post(self._requests, [(ISEND, self._comm, at, peer, self._tag)])
        return True

    def _arrive(self, wait: bool) -> bool:
        """Copy up what has come; return whether all has."""
        while self._open:
            found = self._next_arrival(wait)
            if found is None:
                return False
            _, buffer, start, stop = self._stages[self._number].recvs[found]
            # Taken away first, so that it is copied and given back once: what is interrupted
            # then is a failure.
            segment, self._landing[found] = self._landing[found], None
            try:
                if segment is None:
                    pass
                elif self.failed is not None or self._statuses[found].count != stop - start:
                    self._lane.pool.give(segment)
                else:
                    self._lane.up(cast(Region, self._memory[buffer][start:stop]), segment)
            except BaseException as error:
                self._fail(error)
            self._open.remove(found)
        return True

    def _next_arrival(self, wait: bool) -> int | None:
        """Return the number of a receive that is complete; a failed one is complete too."""
        while True:
            for number in self._open:
                request = self._requests[number]
                if not request:  # complete before an interrupt, perhaps by Waitany
                    if self._statuses[number].source < 0:
                        self._statuses[number], self._any = self._any, MPI.Status()
                    return number
                try:
                    if request.Test(self._statuses[number]):
                        return number
                except MPI.Exception as error:
                    self._fail(self._misfit(error, number))
                    return number
            if not wait:
                return None
            try:
                MPI.Request.Waitany([self._requests[one] for one in self._open], self._any)
            except MPI.Exception as error:
                self._fail(error)

    def _misfit(self, error: MPI.Exception, number: int) -> Exception:
        peer, _, start, stop = self._stages[self._number].recvs[number]
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            return error
        return CallError(
            MPI.ERR_TRUNCATE,
            f"{self._where()}: the message from rank {peer} does not fit the {stop - start} "
            "bytes expected; the ranks disagree on count or datatype of this call; " + CHECK_SHOWS,
        )

    def _gone(self, wait: bool) -> bool:
        """Return whether all sends are complete."""
        requests = self._requests[len(self._landing) :]
        while open_ := [request for request in requests if not _over(request)]:
            if not wait:
                return False
            requests = open_
            time.sleep(0)
        return True


class DeviceReduction:
    """An operator that folds on the device."""

    def __init__(self, lane: Lane, kernel: Kernel) -> None:
        """Take what the host's reduction says of itself."""
        host = kernel.host
        self.operator = host.operator
        self.label = host.label
        self.loop = host.loop
        self.commutative = host.commutative
        self.item_bytes = host.item_bytes
        self.wide = host.wide
        self.mean_of = host.mean_of
        self.finish: Callable[[Bytes, int], None] | None = self._divide if host.finish else None
        self._lane = lane
        self._kernel = kernel

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Queue one fused kernel."""
        self._lane.fold(self._kernel, cast(Region, target), cast(Sequence[Region], operands))

    def _divide(self, result: Bytes, size: int) -> None:
        if result.size:
            self._lane.divide(self._kernel, cast(Region, result), size)

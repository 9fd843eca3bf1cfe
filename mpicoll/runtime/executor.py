"""The run of a schedule: Irecv and Isend, local work, wait.

A schedule speaks of elements; `compiled` turns it once into byte ranges and cuts
messages that an MPI with 32-bit counts could not carry. An `Execution` is one run of such
a plan, which binds such a program to memory: in one go (`run`), or bit by bit (`advance`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.errors import PeerError, ShortMessageError
from mpicoll.runtime.faults import CallError
from mpicoll.runtime.record import Record, StageTime
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Copy, Recv, Schedule, Send, Span

if TYPE_CHECKING:
    from mpicoll.runtime.plan import Plan

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: The most bytes of one MPI message; larger ones are cut alike at both ends. Counts of
#: MPI's classic calls are 32-bit and signed, and 1 GiB is cut from no useful pipeline.
MESSAGE_LIMIT = 1 << 30

_POSITION = {INPUT: 0, OUTPUT: 1, WORK: 2}
_NO_BYTES: Bytes = np.empty(0, np.uint8)

#: A waiting rank spins this long before it gives its core away now and then.
SPIN_SECONDS = 0.0002
#: The longest nap of a waiting rank, and the share of the time waited that a nap may have.
NAP_SECONDS = 0.001
NAP_SHARE = 0.05

#: How many steps this process has ended; whoever waits sees by it that something moves. Two
#: threads that end one at once may count one of them only, which is as good.
SETTLED = [0]

#: What to do where the ranks disagree, for the end of an error.
CHECK_SHOWS = "MPICOLL_CHECK=1 shows who passed what"

#: A message to be posted: a method of MPI, and its arguments.
Posting: TypeAlias = tuple[Any, ...]
IRECV, ISEND = MPI.Comm.Irecv, MPI.Comm.Isend
# Calls the method of MPI that its first argument is; in C, as `post` needs it.
call: Callable[..., Any]
if sys.version_info >= (3, 11):
    from operator import call
else:
    call = type(MPI.Comm.Irecv).__call__


def nap(waited: float) -> None:
    """Give the core away for a share of the seconds ``waited`` in vain."""
    if waited > SPIN_SECONDS:
        time.sleep(min(NAP_SECONDS, NAP_SHARE * (waited - SPIN_SECONDS)))


def post(requests: list[MPI.Request], wanted: Sequence[Posting]) -> None:
    """Post messages and put each request on the list in the same moment.

    Handlers of signals run between two instructions of Python, and what they raise would
    lose a request that a call into MPI has just returned. Here there is none between.
    """
    requests += starmap(call, wanted)


class Reduction(Protocol):
    """What the executor needs of an operator bound to an item type: its name, and folds."""

    operator: str

    def reduce(self, target: Bytes, operands: Sequence[Bytes]) -> None:
        """Fold ``operands`` from the left into ``target``."""


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` of buffer 0 (input), 1 (output) or 2 (work)."""

    buffer: int
    start: int
    stop: int


class Message(NamedTuple):
    """One MPI message: its peer and its bytes."""

    peer: int
    buffer: int
    start: int
    stop: int


class Work(NamedTuple):
    """Local work: a copy when there is one source, else a fold."""

    target: Range
    sources: tuple[Range, ...]


class Stage(NamedTuple):
    """A step, in bytes; ``sources`` are the ranks that it receives from."""

    recvs: tuple[Message, ...]
    sends: tuple[Message, ...]
    local: tuple[Work, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule in bytes, with what it sends and receives in all."""

    stages: tuple[Stage, ...]
    work_bytes: int
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int


def compiled(schedule: Schedule, item_bytes: int, limit: int = MESSAGE_LIMIT) -> Program:
    """Return ``schedule`` as byte ranges for items of ``item_bytes``."""

    def at(span: Span) -> Range:
        return Range(_POSITION[span.buffer], span.start * item_bytes, span.stop * item_bytes)

    def messages(ops: Sequence[Send | Recv]) -> tuple[Message, ...]:
        found = []
        for op in ops:
            buffer, start, stop = at(op.span)
            for low in range(start, stop, limit):
                found.append(Message(op.peer, buffer, low, min(low + limit, stop)))
        return tuple(found)

    stages = []
    for step in schedule.steps:
        local = tuple(
            Work(at(item.target), (at(item.source),))
            if isinstance(item, Copy)
            else Work(at(item.target), tuple(at(span) for span in item.operands))
            for item in step.local
        )
        recvs = messages(step.recvs)
        stages.append(Stage(recvs, messages(step.sends), local, _peers(recvs)))
    sent = [message for stage in stages for message in stage.sends]
    received = [message for stage in stages for message in stage.recvs]
    return Program(
        stages=tuple(stages),
        work_bytes=schedule.work * item_bytes,
        messages_sent=len(sent),
        messages_received=len(received),
        bytes_sent=sum(message.stop - message.start for message in sent),
        bytes_received=sum(message.stop - message.start for message in received),
    )


class Execution:
    """One run of a plan, on its input and output and on work memory.

    A copy of memory onto itself, where input and output are the same, is skipped.

    A failure does not end the run, since the other ranks wait for its messages: it is kept
    in ``failed``, the rest of the schedule is gone through with empty messages and
    without local work, and a rank that receives an empty one fails alike. So all ranks
    that would get wrong data raise, none waits for ever, nothing is left in flight, and
    the communicator can be used on. `raise_failure` raises it.
    """

    __slots__ = (
        "_alias",
        "_begun",
        "_comm",
        "_memory",
        "_number",
        "_posted",
        "_record",
        "_reduction",
        "_requests",
        "_stages",
        "_statuses",
        "_tag",
        "_times",
        "_traced",
        "_worked",
        "failed",
        "fault",
    )

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm,
        work: Bytes,
        record: Record,
        traced: bool = False,
        fault: BaseException | None = None,
    ) -> None:
        """Bind a plan to a communicator and to scratch; nothing is sent yet.

        With ``fault``, which is why there is no input or no scratch, every run fails from its
        start on.
        """
        self._stages = plan.recipe.program.stages
        self._tag = plan.tag
        self._memory = (plan.source, plan.target, work)
        self._reduction = plan.reduction
        self._alias = plan.alias
        self._comm = comm
        self._traced = traced
        self.fault = fault
        self.begin(record)

    def begin(self, record: Record) -> None:
        """Stand before the first step of a run."""
        # The steps that are over, and the one that ``_requests`` and ``_statuses`` belong to.
        self._number, self._begun = 0, -1
        self._record = record
        self.failed = self.fault
        record.step, record.steps = 0, len(self._stages)
        if self._traced:  # behind those of what the ranks had to agree on before
            self._times: list[StageTime] = [*record.stages]
            record.stages = self._times

    def run(self) -> None:
        """Run to the end, waiting inside MPI.

        An interrupt, by whatever a handler of signals raises, leaves it where it is, or while
        a step is begun is a failure of it; it can be run on.
        """
        steps = len(self._stages)
        while (number := self._number) < steps:
            if self._begun != number:
                self._post()
                waits = bool(self._requests)
            else:
                waits = not self._resumed()
            if waits:
                try:
                    self._wait()
                except MPI.Exception as error:
                    self._fail(error)
                    for request in self._requests:
                        while not _over(request):
                            time.sleep(0)
            self._settle()

    def advance(self) -> bool:
        """Go as far as it goes without waiting; return whether the end is reached."""
        steps = len(self._stages)
        while (number := self._number) < steps:
            if self._begun != number:
                self._post()
                waits = bool(self._requests)
            else:
                waits = not self._resumed()
            if waits and not self._tested():
                return False
            self._settle()
        return True

    def _wait(self) -> None:
        """Wait inside MPI for the messages of the step."""
        MPI.Request.Waitall(self._requests, self._statuses)

    def _test(self) -> bool:
        """Ask MPI whether the messages of the step are complete."""
        return MPI.Request.Testall(self._requests, self._statuses)

    def _tested(self) -> bool:
        """Return whether the messages of the step are complete; an error is kept."""
        if self.failed is None:
            try:
                return self._test()
            except MPI.Exception as error:
                self._fail(error)
        # One that fails lets the others be, so they are asked one by one.
        return all(_over(request) for request in self._requests)

    def _resumed(self) -> bool:
        """Go on with a step that was begun; return whether it is known to be complete.

        Asking MPI again would lose what it has written about the messages received.
        """
        if self.failed is not None:  # and perhaps interrupted before all was posted
            self._post_empty()
        return self._seems_complete()

    def _seems_complete(self) -> bool:
        """Return whether a call into MPI that an interrupt followed has completed the step."""
        return not any(self._requests)

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failed is not None:
            raise self.failed

    def pending(self) -> tuple[int, ...]:
        """Return the peers whose messages of this step have not all come or gone."""
        if self._begun != self._number:
            return ()
        recvs, sends, _, _ = self._stages[self._number]
        peers = [message.peer for message in (*recvs, *sends)]
        open_ = [
            peer
            for peer, request in zip(peers, self._requests, strict=False)
            if request != MPI.REQUEST_NULL and not request.Get_status()
        ]
        return tuple(sorted(set(open_)))

    def _post(self) -> None:
        """Post the messages of the next step, and do the local work that goes with it."""
        number = self._number
        recvs, sends, local, waits = self._stages[number]
        self._record.waits = waits
        self._record.step = number + 1
        if self._traced:
            self._posted = self._worked = time.perf_counter()
        # MPI adds those of the sends.
        self._statuses = [MPI.Status()] if len(recvs) == 1 else [MPI.Status() for _ in recvs]
        self._requests: list[MPI.Request] = []
        try:
            # From here on an interrupt is a failure, before it the step is not begun.
            self._begun = number
            if self.failed is not None:
                self._post_empty()
            else:
                if recvs or sends:
                    self._send_and_receive(recvs, sends)
                if local:
                    self._work(local)
            if self._traced:
                self._worked = time.perf_counter()
        except BaseException as error:
            self.failed = self.failed or error
            self._post_empty()

    def _send_and_receive(self, recvs: Sequence[Message], sends: Sequence[Message]) -> None:
        """Post the messages of a step."""
        comm, memory, tag, byte = self._comm, self._memory, self._tag, MPI.BYTE
        wanted: list[Posting] = []
        for peer, buffer, start, stop in recvs:
            given = (memory[buffer][start:stop], stop - start, byte)
            wanted.append((IRECV, comm, given, peer, tag))
        for peer, buffer, start, stop in sends:
            given = (memory[buffer][start:stop], stop - start, byte)
            wanted.append((ISEND, comm, given, peer, tag))
        post(self._requests, wanted)

    def _post_empty(self) -> None:
        """Post what is not posted yet of a step that fails: receives, and empty messages.

        Without scratch each message lands in memory of its own, which is less than the scratch
        that could not be had. Where there is not even that, it is tried again by whoever runs
        this on.
        """
        recvs, sends, _, _ = self._stages[self._number]
        comm, tag, byte = self._comm, self._tag, MPI.BYTE
        nothing = (_NO_BYTES, 0, byte)
        wanted: list[Posting] = []
        known = len(self._requests)
        for peer, buffer, start, stop in recvs[known:]:
            there = self._memory[buffer][start:stop]
            if there.size != stop - start:
                there = np.empty(stop - start, np.uint8)
            wanted.append((IRECV, comm, (there, stop - start, byte), peer, tag))
        left = sends[max(0, known - len(recvs)) :]
        wanted += [(ISEND, comm, nothing, message.peer, tag) for message in left]
        post(self._requests, wanted)

    def _work(self, local: Sequence[Work]) -> None:
        memory, alias = self._memory, self._alias
        for (buffer, start, stop), sources in local:
            if len(sources) > 1:
                assert self._reduction is not None
                self._reduction.reduce(
                    memory[buffer][start:stop],
                    [memory[one][low:high] for one, low, high in sources],
                )
                continue
            one, low, high = sources[0]
            onto_itself = alias is not None and (buffer, one, start) == (1, 0, low + alias)
            if not onto_itself:
                memory[buffer][start:stop] = memory[one][low:high]

    def _settle(self) -> None:
        """End a step whose messages are complete: hold the received ones to their length."""
        recvs, sends, _, _ = self._stages[self._number]
        if recvs and self.failed is None:
            statuses = self._statuses
            for number, (peer, _, start, stop) in enumerate(recvs):
                count = statuses[number].count
                if count != stop - start:
                    self.failed = self._wrong(peer, count, stop - start)
                    break
        stage = self._timed(recvs, sends) if self._traced else None
        self._number += 1
        SETTLED[0] += 1
        if stage is not None:
            self._times.append(stage)

    def _where(self) -> str:
        return f"step {self._number + 1} of {len(self._stages)}"

    def _wrong(self, peer: int, count: int, expected: int) -> Exception:
        if count == 0:
            return PeerError(
                f"{self._where()}: rank {peer} gave up this collective after an error of its "
                "own, or of a rank that it heard of; what it raised says why; if the ranks "
                f"disagree on this call, {CHECK_SHOWS}"
            )
        return ShortMessageError(
            f"{self._where()}: {count} bytes from rank {peer}, expected {expected}; the ranks "
            f"disagree on count or datatype of this call; {CHECK_SHOWS}"
        )

    def _fail(self, error: BaseException) -> None:
        """Keep the error of a step; its other messages are still completed.

        None may land in memory that is no longer ours.
        """
        if isinstance(error, MPI.Exception):
            error = self._explained(error)
        self.failed = self.failed or error

    def _explained(self, error: MPI.Exception) -> Exception:
        """Return the error of the first message that failed, where the MPI tells them apart."""
        if error.Get_error_class() != MPI.ERR_IN_STATUS:
            return error
        recvs = self._stages[self._number].recvs
        for status, (peer, _, start, stop) in zip(self._statuses, recvs, strict=False):
            failed = MPI.Get_error_class(status.error)
            if failed not in (MPI.SUCCESS, MPI.ERR_PENDING):
                return CallError(
                    failed,
                    f"{self._where()}: the message from rank {peer} does not fit the "
                    f"{stop - start} bytes expected; the ranks disagree on count or datatype of "
                    f"this call; {CHECK_SHOWS}",
                )
        return error

    def _timed(self, recvs: Sequence[Message], sends: Sequence[Message]) -> StageTime:
        return StageTime(
            self._number + 1,
            self._posted,
            self._worked,
            time.perf_counter(),
            tuple([message.peer for message in recvs]),
            tuple([message.peer for message in sends]),
            sum(message.stop - message.start for message in recvs),
            sum(message.stop - message.start for message in sends),
        )


class Native(Execution):
    """A non-blocking call of the MPI's own, waited for as an execution is."""

    def __init__(self, request: MPI.Request) -> None:
        """Take a request over."""
        self._requests = [request]
        self.failed = None

    def run(self) -> None:
        """Ask MPI until it is complete; where all ranks come to an end that may take long."""
        start = time.perf_counter()
        while not self.advance():
            nap(time.perf_counter() - start)

    def advance(self) -> bool:
        """Return whether the call is complete."""
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            self.failed = self.failed or error
            return True

    def pending(self) -> tuple[int, ...]:
        """Return nothing: whom the MPI waits for is not known."""
        return ()


def _over(request: MPI.Request) -> bool:
    """Return whether a request is complete, with success or not."""
    try:
        return request.Test()
    except MPI.Exception:
        return True


def _peers(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([message.peer for message in messages]))

"""The run of a schedule: Irecv and Isend, local work, wait.

A schedule speaks of elements; `compiled` turns it once into byte ranges and cuts
messages that an MPI with 32-bit counts could not carry. An `Execution` is one run of such
a plan, which binds such a program to memory: in one go (`run`), or bit by bit (`advance`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

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
        "_comm",
        "_ended",
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
    )

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm,
        work: Bytes,
        record: Record,
        traced: bool = False,
    ) -> None:
        """Bind a plan to a communicator and to scratch; nothing is sent yet."""
        self._stages = plan.recipe.program.stages
        self._tag = plan.tag
        self._memory = (plan.source, plan.target, work)
        self._reduction = plan.reduction
        self._alias = plan.alias
        self._comm = comm
        self._traced = traced
        self._requests: list[MPI.Request] | None = None  # of the posted step, None before
        self._ended = False
        self.begin(record)

    def begin(self, record: Record) -> None:
        """Stand before the first step of a run."""
        self._number = 0
        self._record = record
        self.failed: BaseException | None = None
        record.step, record.steps = 0, len(self._stages)

    def run(self) -> None:
        """Run to the end, waiting inside MPI.

        An interrupt, by whatever a handler of signals raises, leaves it where it is; it can
        be run on.
        """
        stages = self._stages
        while self._number < len(stages):
            if self._requests is None:
                self._post()
            if self._requests and not self._ended:
                try:
                    MPI.Request.Waitall(self._requests, self._statuses)
                    self._ended = True
                except MPI.Exception as error:
                    self._fail(error)
                    for request in self._requests:
                        while not _over(request):
                            time.sleep(0)
                except BaseException:
                    self._ended = self._seems_complete()
                    raise
            self._settle()

    def advance(self) -> bool:
        """Go as far as it goes without waiting; return whether the end is reached."""
        stages = len(self._stages)
        while self._number < stages:
            if self._requests is None:
                self._post()
            if self._requests and not self._tested():
                return False
            self._settle()
        return True

    def _tested(self) -> bool:
        """Return whether the messages of the step are complete."""
        assert self._requests is not None
        if self._ended:
            return True
        if self.failed is None:
            try:
                self._ended = MPI.Request.Testall(self._requests, self._statuses)
                return self._ended
            except MPI.Exception as error:
                self._fail(error)
            except BaseException:
                self._ended = self._seems_complete()
                raise
        # One that fails lets the others be, so they are asked one by one.
        return all(_over(request) for request in self._requests)

    def _seems_complete(self) -> bool:
        """Return whether the call into MPI that an interrupt followed has completed the step.

        Asking again would lose what it has written about the messages received.
        """
        if self._stages[self._number].recvs:
            return self._statuses[0].source >= 0
        return not any(self._requests or ())

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failed is not None:
            raise self.failed

    def pending(self) -> tuple[int, ...]:
        """Return the peers whose messages of this step have not all come or gone."""
        if not self._requests:
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
        recvs, sends, local, waits = self._stages[self._number]
        self._record.waits = waits
        self._record.step = self._number + 1
        if self._traced:
            self._posted = time.perf_counter()
        self._statuses = [MPI.Status() for _ in recvs] if recvs else []  # MPI adds the others
        requests: list[MPI.Request] = []
        try:
            # First in here, so that an interrupt leaves the step unposted or is caught.
            self._requests = requests
            if recvs or sends:
                self._send_and_receive(recvs, sends, requests)
            if local and self.failed is None:
                self._work(local)
        except BaseException as error:
            self.failed = self.failed or error
            self._send_and_receive(recvs, sends, requests)  # what is not posted yet
        if self._traced:
            self._worked = time.perf_counter()

    def _send_and_receive(
        self, recvs: Sequence[Message], sends: Sequence[Message], requests: list[MPI.Request]
    ) -> None:
        """Post what is not among ``requests`` yet; empty messages after a failure."""
        comm, memory, tag, byte = self._comm, self._memory, self._tag, MPI.BYTE
        if requests:
            recvs, sends = recvs[len(requests) :], sends[max(0, len(requests) - len(recvs)) :]
        for peer, buffer, start, stop in recvs:
            given = (memory[buffer][start:stop], stop - start, byte)
            requests.append(comm.Irecv(given, peer, tag))
        for peer, buffer, start, stop in sends:
            given = (memory[buffer][start:stop], stop - start, byte)
            if self.failed is not None:
                given = (_NO_BYTES, 0, byte)
            requests.append(comm.Isend(given, peer, tag))

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
        if self._traced:
            self._trace(recvs, sends)
        self._requests = None
        self._number += 1
        self._ended = False

    def _where(self) -> str:
        return f"step {self._number + 1} of {len(self._stages)}"

    def _wrong(self, peer: int, count: int, expected: int) -> Exception:
        if count == 0:
            return PeerError(
                f"{self._where()}: rank {peer} gave up this collective after an error of its "
                "own, or of a rank that it heard of; what it raised says why"
            )
        return ShortMessageError(
            f"{self._where()}: {count} bytes from rank {peer}, expected {expected}; the ranks "
            "disagree on count or datatype of this call"
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
                    "this call",
                )
        return error

    def _trace(self, recvs: Sequence[Message], sends: Sequence[Message]) -> None:
        if not self._record.stages:
            self._times: list[StageTime] = []
            self._record.stages = self._times
        self._times.append(
            StageTime(
                self._number + 1,
                self._posted,
                self._worked,
                time.perf_counter(),
                tuple([message.peer for message in recvs]),
                tuple([message.peer for message in sends]),
                sum(message.stop - message.start for message in recvs),
                sum(message.stop - message.start for message in sends),
            )
        )


class Native(Execution):
    """A non-blocking call of the MPI's own, waited for as an execution is."""

    def __init__(self, request: MPI.Request) -> None:
        """Take a request over."""
        self._requests = [request]
        self.failed = None

    def run(self) -> None:
        """Wait inside MPI."""
        while not self.advance():
            time.sleep(0)

    def advance(self) -> bool:
        """Return whether the call is complete."""
        try:
            return MPI.Request.Testall(self._requests or [])
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

"""The blocking run of a schedule: Isend and Irecv, local work, wait.

A schedule speaks of elements; `compiled` turns it once into byte ranges and cuts
messages that an MPI with 32-bit counts could not carry. `run` does the rest for one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.errors import ShortMessageError
from mpicoll.runtime.faults import CallError
from mpicoll.schedule.ir import INPUT, OUTPUT, WORK, Copy, Recv, Schedule, Send, Span

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: The most bytes of one MPI message; larger ones are cut alike at both ends. Counts of
#: MPI's classic calls are 32-bit and signed, and 1 GiB is cut from no useful pipeline.
MESSAGE_LIMIT = 1 << 30

_POSITION = {INPUT: 0, OUTPUT: 1, WORK: 2}


class Reduction(Protocol):
    """What the executor needs of an operator bound to an item type."""

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
    """A step, in bytes."""

    recvs: tuple[Message, ...]
    sends: tuple[Message, ...]
    local: tuple[Work, ...]


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
        stages.append(Stage(messages(step.recvs), messages(step.sends), local))
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


def run(
    program: Program,
    comm: MPI.Intracomm,
    tag: int,
    memory: tuple[Bytes, Bytes, Bytes],
    reduction: Reduction | None,
    alias: int | None = None,
) -> None:
    """Run ``program`` on input, output and work memory, and return when it is done here.

    ``alias`` is set when input and output share memory: the byte of the output at which
    the input begins. A copy onto itself is then skipped.

    Every request is completed before this returns or raises. A message that is shorter
    than the schedule says raises ShortMessageError; a longer one is MPI's own error.
    """
    isend, irecv, byte = comm.Isend, comm.Irecv, MPI.BYTE
    for number, (recvs, sends, local) in enumerate(program.stages):
        requests: list[MPI.Request] = []
        try:
            for peer, buffer, start, stop in recvs:
                requests.append(irecv((memory[buffer][start:stop], stop - start, byte), peer, tag))
            for peer, buffer, start, stop in sends:
                requests.append(isend((memory[buffer][start:stop], stop - start, byte), peer, tag))
            for (buffer, start, stop), sources in local:
                if len(sources) > 1:
                    assert reduction is not None
                    reduction.reduce(
                        memory[buffer][start:stop],
                        [memory[one][low:high] for one, low, high in sources],
                    )
                    continue
                one, low, high = sources[0]
                if alias is not None and (one == 0 and buffer == 1 and low + alias == start):
                    continue
                memory[buffer][start:stop] = memory[one][low:high]
        except BaseException:
            # Nothing is left in flight. Peers that follow the same schedule post their
            # side of this step whatever happens here.
            _drain(requests)
            raise
        if requests:
            _wait(requests, recvs, number, len(program.stages))


def _wait(requests: list[MPI.Request], recvs: tuple[Message, ...], step: int, steps: int) -> None:
    """Complete the messages of a step and hold the received ones to their length."""
    statuses = [MPI.Status() for _ in recvs]
    try:
        MPI.Request.Waitall(requests, statuses)
    except BaseException as error:
        _drain(requests)
        if isinstance(error, MPI.Exception):
            _explain(error, statuses, recvs, f"step {step + 1} of {steps}")
        raise
    for status, (peer, _, start, stop) in zip(statuses, recvs, strict=False):
        if status.count != stop - start:
            raise ShortMessageError(
                f"step {step + 1} of {steps}: {status.count} bytes from rank {peer}, expected "
                f"{stop - start}; the ranks disagree on count or datatype of this call"
            )


def _explain(
    error: MPI.Exception, statuses: list[MPI.Status], recvs: tuple[Message, ...], where: str
) -> None:
    """Raise the error of the first message that failed, where the MPI tells them apart."""
    if error.Get_error_class() != MPI.ERR_IN_STATUS:
        return
    for status, (peer, _, start, stop) in zip(statuses, recvs, strict=False):
        failed = MPI.Get_error_class(status.error)
        if failed not in (MPI.SUCCESS, MPI.ERR_PENDING):
            raise CallError(
                failed,
                f"{where}: the message from rank {peer} does not fit the {stop - start} bytes "
                "expected; the ranks disagree on count or datatype of this call",
            ) from error


def _drain(requests: list[MPI.Request]) -> None:
    """Complete every request, so that no message lands in memory that is no longer ours.

    One that fails lets the others be: Open MPI returns from Waitall with them pending.
    """
    for request in requests:
        try:
            request.Wait()
        except MPI.Exception:
            continue

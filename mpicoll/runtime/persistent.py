"""The run of a plan that runs again and again: what can be made once is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.runtime.executor import Bytes, Execution, Message
from mpicoll.runtime.record import Record

if TYPE_CHECKING:
    from mpicoll.runtime.plan import Plan


class PersistentExecution(Execution):
    """An execution that can run again: slices and MPI requests are made once.

    `begin` before each run but the first; `free` at the end.
    """

    __slots__ = ("_answers", "_prepared")

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Intracomm,
        work: Bytes,
        record: Record,
        traced: bool = False,
        fault: BaseException | None = None,
    ) -> None:
        """Bind a plan to a communicator and to scratch, and set its MPI requests up."""
        super().__init__(plan, comm, work, record, traced, fault)
        self._prepared: list[list[MPI.Prequest]] = []
        self._answers: list[bool] = []
        try:
            for recvs, sends, _, _ in () if fault is not None else self._stages:
                self._prepared.append([])
                self._prepare(recvs, sends, self._prepared[-1])
        except BaseException:
            self.free()
            raise

    def _prepare(
        self, recvs: Sequence[Message], sends: Sequence[Message], requests: list[MPI.Prequest]
    ) -> None:
        """Make the requests of a step."""
        comm, memory, tag, byte = self._comm, self._memory, self._tag, MPI.BYTE
        for peer, buffer, start, stop in recvs:
            given = (memory[buffer][start:stop], stop - start, byte)
            requests.append(comm.Recv_init(given, peer, tag))
        for peer, buffer, start, stop in sends:
            given = (memory[buffer][start:stop], stop - start, byte)
            requests.append(comm.Send_init(given, peer, tag))

    def _send_and_receive(self, recvs: Sequence[Message], sends: Sequence[Message]) -> None:
        # Each is put on the list in the moment that it is started, as by `post`: Start
        # returns None, and what that is said of is kept.
        start: Callable[[Any], None] = MPI.Prequest.Start
        self._requests += filterfalse(start, self._prepared[self._number])

    def _post(self) -> None:
        self._answers.clear()
        super()._post()

    # These requests do not become null, and to be asked again would cost them the statuses: so
    # what MPI answers is kept in the moment that it does, as requests are by `post`.

    def _wait(self) -> None:
        self._answers[:] = map(MPI.Request.Waitall, [self._requests], [self._statuses])

    def _test(self) -> bool:
        self._answers[:] = map(MPI.Request.Testall, [self._requests], [self._statuses])
        return self._answers[0]

    def _seems_complete(self) -> bool:
        return True in self._answers

    def pending(self) -> tuple[int, ...]:
        """Return the peers of this step.

        Which of them it still waits for is not asked: MPICH ends a persistent request that is
        asked for its status.
        """
        if self._begun != self._number:
            return ()
        recvs, sends, _, _ = self._stages[self._number]
        return tuple(sorted({message.peer for message in (*recvs, *sends)}))

    def free(self) -> None:
        """Give the MPI requests back; none may be under way."""
        while self._prepared:
            for request in self._prepared[-1]:
                if request:  # else an interrupt has come between
                    request.Free()
            self._prepared.pop()

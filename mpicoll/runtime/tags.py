"""Tags of one communicator, and what keeps them apart.

A tag is made of a slot and a code. Calls take the slots in turn; the code tells what the
call is, so that messages of two calls that do not belong together do not meet. Beyond the
slots lie a tag for control messages and those of persistent plans.

Slots come round. A message that nobody received (a call raised on one rank and the others
had sent to it) must be gone by then, so half of the slots is cleaned while the other half
is in use, without making anybody wait who is less than a quarter of them ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.faults import CallError

CODES = 256

#: Persistent plans that a communicator can have at a time, where there are as many tags.
PLANS = 1 << 20


class Tags:
    """The sequence of calls of a communicator and the tags that go with it."""

    def __init__(self, hidden: MPI.Intracomm, wait: Callable[[MPI.Request], None]) -> None:
        """Divide the tags of the hidden duplicate; the same on all ranks.

        ``wait`` has to wait for a request of the MPI while it drives the calls in flight.
        """
        # Open MPI knows it of the world alone.
        upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        half = ((upper if isinstance(upper, int) else 32767) + 1) // 2
        self._hidden = hidden
        self._wait = wait
        # TAG_UB is at least 32767; where it is not much more, codes are done without.
        self._codes = CODES if half >= CODES << 12 else 1
        self.sequence = 0
        self.divide(half // self._codes)
        self.control = half
        self._first_plan = half + 1
        self.allow(min(half - 1, PLANS))
        self._wanted = self._taken = 0  # plans that calls have asked for, and that have tags
        self._agreeing: list[MPI.Request] = []
        self._used = np.zeros(0, np.uint8)
        self._live: set[int] = set()

    def divide(self, slots: int) -> None:
        """Use that many slots, a multiple of four."""
        self._quarter = max(1, slots // 4)
        self._slots = 4 * self._quarter
        self._due = self._quarter  # the call with which the next turn comes
        self._passed: list[MPI.Request] = []  # of each turn; the last may be under way
        self._unfinished: set[int] = set()

    # -- calls ------------------------------------------------------------------------

    def next_sequence(self, complete: Callable[[range], None], plans: bool = False) -> int:
        """Return the number of the next call; every rank comes here for every call.

        ``complete`` has to complete the calls in flight whose numbers it is given. One that
        ``plans`` will take the tag of a plan.
        """
        # No interrupt comes between these two.
        self.sequence += 1
        self._wanted += plans
        self._unfinished.add(self.sequence)
        if self.sequence >= self._due:
            self.catch_up(complete)
        return self.sequence

    def catch_up(self, complete: Callable[[range], None]) -> None:
        """Do the turns that are due: one, and what an interrupt has kept this rank from.

        The others wait for it.
        """
        while self.sequence >= self._quarter * (len(self._passed) + 1):
            self._turn(len(self._passed) + 1, complete)
        self._due = self._quarter * (len(self._passed) + 1)

    def tag(self, sequence: int, code: int) -> int:
        """Return the tag of a call for its messages of one kind; see `code_of`."""
        slot = sequence % self._slots
        return slot if self._codes == 1 else slot * CODES + code

    def finish(self, sequence: int) -> None:
        """Note a call that has received all that it is sent.

        Messages of others to any other call, be it that it raised or that an interrupt kept it
        from its beginning, may never be received.
        """
        self._unfinished.discard(sequence)

    def _turn(self, number: int, complete: Callable[[range], None]) -> None:
        """Do what is due at the beginning of a quarter of the slots."""
        if number % 2:  # the middle of a half: clean the other one
            before = (number - 1) * self._quarter
            complete(range(before - 2 * self._quarter, before))
            self.settle()  # all ranks have left the other half
            for sequence in list(self._unfinished):  # the progress thread takes some away
                if sequence < before:
                    self._clean(sequence)
                    self._unfinished.discard(sequence)
        else:
            self.settle()  # all ranks have cleaned the half that begins
        # Made and noted in the same moment, as by `executor.post`.
        self._passed += map(MPI.Comm.Ibarrier, [self._hidden])

    def settle(self) -> None:
        """Wait until all ranks have done what is due; collective, harmless the second time."""
        if self._passed:
            self._wait(self._passed[-1])

    def sweep(self) -> None:
        """Throw away every message that nobody received, before the end; collective.

        The MPI may give the context to another communicator, which would receive them.
        """
        status = MPI.Status()
        for _ in range(2):  # what was under way at the first barrier is there at the second
            self._wait(self._hidden.Ibarrier())
            while message := self._hidden.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                message.Recv([bytearray(status.count), MPI.BYTE])

    def _clean(self, sequence: int) -> None:
        """Throw away the messages that were sent to a call which did not receive them."""
        status = MPI.Status()
        first = sequence % self._slots * self._codes
        for tag in range(first, first + self._codes):
            while message := self._hidden.Improbe(MPI.ANY_SOURCE, tag, status):
                message.Recv([bytearray(status.count), MPI.BYTE])

    # -- persistent plans ---------------------------------------------------------------

    def allow(self, plans: int) -> None:
        """Let there be that many persistent plans at a time, from the first on."""
        self._plans = plans
        # The plans that are made from a certain one on have these tags in turn.
        self._free: Sequence[int] = range(plans)
        self._from = 0

    @property
    def wanted(self) -> int:
        """The number of the last persistent plan that a call has asked for."""
        return self._wanted

    def take_plan(self, number: int) -> int:
        """Return the tag of the persistent plan with that number; collective, equal on all ranks.

        Those before it that this rank has not taken it leaves: an interrupt has kept it from
        them, or a call was for a plan on other ranks only.
        """
        self._wanted = max(self._wanted, number)
        while self._taken < number:
            if self._taken - self._from >= len(self._free):
                self._agree()
            self._taken += 1
        place = self._free[number - 1 - self._from]
        self._live.add(place)
        return self._first_plan + place

    def give_plan(self, tag: int) -> None:
        """Give the tag of a plan back; local, so the others may still have theirs."""
        self._live.discard(tag - self._first_plan)

    def _agree(self) -> None:
        """Find the tags that no rank has a plan for."""
        if not self._agreeing:  # else an interrupt has come between
            self._used = np.zeros(self._plans, np.uint8)
            self._used[list(self._live)] = 1
            # Not the blocking call: others may wait for what this rank has in flight.
            given = ([self._hidden], [MPI.IN_PLACE], [self._used], [MPI.MAX])
            self._agreeing += map(MPI.Comm.Iallreduce, *given)
        self._wait(self._agreeing[0])
        free = np.flatnonzero(self._used == 0).tolist()
        if not free:
            self._wanted = self._taken
        else:
            self._free, self._from = free, self._taken
        self._agreeing.clear()
        if not free:
            raise CallError(
                MPI.ERR_OTHER,
                f"{self._plans} persistent plans are alive on this communicator, one for each "
                "tag; free some by Request.Free",
            )


@lru_cache(maxsize=4096)
def code_of(*what: object) -> int:
    """Return a number below CODES that tells most calls apart; the same on all ranks."""
    return crc32(repr(what).encode()) % CODES

"""Scratch that is kept between calls, since fresh pages cost more than the copy into them."""

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np

from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.plan import EMPTY

#: The most bytes of scratch that a communicator keeps in all, and pieces of it.
KEPT_BYTES = 64 << 20
KEPT = 8


class Scratch:
    """Memory for the calls of one communicator, on any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._spare: deque[Bytes] = deque()

    def __len__(self) -> int:
        return len(self._spare)

    def take(self, nbytes: int) -> Bytes:
        """Return at least ``nbytes`` that nobody else uses."""
        if nbytes == 0:
            return EMPTY
        # Taken away while in use: other calls may be in flight, and a user operator may
        # call a collective of its own.
        spare = self._spare
        for _ in range(len(spare)):
            try:
                work = spare.popleft()
            except IndexError:  # another thread was faster
                break
            if work.size >= nbytes:
                return work
            spare.append(work)
        return np.empty(nbytes, np.uint8)

    def give(self, work: Bytes) -> None:
        """Take memory back; the oldest goes when there is too much."""
        if 0 < work.size <= KEPT_BYTES:
            self._spare.append(work)
            if len(self._spare) > 1:
                self._trim()

    def _trim(self) -> None:
        spare = self._spare
        with contextlib.suppress(IndexError):
            while len(spare) > KEPT or sum([one.size for one in list(spare)]) > KEPT_BYTES:
                spare.popleft()

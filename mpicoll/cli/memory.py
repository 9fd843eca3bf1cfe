"""Where the buffers of what is timed lie, and how a call on them is timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

POISON = 0x5A  #: every byte of a result before a checked call


class Memory(Protocol):
    """A kind of memory. What it returns is done: nothing that it has queued goes on."""

    #: The communicators that it is for: their memory= hint.
    name: str
    #: How a call on it is timed, "" where nothing has to be said.
    policy: str
    #: Whether every rank's MPI takes addresses of it.
    addressed: bool

    @property
    def words(self) -> str:
        """What it is, for the head of a table; "" for what is usual."""

    def put(self, array: Array) -> Any:
        """Return an array of this memory with the data of one of the host."""

    def fetch(self, held: Any) -> Array:
        """Return an array of the host with the data of one of this memory."""

    def poison(self, held: Any) -> None:
        """Fill an array with what no call leaves."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array to another of the same shape; it may go on after the return."""

    def message(self, held: Any) -> Any:
        """Return an array as a plain message of MPI takes it."""

    def timed(self, call: Callable[[], object]) -> float:
        """Call, and return the seconds until all of it is done."""


class Host:
    """Memory of the host: NumPy's arrays, as they are. Calls are timed by the clock."""

    name = "host"
    policy = ""
    addressed = True
    words = ""

    def put(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def fetch(self, held: Array) -> Array:
        """Return the array itself."""
        return held

    def poison(self, held: Array) -> None:
        """Fill it."""
        held.view(np.uint8)[...] = POISON

    def copy(self, target: Array, source: Array) -> None:
        """Copy it."""
        np.copyto(target, source)

    def message(self, held: Array) -> Array:
        """Return the array itself."""
        return held

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds from the call to its return, which is when it is done."""
        start = perf_counter()
        call()
        return perf_counter() - start


HOST = Host()

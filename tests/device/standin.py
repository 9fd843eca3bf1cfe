"""A module that stands in for CuPy where the command line measures: its arrays are deferred.

It has as much of CuPy as mpicoll/cli/cuda.py uses, in CuPy's words. What CuPy queues is queued
on the deferred device, what CuPy waits for is waited for.
"""

from __future__ import annotations

from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from deferred import BACKEND, Array, empty, fill, host


class ndarray(Array):
    """A dense array of one dimension."""

    @property
    def size(self) -> int:
        """Its items."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def data(self) -> Any:
        """Where it lies."""
        return SimpleNamespace(ptr=self.address)

    def view(self, dtype: Any) -> ndarray:
        """Return the same bytes as items of another type."""
        items = self.nbytes // np.dtype(dtype).itemsize
        return ndarray(self.address, (items,), dtype, owner=self.base)

    def fill(self, value: int) -> None:
        """Queue a fill."""
        fill(self, np.full(self.shape, value, self.dtype))

    def get(self) -> Any:
        """Return a copy on the host, once it is there."""
        return host(self)


class Stream:
    """A stream of the device."""

    def __init__(self, non_blocking: bool) -> None:
        """Begin with nothing queued."""
        assert non_blocking
        current = BACKEND.stream
        self.queue = BACKEND.new_stream()
        BACKEND.stream = current

    def use(self) -> None:
        """Become the current one."""
        BACKEND.stream = self.queue

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        BACKEND.over(BACKEND.record(self.queue), True)


class Event:
    """An event that knows when it was reached."""

    def record(self, stream: Stream) -> None:
        """Take the place behind what is queued."""
        BACKEND._add(stream.queue, self._reach)
        self.place = BACKEND.record(stream.queue)

    def _reach(self) -> None:
        self.seconds = perf_counter()

    def synchronize(self) -> None:
        """Wait until it is reached."""
        BACKEND.over(self.place, True)


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for a fault of the runtime."""


def asarray(given: Any) -> ndarray:
    """Return an array that a copy is queued to."""
    raw = empty(given.shape, given.dtype)
    made = ndarray(raw.address, raw.shape, raw.dtype, owner=raw.base)
    fill(made, given)
    return made


def copyto(target: ndarray, source: ndarray) -> None:
    """Queue a copy."""
    BACKEND.copy(target.address, source.address, source.nbytes, BACKEND.stream)


def module(devices: int = 1) -> ModuleType:
    """Return the module, on a machine with so many devices."""
    made: Any = ModuleType("cupy")
    made.asarray, made.copyto, made.ndarray = asarray, copyto, ndarray
    made.cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(use=lambda: None),
        Event=Event,
        Stream=Stream,
        get_elapsed_time=lambda begin, end: 1e3 * (end.seconds - begin.seconds),
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda number: {"name": b"Deferred device"},
        ),
    )
    return made

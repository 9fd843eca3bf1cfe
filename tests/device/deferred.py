"""A device that is host memory, whose work is done no earlier than it must, or no later.

What is queued on a stream runs when somebody waits for it, so whoever does not wait sees
what the memory held before: poison, where nothing has written to it yet. `Policy` says what
else runs: nothing, what is on the streams of copies up, or anything by chance.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.runtime import device_kernels
from mpicoll.runtime.backend import NOWHERE, Kernel, Layout

Bytes: TypeAlias = npt.NDArray[np.uint8]
Policy: TypeAlias = Literal["late", "up early", "by chance"]
POLICIES: tuple[Policy, ...] = ("late", "up early", "by chance")

POISON = 0x5A


def at(address: int, nbytes: int) -> Bytes:
    """Return the bytes at an address."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else bytearray()
    return np.frombuffer(memory, np.uint8)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array."""
    return int(array.__array_interface__["data"][0])


class Event:
    """A place in the work of a stream."""

    def __init__(self, stream: Stream) -> None:
        """Take the place behind all that is queued."""
        self.stream, self.place, self.asked = stream, stream.queued, 0

    @property
    def over(self) -> bool:
        """Whether all before it is done."""
        return self.stream.done >= self.place


class Stream:
    """Work in order; an event among it is waited for."""

    def __init__(self, early: bool = False) -> None:
        """Begin with nothing."""
        self.early = early
        self.queued = self.done = 0
        self._work: deque[Callable[[], None] | Event] = deque()

    def add(self, work: Callable[[], None] | Event) -> None:
        """Queue a call, or a wait."""
        self._work.append(work)
        self.queued += 1

    def blocked(self) -> bool:
        """Whether there is nothing to do now."""
        return not self._work or (isinstance(self._work[0], Event) and not self._work[0].over)

    def step(self) -> None:
        """Do what is next, and before it what it waits for."""
        work = self._work.popleft()
        if isinstance(work, Event):
            work.stream.reach(work.place)
        else:
            work()
        self.done += 1

    def reach(self, place: int) -> None:
        """Do all work before a place."""
        while self.done < place:
            self.step()


class Deferred:
    """The backend; `register` it for `Array`.

    ``takes_pointers`` is what it says of the MPI, which does take them: they are of the host.
    """

    def __init__(self) -> None:
        """Begin with one stream, the current one."""
        self.takes_pointers = True
        self.policy: Policy = "late"
        self.stream = Stream()
        self.folds = self.copies = 0
        self.alive: list[Bytes] = []  # what is freed too early still shows as a wrong result
        self._streams: list[Stream] = [self.stream]
        self._chance = random.Random(1)

    def use(self, policy: Policy, pointers: bool) -> None:
        """Begin a test; what was left queued is never done."""
        self._streams.clear()
        self.alive.clear()
        self.new_stream()
        self.policy, self.takes_pointers = policy, pointers
        self.folds = self.copies = 0

    def new_stream(self) -> Stream:
        """Make a stream and make it the current one, as a caller does."""
        self.stream = Stream()
        self._streams.append(self.stream)
        return self.stream

    # -- the protocol -----------------------------------------------------------------

    def current(self, owner: object, device: int) -> Stream:
        """Return the stream that a caller's work is queued on."""
        return self.stream

    def streams(self, device: int) -> tuple[Stream, Stream]:
        """Return two new ones."""
        made = Stream(), Stream(early=True)
        self._streams += made
        return made

    def allocate(self, nbytes: int, stream: Stream) -> tuple[int, object]:
        """Return poison."""
        memory = self.poison(nbytes)
        return address_of(memory), memory

    def pinned(self, nbytes: int) -> Bytes:
        """Return poison."""
        return self.poison(nbytes)

    def poison(self, nbytes: int) -> Bytes:
        """Return memory that nothing was written to."""
        self.alive.append(np.full(nbytes, POISON, np.uint8))
        return self.alive[-1]

    def record(self, stream: Stream) -> Event:
        """Return an event behind all that is queued."""
        return Event(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Queue a wait."""
        self._add(stream, event)

    def over(self, event: Event, wait: bool) -> bool:
        """Run what is before an event; who only asks has to ask twice."""
        event.asked += 1
        if wait or event.asked > 1:
            event.stream.reach(event.place)
            self._pump()
        return event.over

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy."""

        def copy() -> None:
            at(target, nbytes)[:] = at(source, nbytes)

        self.copies += 1
        self._add(stream, copy)

    def gather(self, target: int, source: int, layout: Layout, count: int, stream: Stream) -> None:
        """Queue a copy out of items with gaps."""

        def gather() -> None:
            here, known = self._places(layout, count)
            dense = at(target, known.size)
            dense[:] = 0
            if here.size:
                dense[known] = at(source + int(here.min()), int(np.ptp(here)) + 1)[
                    here - here.min()
                ]

        self._add(stream, gather)

    def scatter(
        self, target: int, source: int, layout: Layout, count: int, stream: Stream
    ) -> None:
        """Queue a copy into items with gaps."""

        def scatter() -> None:
            here, known = self._places(layout, count)
            if here.size:
                memory = at(target + int(here.min()), int(np.ptp(here)) + 1)
                memory[here - here.min()] = at(source, known.size)[known]

        self._add(stream, scatter)

    @staticmethod
    def _places(layout: Layout, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return where the bytes of items lie, and which bytes lie anywhere."""
        known = np.tile(layout.positions != NOWHERE, count)
        every = np.add.outer(np.arange(count) * layout.extent, layout.positions).reshape(-1)
        return every[known], known

    def kernel(self, reduction: Any) -> Kernel | None:
        """Return what the real device has a kernel for."""
        if reduction.loop is None or not device_kernels.supported(*reduction.loop):
            return None
        return Kernel(*reduction.loop, reduction.mean_of, reduction)

    def fold(
        self, kernel: Kernel, target: int, operands: Sequence[int], nbytes: int, stream: Stream
    ) -> None:
        """Queue the host's own fold."""

        def fold() -> None:
            views = [at(one, nbytes) for one in operands]
            kernel.host.reduce(at(target, nbytes), views)

        self.folds += 1
        self._add(stream, fold)

    def divide(self, kernel: Kernel, target: int, nbytes: int, size: int, stream: Stream) -> None:
        """Queue the host's own division."""

        def divide() -> None:
            assert kernel.host.finish is not None
            kernel.host.finish(at(target, nbytes), size)

        self._add(stream, divide)

    def direct(self) -> bool:
        """Return what the test wants."""
        return self.takes_pointers

    # -- when it runs -----------------------------------------------------------------

    def _add(self, stream: Stream, work: Callable[[], None] | Event) -> None:
        stream.add(work)
        self._pump()

    def _pump(self) -> None:
        """Run what the policy has run early."""
        if self.policy == "late":
            return
        if self.policy == "by chance":
            for _ in range(self._chance.randrange(3)):
                stream = self._chance.choice(self._streams)
                if not stream.blocked():
                    stream.step()
            return
        for stream in self._streams:
            while stream.early and not stream.blocked():
                stream.step()


BACKEND = Deferred()


class Array:
    """A device array over a part of poisoned memory, with as much as a caller shows."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        *,
        readonly: bool = False,
        owner: object = None,
        device: int = 0,
    ) -> None:
        """Join the parts."""
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.strides, self.readonly = strides, readonly
        self.base, self.device = owner, device

    @property
    def ndim(self) -> int:
        """Its dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes, when it is dense."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.readonly),
            "strides": self.strides,
            "version": 3,
        }


def array(host: npt.ArrayLike, device: int = 0) -> Array:
    """Return a device array that a copy from ``host`` is queued for, on the current stream."""
    given = np.ascontiguousarray(host)
    made = empty(np.shape(host), given.dtype, device)
    fill(made, given)
    return made


def empty(shape: tuple[int, ...], dtype: Any, device: int = 0) -> Array:
    """Return a device array of poison."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = BACKEND.poison(nbytes)
    return Array(address_of(memory), shape, dtype, owner=memory, device=device)


def fill(made: Array, host: npt.NDArray[Any]) -> None:
    """Queue a copy to a dense device array on the current stream."""
    data = host.reshape(-1).view(np.uint8).copy()
    BACKEND._add(BACKEND.stream, lambda: _store(made, data))


def _store(made: Array, data: Bytes) -> None:
    at(made.address, made.nbytes)[:] = data


def host(made: Array) -> npt.NDArray[Any]:
    """Return what a copy on the current stream finds in a dense device array."""
    found = np.empty(made.nbytes, np.uint8)

    def load() -> None:
        found[:] = at(made.address, made.nbytes)

    BACKEND._add(BACKEND.stream, load)
    BACKEND.over(BACKEND.record(BACKEND.stream), True)
    return found.view(made.dtype).reshape(made.shape)

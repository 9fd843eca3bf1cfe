"""Devices that are host memory, whose work is done no earlier than it must, or no later.

What is queued on a stream runs when somebody waits for it, so whoever does not wait sees
what the memory held before: poison, where nothing has written to it yet. `Policy` says what
else runs: nothing, what is on the streams of copies up, or anything by chance.

Each device has streams and memory of its own, and no stream touches the memory of another
device than its own. Each thread has a current device, and a current stream on each.
"""

from __future__ import annotations

import ctypes
import random
import threading
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

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

    def __init__(self, early: bool = False, device: int = 0) -> None:
        """Begin with nothing."""
        self.early, self.device = early, device
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


class Scratch:
    """Who owns memory that was allocated; once it is gone, work on that memory is lost."""

    def __init__(self, start: int, given_back: set[int]) -> None:
        """Own what begins at an address."""
        self._start, self._given_back = start, given_back

    def __del__(self) -> None:
        self._given_back.add(self._start)


class PerThread(NamedTuple):
    """The default stream of whoever asks, as CUDA's handle 2: each thread has its own."""

    device: int


class Deferred:
    """The backend; `register` it for `Array`.

    ``takes_pointers`` is what it says of the MPI, which does take them: they are of the host.
    """

    def __init__(self) -> None:
        """Begin with one stream, the current one."""
        self.alive: list[Bytes] = []  # what is freed too early still shows as a wrong result
        self._streams: list[Stream] = []
        self._chance = random.Random(1)
        self._lock = threading.RLock()
        self.use("late", True)

    def use(self, policy: Policy, pointers: bool) -> None:
        """Begin a test; what was left queued is never done."""
        self._streams.clear()
        self.alive.clear()
        self._areas: list[tuple[int, int, int]] = []  # memory of devices: start, stop, device
        self._given_back: set[int] = set()  # where such memory begins that has no owner any more
        self._on: dict[int, int] = {}  # by thread the current device
        self._current: dict[tuple[int, int], Stream | PerThread] = {}  # by thread and device
        self._defaults: dict[tuple[int, int], Stream] = {}  # as well; thread 0 is all of them
        self.new_stream()
        self.policy, self.takes_pointers = policy, pointers
        self.folds = self.copies = 0

    def new_stream(self, device: int | None = None) -> Stream:
        """Make a stream the current one of a device, or of the current one; as a caller does."""
        made = Stream(device=self.device if device is None else device)
        self._streams.append(made)
        self._current[threading.get_ident(), made.device] = made
        return made

    def per_thread(self, device: int = 0) -> None:
        """Let the per-thread default stream be the current one of this thread."""
        self._current[threading.get_ident(), device] = PerThread(device)

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return self._on.get(threading.get_ident(), 0)

    @device.setter
    def device(self, number: int) -> None:
        self._on[threading.get_ident()] = number

    @property
    def stream(self) -> Stream:
        """The current stream of this thread on its current device."""
        return self._stream(self.current(None, self.device))

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._current[threading.get_ident(), stream.device] = stream

    def _default(self, thread: int, device: int) -> Stream:
        if (thread, device) not in self._defaults:
            self._defaults[thread, device] = Stream(device=device)
            self._streams.append(self._defaults[thread, device])
        return self._defaults[thread, device]

    def _stream(self, named: Stream | PerThread) -> Stream:
        """Return what this thread means by a stream."""
        if isinstance(named, Stream):
            return named
        return self._default(threading.get_ident(), named.device)

    # -- the protocol -----------------------------------------------------------------

    def current(self, owner: object, device: int) -> Stream | PerThread:
        """Return the stream that this thread's work is queued on."""
        found = self._current.get((threading.get_ident(), device))
        return self._default(0, device) if found is None else found

    def streams(self, device: int) -> tuple[Stream, Stream]:
        """Return two new ones."""
        made = Stream(device=device), Stream(early=True, device=device)
        self._streams += made
        return made

    def allocate(self, nbytes: int, stream: Stream) -> tuple[int, object]:
        """Return poison on the device of a stream."""
        start = address_of(self.poison(nbytes, stream.device))
        return start, Scratch(start, self._given_back)

    def pinned(self, nbytes: int) -> Bytes:
        """Return poison of the host."""
        return self.poison(nbytes)

    def poison(self, nbytes: int, device: int | None = None) -> Bytes:
        """Return memory that nothing was written to; of no known device by default."""
        made = np.full(nbytes, POISON, np.uint8)
        with self._lock:
            self.alive.append(made)
            if device is not None and nbytes:
                insort(self._areas, (address_of(made), address_of(made) + nbytes, device))
        return made

    def device_of(self, address: int) -> int:
        """Return the device of an address, as the driver knows it."""
        return (self._area(address) or (0, 0))[1]

    def _area(self, address: int) -> tuple[int, int] | None:
        """Return where memory begins, and its device; None for the host's and unknown memory."""
        number = bisect(self._areas, (address + 1,)) - 1
        start, stop, device = self._areas[number] if number >= 0 else (0, 0, 0)
        return (start, device) if start <= address < stop else None

    def record(self, stream: Stream | PerThread) -> Event:
        """Return an event behind all that is queued."""
        return Event(self._stream(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        """Queue a wait."""
        self._add(stream, event)

    def over(self, event: Event, wait: bool) -> bool:
        """Run what is before an event; who only asks has to ask twice."""
        with self._lock:
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
        self._add(stream, copy, target, source)

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

        self._add(stream, gather, target, source)

    def scatter(
        self, target: int, source: int, layout: Layout, count: int, stream: Stream
    ) -> None:
        """Queue a copy into items with gaps."""

        def scatter() -> None:
            here, known = self._places(layout, count)
            if here.size:
                memory = at(target + int(here.min()), int(np.ptp(here)) + 1)
                memory[here - here.min()] = at(source, known.size)[known]

        self._add(stream, scatter, target, source)

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
        self._add(stream, fold, target, *operands)

    def divide(self, kernel: Kernel, target: int, nbytes: int, size: int, stream: Stream) -> None:
        """Queue the host's own division."""

        def divide() -> None:
            assert kernel.host.finish is not None
            kernel.host.finish(at(target, nbytes), size)

        self._add(stream, divide, target)

    def direct(self) -> bool:
        """Return what the test wants."""
        return self.takes_pointers

    # -- when it runs -----------------------------------------------------------------

    def _add(
        self, stream: Stream | PerThread, work: Callable[[], None] | Event, *addresses: int
    ) -> None:
        """Queue work that touches what is at some addresses."""
        queue = self._stream(stream)
        areas = [area for address in addresses if (area := self._area(address)) is not None]
        for _, device in areas:
            if device != queue.device:
                raise RuntimeError(f"memory of device {device} on a stream of {queue.device}")

        def owned() -> None:
            if self._given_back.isdisjoint([start for start, _ in areas]):
                work()  # type: ignore[operator]

        with self._lock:
            queue.add(work if isinstance(work, Event) else owned)
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
    """Return a device array that a copy from ``host`` is queued for, on its current stream."""
    given = np.ascontiguousarray(host)
    made = empty(np.shape(host), given.dtype, device)
    fill(made, given)
    return made


def empty(shape: tuple[int, ...], dtype: Any, device: int = 0) -> Array:
    """Return a device array of poison."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = BACKEND.poison(nbytes, device)
    return Array(address_of(memory), shape, dtype, owner=memory, device=device)


def fill(made: Array, host: npt.NDArray[Any]) -> None:
    """Queue a copy to a dense device array on the current stream there."""
    data = host.reshape(-1).view(np.uint8).copy()
    BACKEND._add(BACKEND.current(made, made.device), lambda: _store(made, data), made.address)


def _store(made: Array, data: Bytes) -> None:
    at(made.address, made.nbytes)[:] = data


def host(made: Array) -> npt.NDArray[Any]:
    """Return what a copy on the current stream finds in a dense device array."""
    found = np.empty(made.nbytes, np.uint8)

    def load() -> None:
        found[:] = at(made.address, made.nbytes)

    stream = BACKEND.current(made, made.device)
    BACKEND._add(stream, load, made.address)
    BACKEND.over(BACKEND.record(stream), True)
    return found.view(made.dtype).reshape(made.shape)

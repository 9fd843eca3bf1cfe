"""Device memory as the collectives see it: bytes, streams of a call, pinned host memory.

No word of a vendor is in here: what a device does is asked of a `Backend`. The one for
CuPy is in device.py; the tests have one whose device is host memory.

Every place where host, device and MPI are brought into order is a method marked with
`synchronises`; `SITES` lists them. The tests take each away in turn and see a result go
wrong.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpicoll.runtime.backend import Backend, Event, Kernel, Stream, layout_of
from mpicoll.runtime.datatypes import DType

if TYPE_CHECKING:
    from mpicoll.runtime.buffers import Buffer, Piece
    from mpicoll.runtime.executor import Bytes
    from mpicoll.selection.settings import Settings

_F = TypeVar("_F", bound=Callable[..., Any])

#: Calls of at most so many bytes on this rank go through the host as a whole: two short
#: copies cost less than a kernel and a synchronisation per step. Set by hand, for where the
#: tuning table has no crossover, and for where device memory is staged message by message.
SMALL_BYTES = 32 << 10

#: Pinned memory kept for reuse; beyond it a copy waits for an earlier one to end.
PINNED_BYTES = 256 << 20

#: Operands of one fused kernel; the folds of more ranks go through the host.
MOST_OPERANDS = 256

#: Whether this process has been handed device memory yet.
MET = False

#: The methods that order host, device and MPI, by name.
SITES: dict[str, Callable[..., Any]] = {}


def synchronises(method: _F) -> _F:
    """Put a method on the list of synchronisation sites."""
    SITES[method.__qualname__] = method
    return method


# -- pinned memory --------------------------------------------------------------------------


@dataclass(slots=True)
class Segment:
    """Pinned memory, or where there is none to be had other; ``event`` is what uses it still."""

    memory: Bytes
    event: Event | None = None
    pinned: bool = True


@dataclass(slots=True)
class Pool:
    """Pinned memory of one backend, in sizes that are powers of two."""

    backend: Backend
    held: int = 0
    _free: dict[int, deque[Segment]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> Segment:
        """Return a segment of at least ``nbytes`` that nobody reads."""
        size = max(4096, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            known = self._kept(size)
            if known is None:
                self.held += size
        if known is not None and known.pinned:
            return known
        try:
            return Segment(self.backend.pinned(size))  # also in place of one that is not
        except Exception:  # the messages have to go on
            return known or Segment(np.empty(size, np.uint8), pinned=False)

    def spare(self, nbytes: int) -> Segment | None:
        """Return a segment as `take` does, but None where that would wait, or be one too many."""
        size = max(4096, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            if self.held + size > PINNED_BYTES:
                return self._kept(size, wait=False)
        return self.take(nbytes)

    def _kept(self, size: int, wait: bool = True) -> Segment | None:
        """Return a segment that nobody reads any more, None if there is none."""
        free = self._free.setdefault(size, deque())
        for _ in range(len(free)):
            segment = free.popleft()
            try:
                full = wait and self.held + size > PINNED_BYTES
                usable = self.reusable(segment, wait=full)
            except Exception:
                self.held -= size  # nobody knows any more what the device does with it
                continue
            if usable:
                segment.event = None
                return segment
            free.append(segment)
        return None

    def give(self, segment: Segment, event: Event | None = None) -> None:
        """Take a segment back, which ``event`` may still have to do with."""
        segment.event = event
        with self._lock:
            if self.held > PINNED_BYTES and event is None:
                self.held -= segment.memory.size
            else:
                self._free.setdefault(segment.memory.size, deque()).append(segment)

    @synchronises
    def reusable(self, segment: Segment, wait: bool) -> bool:
        """Return whether the copy out of a segment or into it is over."""
        return segment.event is None or self.backend.over(segment.event, wait)


_POOLS: dict[int, Pool] = {}


def pool_of(backend: Backend) -> Pool:
    """Return the pool of a backend."""
    return _POOLS.setdefault(id(backend), Pool(backend))


# -- bytes on a device ----------------------------------------------------------------------


class Flags(NamedTuple):
    """As much of NumPy's flags as is asked for."""

    writeable: bool


class Region:
    """Bytes on a device, used as an array of bytes is: length, slices, copies into slices.

    Copies are queued on the lane of the call.
    """

    __slots__ = ("_owner", "address", "flags", "lane", "size")

    def __init__(
        self, lane: Lane, address: int, size: int, owner: object, readonly: bool = False
    ) -> None:
        """Join the parts; ``owner`` keeps the memory alive."""
        self.lane = lane
        self.address = address
        self.size = size
        self.flags = Flags(not readonly)
        self._owner = owner

    def __getitem__(self, piece: slice) -> Region:
        start, stop, _ = piece.indices(self.size)
        return Region(self.lane, self.address + start, max(0, stop - start), self._owner)

    def __setitem__(self, piece: slice, source: Region | Bytes) -> None:
        start, stop, _ = piece.indices(self.size)
        if stop > start:
            self.lane.copy(self.address + start, place(source), stop - start)


def place(memory: Region | Bytes) -> int:
    """Return the address of bytes on the device or of pinned ones."""
    return memory.address if isinstance(memory, Region) else MPI.Get_address(cast(Any, memory))


class Lane:
    """What one call does on its device, in order.

    ``main`` takes the copies down and within the device and the folds, ``up`` the copies
    up: a segment that arrives is copied up while another is folded and the next sent. All of
    it comes after what the caller had queued, and is done before the call is.

    ``hosted`` says that the whole call goes through the host: its data is copied down
    before, and the result up after it. Else MPI is handed memory step by step.
    """

    def __init__(self, backend: Backend, device: int, owner: object) -> None:
        """Begin with what the caller has queued; ``owner`` is its array."""
        self.backend = backend
        self.device = device
        self.hosted = False
        self.pool = pool_of(backend)
        self._owner = owner
        self._called: Event | Exception | None = None  # what the caller had queued, or a fault
        self._streams: tuple[Stream, Stream] | None = None
        self._queued = False  # whether main has work that nobody has seen the end of
        self._mark: Event | None = None  # the end of that work, once it was asked for
        self._before: Event | None = None  # the work before the present step
        self._arrivals: list[tuple[int, int, Event]] = []  # copies up that main knows not
        self._segments: list[Segment] = []
        self._kept: list[object] = []  # scratch that queued work still uses
        self.again()

    @property
    def main(self) -> Stream:
        """The stream of folds and of copies down."""
        return self._both()[0]

    def _both(self) -> tuple[Stream, Stream]:
        self._streams = self._streams or _take_streams(self.backend, self.device)
        return self._streams

    # -- memory -----------------------------------------------------------------------

    def region(self, address: int, size: int, owner: object, readonly: bool = False) -> Region:
        """Return bytes of the caller's."""
        return Region(self, address, size, owner, readonly)

    def scratch(self, size: int) -> Region | Bytes:
        """Return bytes of our own; in a hosted call pinned ones."""
        if not self.hosted:
            address, owner = self.backend.allocate(size, self.main) if size else (0, None)
            return Region(self, address, size, owner)
        self._segments.append(self.pool.take(size))
        return self._segments[-1].memory[:size]

    def keep(self, owner: object) -> None:
        """Keep scratch until what is queued is done."""
        self._kept.append(owner)

    # -- work -------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy to or from device memory."""
        self.after_arrivals((target, source), nbytes)
        self.backend.copy(target, source, nbytes, self.main)
        self._has_work()

    def fold(self, kernel: Kernel, target: Region, operands: Sequence[Region]) -> None:
        """Queue a fold."""
        places = [one.address for one in operands]
        self.after_arrivals((target.address, *places), target.size)
        self.backend.fold(kernel, target.address, places, target.size, self.main)
        self._has_work()

    def divide(self, kernel: Kernel, target: Region, size: int) -> None:
        """Queue the division of AVG."""
        self.after_arrivals((target.address,), target.size)
        self.backend.divide(kernel, target.address, target.size, size, self.main)
        self._has_work()

    def down(self, segment: Segment, source: Region) -> Event:
        """Queue a copy to the host, and return its event."""
        with self._until_close(segment):
            self.copy(place(segment.memory), source.address, source.size)
            return self.backend.record(self.main)

    def up(self, target: Region, segment: Segment) -> None:
        """Queue the copy of what has arrived, and give the segment back after it."""
        with self._until_close(segment):
            stream = self._both()[1]
            self.up_after_main(stream)
            self.backend.copy(target.address, place(segment.memory), target.size, stream)
            event = self.backend.record(stream)
        self._arrivals.append((target.address, target.address + target.size, event))
        self.pool.give(segment, event)

    @contextmanager
    def _until_close(self, segment: Segment) -> Iterator[None]:
        """Keep a segment until the end of the call, if its copy can not be queued as a whole."""
        try:
            yield
        except BaseException:
            self._segments.append(segment)
            raise

    def _has_work(self) -> None:
        self._queued, self._mark = True, None

    # -- order ------------------------------------------------------------------------

    @synchronises
    def again(self) -> None:
        """Note what the caller has queued on its current stream; for each run of a plan.

        On the caller's thread: others have other current streams, and `enter` may be theirs.
        """
        try:
            self._called = self.backend.record(self.backend.current(self._owner, self.device))
        except Exception as error:
            self._called = error  # for `enter`: until then there is no run that could fail

    @synchronises
    def enter(self) -> None:
        """Let all that is queued from now on come after what the caller has queued."""
        if isinstance(self._called, Exception):
            raise self._called
        if self._called is not None:
            self.backend.wait(self.main, self._called)  # copies up wait for main, by `step`
        self._has_work()  # MPI may not touch the buffers before the caller's work is done

    @synchronises
    def loaded(self, wait: bool) -> bool:
        """Return whether the data of a hosted call is on the host."""
        return self._settled(wait)

    @synchronises
    def ready(self, wait: bool) -> bool:
        """Return whether MPI may be handed device memory: all that was queued is done."""
        return self._settled(wait)

    @synchronises
    def is_down(self, event: Event, wait: bool) -> bool:
        """Return whether a copy to the host is over, so that it can be sent."""
        return self.backend.over(event, wait)

    @synchronises
    def step(self) -> None:
        """Note what the copies up of this step have to come after."""
        self._before = self.backend.record(self.main)

    @synchronises
    def up_after_main(self, stream: Stream) -> None:
        """Let copies up wait until nobody reads any more what they overwrite."""
        if self._before is not None:
            self.backend.wait(stream, self._before)
            self._before = None

    @synchronises
    def after_arrivals(self, starts: Sequence[int], nbytes: int) -> None:
        """Let ``main`` wait for copies up to what it touches next."""
        for number in range(len(self._arrivals) - 1, -1, -1):
            low, high, event = self._arrivals[number]
            if any(start < high and low < start + nbytes for start in starts):
                self.backend.wait(self.main, event)
                del self._arrivals[: number + 1]  # they are in order on their stream
                return

    @synchronises
    def left(self, wait: bool) -> bool:
        """Return whether all that the call has queued is done, on both streams."""
        if self._arrivals:
            self.backend.wait(self.main, self._arrivals[-1][2])
            self._arrivals.clear()
            self._has_work()
        return self._settled(wait)

    def _settled(self, wait: bool) -> bool:
        if self._queued:
            if self._mark is None:
                self._mark = self.backend.record(self.main)
            if not self.backend.over(self._mark, wait):
                return False
            self._queued, self._mark = False, None
        self._kept.clear()
        return True

    def close(self) -> None:
        """Give back what the call had; what it has queued is done first."""
        try:
            if self._streams is not None:
                Lane.left(self, wait=True)
                _give_streams(self.backend, self.device, self._streams)
        finally:
            self._streams = None
            while self._segments:
                self.pool.give(self._segments.pop())


_STREAMS: dict[tuple[int, int], list[tuple[Stream, Stream]]] = {}


def _take_streams(backend: Backend, device: int) -> tuple[Stream, Stream]:
    kept = _STREAMS.setdefault((id(backend), device), [])
    try:
        return kept.pop()
    except IndexError:
        return backend.streams(device)


def _give_streams(backend: Backend, device: int, streams: tuple[Stream, Stream]) -> None:
    _STREAMS[id(backend), device].append(streams)


# -- the caller's memory --------------------------------------------------------------------


class DeviceMemory:
    """Device memory of the caller's; to `Buffer` what `Memory` is on the host."""

    __slots__ = ("address", "backend", "device", "dtype", "lane", "length", "owner", "readonly")

    def __init__(
        self,
        backend: Backend,
        device: int,
        owner: object,
        address: int,
        length: int,
        readonly: bool,
        dtype: DType | None,
    ) -> None:
        """Join the parts; ``dtype`` None is one that NumPy has not."""
        self.backend = backend
        self.device = device
        self.owner = owner
        self.address = address
        self.length: int | None = length
        self.readonly = readonly
        self.dtype = dtype
        self.lane: Lane | None = None

    def view(self, start: int, nbytes: int) -> Region | None:
        """Return bytes as they lie; None in a hosted call, which has to copy them."""
        assert self.lane is not None
        if self.lane.hosted:
            return None
        return self.lane.region(self.address + start, nbytes, self.owner, self.readonly)

    def scratch(self, nbytes: int) -> Region | Bytes:
        """Return memory for packed data."""
        assert self.lane is not None
        return self.lane.scratch(nbytes)

    def belongs(self, low: int, high: int) -> bool:
        """Whether bytes may lie in the array that this is a part of; nobody knows its size."""
        return getattr(self.owner, "base", None) is not None

    def pack(self, piece: Piece, packed: Region | Bytes) -> None:
        """Copy the items of ``piece`` to dense bytes."""
        self._move(piece, packed, down=True)

    def unpack(self, piece: Piece, packed: Region | Bytes) -> None:
        """Copy dense bytes to the items of ``piece``, and touch nothing else."""
        self._move(piece, packed, down=False)

    def _move(self, piece: Piece, packed: Region | Bytes, down: bool) -> None:
        lane, nbytes = self.lane, piece.nbytes
        assert lane is not None
        if not nbytes:
            return
        here = self.address + piece.start
        if piece.item.dense:
            ends = (place(packed), here) if down else (here, place(packed))
            lane.copy(*ends, nbytes)
            return
        layout = layout_of(piece.item)
        owner: object = packed
        dense = place(packed)
        if lane.hosted:  # to and from places on the device, then as a whole
            dense, owner = lane.backend.allocate(nbytes, lane.main)
        if not down:
            lane.after_arrivals((dense,), nbytes)
            if lane.hosted:
                lane.copy(dense, place(packed), nbytes)
            lane.backend.scatter(here, dense, layout, piece.total, lane.main)
        else:
            lane.backend.gather(dense, here, layout, piece.total, lane.main)
            if lane.hosted:
                lane.copy(place(packed), dense, nbytes)
        lane._has_work()
        lane.keep(owner)


def takes_pointers(backend: Backend, settings: Settings) -> bool:
    """Return whether MPI is handed device pointers: as it was set, else as it is found out."""
    return backend.direct() if settings.cuda_aware is None else settings.cuda_aware


def _short(nbytes: int, backend: Backend, settings: Settings, ranks: int) -> bool:
    """Whether a call of so many bytes on this rank goes through the host as a whole."""
    tuned = None if settings.tuning is None else settings.tuning.crossover(ranks)
    by_hand = nbytes <= SMALL_BYTES
    if tuned is None or (nbytes <= tuned) == by_hand:
        return by_hand
    # Asked only where it matters, since to find out may take a trial.
    return nbytes <= tuned if takes_pointers(backend, settings) else by_hand


def lane_of(buffers: Sequence[Buffer | None], settings: Settings, ranks: int) -> Lane | None:
    """Return the lane of a call on ``ranks`` ranks, None where no buffer is on a device.

    A call goes through the host when it is short, and when its other buffer is there.
    """
    given = [one for one in buffers if one is not None]
    memories = [one.device for one in given if one.device is not None]
    if not memories:
        return None
    first = memories[0]
    for other in memories[1:]:
        if (other.backend, other.device) != (first.backend, first.device):
            raise ValueError(
                f"send buffer on device {first.device} and receive buffer on device "
                f"{other.device}; the buffers of one rank's call have to be on one device"
            )
    lane = Lane(first.backend, first.device, first.owner)
    for memory in memories:
        memory.lane = lane
    on_host = any(one.device is None and one.nbytes for one in given)
    nbytes = sum(one.nbytes for one in given)
    lane.hosted = on_host or _short(nbytes, lane.backend, settings, ranks)
    return lane

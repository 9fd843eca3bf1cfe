"""A module that stands in for CuPy where mpicoll asks it for a device: its words, deferred.

What CUDA refuses is refused: an event or a stream of another device than the current one, memory
of one device on a stream of another. Kernels are the real ones, compiled for the host.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deferred
import numpy as np
from deferred import BACKEND, Array, PerThread
from skips import compiler

LEGACY, PER_THREAD, DEFAULT = 1, 2, 4  # handles of streams; the kind of a copy
_HANDLES = count(100)
_STREAMS: dict[int, deferred.Stream] = {}
_EVENTS: dict[int, Event] = {}
_LIBRARIES: dict[str, Any] = {}
_FOLDER = tempfile.TemporaryDirectory(prefix="mpicoll-kernels-")


def _stream(handle: int) -> deferred.Stream | PerThread:
    """Return a stream by its handle; the default ones are those of the current device."""
    if handle == PER_THREAD:
        return PerThread(BACKEND.device)
    if handle in (0, LEGACY):
        return BACKEND._default(0, BACKEND.device)
    return _STREAMS[handle]


def _handle(stream: deferred.Stream) -> int:
    """Return a handle of a stream."""
    if stream is BACKEND._defaults.get((0, stream.device)):
        return 0
    for handle, known in _STREAMS.items():
        if known is stream:
            return handle
    _STREAMS[made := next(_HANDLES)] = stream
    return made


class ndarray(Array):
    """An array of CuPy's."""

    __module__ = "cupy"


class Device:
    """The current device within a `with`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def use(self) -> None:
        BACKEND.device = self.number

    def __enter__(self) -> None:
        self._before = BACKEND.device
        BACKEND.device = self.number

    def __exit__(self, *_: object) -> None:
        BACKEND.device = self._before


class Stream:
    """A stream of the current device; the current one within a `with`."""

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking
        self.queue = deferred.Stream(device=BACKEND.device)
        BACKEND._streams.append(self.queue)
        self.ptr = _handle(self.queue)

    def use(self) -> Stream:
        if self.queue.device != BACKEND.device:
            raise RuntimeError(f"a stream of device {self.queue.device} on {BACKEND.device}")
        BACKEND.stream = self.queue
        return self

    def __enter__(self) -> None:
        self._before = BACKEND.stream
        self.use()

    def __exit__(self, *_: object) -> None:
        BACKEND.stream = self._before


class Event:
    """An event of the current device."""

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing
        self.device, self.place = BACKEND.device, deferred.Event(deferred.Stream())
        self.ptr = next(_HANDLES)
        _EVENTS[self.ptr] = self

    @property
    def done(self) -> bool:
        return BACKEND.over(self.place, False)

    def synchronize(self) -> None:
        BACKEND.over(self.place, True)


def eventRecord(event: int, handle: int) -> None:
    stream = BACKEND._stream(_stream(handle))
    if stream.device != _EVENTS[event].device:
        raise RuntimeError(f"event of {_EVENTS[event].device}, stream of {stream.device}")
    _EVENTS[event].place = BACKEND.record(stream)


def streamWaitEvent(handle: int, event: int) -> None:
    BACKEND._add(_stream(handle), _EVENTS[event].place)


def memcpyAsync(target: int, source: int, nbytes: int, kind: int, handle: int) -> None:
    assert kind == DEFAULT
    BACKEND.copy(target, source, nbytes, BACKEND._stream(_stream(handle)))


def deviceSynchronize() -> None:
    for stream in list(BACKEND._streams):
        if stream.device == BACKEND.device:
            stream.reach(stream.queued)


def get_current_stream(device: int = -1) -> Any:
    device = BACKEND.device if device < 0 else device
    found = BACKEND.current(None, device)
    return SimpleNamespace(
        ptr=PER_THREAD if isinstance(found, PerThread) else _handle(found),
        synchronize=lambda: BACKEND.over(BACKEND.record(found), True),
    )


def alloc(nbytes: int) -> Any:
    """Return memory of the current device, for work on the current stream."""
    memory = BACKEND.poison(nbytes, BACKEND.device)
    return SimpleNamespace(ptr=deferred.address_of(memory), memory=memory, stream=BACKEND.stream)


def asarray(host: Any) -> Any:
    """Return an array on the current device that a copy is queued to."""
    made = deferred.array(host, BACKEND.device)
    return SimpleNamespace(data=SimpleNamespace(ptr=made.address), array=made)


class RawKernel:
    """A kernel, which a C compiler makes a function of."""

    def __init__(self, text: str, name: str, options: Sequence[str]) -> None:
        assert tuple(options) == ("--fmad=false",)
        if text not in _LIBRARIES:
            path = Path(_FOLDER.name) / f"{len(_LIBRARIES)}.c"
            path.write_text(text, encoding="utf-8")
            library = str(path.with_suffix(".so"))
            flags = ["-O1", "-std=c99", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
            subprocess.run([compiler(), *flags, "-o", library, path], check=True, timeout=120)
            _LIBRARIES[text] = ctypes.CDLL(library)
        self._function = getattr(_LIBRARIES[text], name)
        signature = text[text.index(f"KERNEL {name}(") :].split("(")[1].split(")")[0]
        self._pointers = ["*" in parameter for parameter in signature.split(",")]

    def __call__(self, blocks: Any, threads: Any, arguments: Any) -> None:
        assert [blocks[0] > 0, threads[0] > 0, len(arguments)] == [1, 1, len(self._pointers)]
        assert all(isinstance(one, (np.uint64, np.int64)) for one in arguments)
        found = [int(one) for one, is_it in zip(arguments, self._pointers, strict=True) if is_it]
        given = [ctypes.c_ulonglong(int(one) % (1 << 64)) for one in arguments]
        if BACKEND.stream.device != BACKEND.device:
            raise RuntimeError("a launch on a stream of another device")
        BACKEND._add(BACKEND.stream, lambda: self._function(*given), *found)
        BACKEND.folds += 1


def module(devices: int = 2) -> ModuleType:
    """Return the module, of so many devices; what an earlier one had is forgotten."""
    _STREAMS.clear()
    _EVENTS.clear()
    made: Any = ModuleType("cupy")
    made.ndarray, made.asarray, made.RawKernel = ndarray, asarray, RawKernel
    made.cuda = SimpleNamespace(
        Device=Device,
        Event=Event,
        Stream=Stream,
        alloc=alloc,
        alloc_pinned_memory=lambda nbytes: BACKEND.poison(nbytes + 512),
        get_current_stream=get_current_stream,
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError,
            deviceSynchronize=deviceSynchronize,
            eventRecord=eventRecord,
            getDeviceCount=lambda: devices,
            is_hip=False,
            memcpyAsync=memcpyAsync,
            memcpyDefault=DEFAULT,
            pointerGetAttributes=lambda address: SimpleNamespace(
                device=BACKEND.device_of(address)
            ),
            streamWaitEvent=streamWaitEvent,
        ),
    )
    return made


def torch() -> ModuleType:
    """Return a torch whose current streams are not those of CuPy."""
    made: Any = ModuleType("torch")
    streams: dict[int, Stream] = {}

    def current_stream(device: int) -> Any:
        if device not in streams:
            with Device(device):
                streams[device] = Stream(non_blocking=True)
        return SimpleNamespace(cuda_stream=streams[device].ptr, queue=streams[device].queue)

    def set_device(number: int) -> None:
        made.device = number

    made.cuda = SimpleNamespace(current_stream=current_stream, set_device=set_device)
    return made

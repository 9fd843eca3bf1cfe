"""Device arrays, and CuPy as what moves and folds them.

This file, device_kernels.py and device_support.py are the only ones with words of CUDA in
them; ROCm builds of CuPy have the same ones. An array is known by what it shows,
``__cuda_array_interface__`` or DLPack, and no library is loaded to look. CuPy is, once there
is a device array of any library: it has the streams, the pinned memory and the compiler.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from mpicoll.runtime import device_kernels, device_support, dlpack, staging
from mpicoll.runtime.backend import NOWHERE, Backend, Kernel, Layout
from mpicoll.runtime.datatypes import DType
from mpicoll.runtime.executor import Bytes
from mpicoll.runtime.staging import DeviceMemory

if TYPE_CHECKING:
    from mpicoll.runtime.operators import Reducer

_THREADS = 256
_BLOCKS = 1024

#: Layouts of datatypes that are kept on each device.
_LAYOUTS = 256

_BACKENDS: dict[type, Backend] = {}


def register(kind: type, backend: Backend) -> None:
    """Let ``backend`` take care of arrays of a class, in place of CuPy."""
    _BACKENDS[kind] = backend


class Shown(NamedTuple):
    """What an array shows of itself; ``strides`` are in bytes, None for C order."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool
    dtype: DType | None
    device: int | None
    owner: object


def recognised(data: Any, *, typed: bool = False) -> DeviceMemory | None:
    """Return the memory of a device array, None for what is none.

    ``typed`` says that the caller names the datatype of its items. Raises BufferError for
    one that is not contiguous, as mpi4py does, and TypeError where CuPy is missing.
    """
    shown = _shown(data, typed)
    if shown is None:
        return None
    if not _contiguous(shown):
        raise BufferError(
            "message: device array is not contiguous; make it so, as cupy.ascontiguousarray does"
        )
    staging.MET = True
    backend = _BACKENDS.get(type(data)) or _cupy()
    device = shown.device
    if device is None:
        device = device_of(backend, shown.address)
    dtype = shown.dtype
    nbytes = int(np.prod(shown.shape, dtype=np.int64)) * (1 if dtype is None else dtype.itemsize)
    return DeviceMemory(backend, device, shown.owner, shown.address, nbytes, shown.readonly, dtype)


def device_of(backend: Backend, address: int) -> int:
    """Return the device that an address is on."""
    of_address = getattr(backend, "device_of", None)
    return 0 if of_address is None or not address else cast(int, of_address(address))


def _shown(data: Any, typed: bool) -> Shown | None:
    place = dlpack.place(data)
    if place is not None and place[0] not in dlpack.DEVICES:
        return None
    number = None if place is None else place[1]
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is not None:
        address, readonly = interface["data"]
        dtype = _dtype(interface["typestr"], getattr(data, "dtype", None))
        strides = interface.get("strides")
        return Shown(address or 0, interface["shape"], strides, readonly, dtype, number, data)
    if place is None:
        return None
    lent = dlpack.borrow(data, typed=typed, on_device=True)
    owner = (data, lent.capsule)
    return Shown(lent.address, lent.shape, lent.strides, lent.readonly, lent.dtype, number, owner)


def _dtype(typestr: str, said: object) -> DType:
    """Return the dtype; the interface has no name for those of ml_dtypes, and one for several
    of C."""
    if isinstance(said, np.dtype):
        return said
    name = str(said).removeprefix("torch.")
    its_own = getattr(ml_dtypes, name, None) if typestr[1:2] == "V" else None
    return np.dtype(its_own or typestr)


def _contiguous(shown: Shown) -> bool:
    """Whether an array is dense in C or in Fortran order."""
    if shown.strides is None or 0 in shown.shape:
        return True
    assert shown.dtype is not None
    extents = [
        (size, stride) for size, stride in zip(shown.shape, shown.strides, strict=True) if size > 1
    ]
    for order in (extents, extents[::-1]):
        expected = shown.dtype.itemsize
        for size, stride in reversed(order):
            if stride != expected:
                break
            expected *= size
        else:
            return True
    return False


# -- CuPy -------------------------------------------------------------------------------------


class Queue(NamedTuple):
    """A stream of a device; ``stream`` is CuPy's object where it is one of our own."""

    device: int
    handle: int
    stream: Any = None


@cache
def _cupy() -> CupyBackend:
    return CupyBackend()


class CupyBackend:
    """The runtime of CUDA or ROCm, as CuPy has it."""

    def __init__(self) -> None:
        """Load CuPy; raises TypeError with what to install, as for an object that is no buffer."""
        try:
            import cupy
        except ImportError as error:
            raise TypeError(
                "message: a device array needs CuPy, also one of another library: pip install "
                "cupy-cuda12x (or the package for your CUDA or ROCm)"
            ) from error
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._kernels: dict[str, Any] = {}
        self._layouts: dict[int, dict[bytes, Any]] = {}
        self._moving = threading.RLock()  # until a kernel is queued nobody clears its layout

    def device_of(self, address: int) -> int:
        """Return the device of an address."""
        return int(self._runtime.pointerGetAttributes(address).device)

    # -- streams and events -----------------------------------------------------------

    def current(self, owner: object, device: int) -> Queue:
        """Return the stream that the array's library uses now, on this thread."""
        array = owner[0] if type(owner) is tuple else owner  # with what DLPack lends of it
        # Of a class that is derived from a library's array, too.
        libraries = [kind.__module__.partition(".")[0] for kind in type(array).__mro__]
        if "torch" in libraries:
            torch = sys.modules["torch"]
            return Queue(device, int(torch.cuda.current_stream(device).cuda_stream))
        if "cupy" not in libraries:
            # The stream that its pending work is on, by version 3 of the interface.
            said = (getattr(array, "__cuda_array_interface__", None) or {}).get("stream")
            if said is not None:
                return Queue(device, int(said))
        return Queue(device, int(self._cupy.cuda.get_current_stream(device).ptr))

    def streams(self, device: int) -> tuple[Queue, Queue]:
        """Return two streams that do not wait for the default one."""
        with self._cupy.cuda.Device(device):
            made = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        one, other = [Queue(device, int(stream.ptr), stream) for stream in made]
        return one, other

    def record(self, stream: Queue) -> Any:
        """Record an event."""
        with self._cupy.cuda.Device(stream.device):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream.handle)
        return event

    def wait(self, stream: Queue, event: Any) -> None:
        """Let a stream wait for an event."""
        self._runtime.streamWaitEvent(stream.handle, event.ptr)

    def over(self, event: Any, wait: bool) -> bool:
        """Ask an event, or wait for it."""
        if wait:
            event.synchronize()
            return True
        return bool(event.done)

    # -- memory -----------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: Queue) -> tuple[int, object]:
        """Take memory from the pool of CuPy; what a stream gives back it gets again."""
        with self._cupy.cuda.Device(stream.device), stream.stream:
            memory = self._cupy.cuda.alloc(nbytes)
        return int(memory.ptr), memory

    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked memory."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Queue) -> None:
        """Queue a copy; the addresses say from where to where."""
        kind = self._runtime.memcpyDefault
        self._runtime.memcpyAsync(target, source, nbytes, kind, stream.handle)

    def gather(self, target: int, source: int, layout: Layout, count: int, stream: Queue) -> None:
        """Queue a byte-wise copy out of items with gaps."""
        self._move("gather", target, source, layout, count, stream)

    def scatter(self, target: int, source: int, layout: Layout, count: int, stream: Queue) -> None:
        """Queue a byte-wise copy into items with gaps."""
        self._move("scatter", target, source, layout, count, stream)

    def _move(
        self, name: str, target: int, source: int, layout: Layout, count: int, stream: Queue
    ) -> None:
        each = layout.positions.size
        source_text = device_kernels.move_source(NOWHERE)
        sizes = (np.int64(layout.extent), np.uint64(each), np.uint64(count))
        with self._moving:
            positions = self._positions(layout, stream.device)
            pointers = (np.uint64(target), np.uint64(source), np.uint64(positions.data.ptr))
            self._launch(name, source_text, count * each, (*pointers, *sizes), stream)

    def _positions(self, layout: Layout, device: int) -> Any:
        """Return the offsets of a layout in the memory of a device."""
        kept, key = self._layouts.setdefault(device, {}), layout.positions.tobytes()
        positions = kept.get(key)
        if positions is None:
            with self._cupy.cuda.Device(device):
                if len(kept) >= _LAYOUTS:
                    self._runtime.deviceSynchronize()  # no kernel reads them any more
                    kept.clear()
                positions = kept[key] = self._cupy.asarray(layout.positions)
                self._cupy.cuda.get_current_stream().synchronize()
        return positions

    # -- folds ------------------------------------------------------------------------

    def kernel(self, reduction: Reducer) -> Kernel | None:
        """Return the kernel of an operator that device_kernels.py has a loop for."""
        if reduction.loop is None or not device_kernels.supported(*reduction.loop):
            return None
        return Kernel(*reduction.loop, reduction.mean_of, reduction)

    def fold(
        self, kernel: Kernel, target: int, operands: Sequence[int], nbytes: int, stream: Queue
    ) -> None:
        """Queue one kernel for all operands."""
        mean_of = kernel.mean_of if len(operands) == kernel.mean_of else 0
        text = device_kernels.fold_source(kernel.operator, kernel.dtype, len(operands), mean_of)
        count = nbytes // device_kernels.unit(kernel.dtype)
        pointers = tuple([np.uint64(one) for one in (target, *operands)])
        self._launch("fold", text, count, (*pointers, np.uint64(count)), stream)

    def divide(self, kernel: Kernel, target: int, nbytes: int, size: int, stream: Queue) -> None:
        """Queue the division of AVG."""
        text = device_kernels.divide_source(kernel.dtype)
        count = nbytes // device_kernels.unit(kernel.dtype)
        arguments = (np.uint64(target), np.uint64(count), np.int64(size))
        self._launch("divide", text, count, arguments, stream)

    def _launch(
        self, name: str, text: str, count: int, arguments: tuple[Any, ...], stream: Queue
    ) -> None:
        made = self._kernels.get(name + text)
        if made is None:
            # Without fused multiply and add, so that bits are those of the host.
            option = "-ffp-contract=off" if self._runtime.is_hip else "--fmad=false"
            made = self._cupy.RawKernel(text, name, options=(option,))
            self._kernels[name + text] = made
        blocks = max(1, min(_BLOCKS, -(-count // _THREADS)))
        with self._cupy.cuda.Device(stream.device), stream.stream:
            made((blocks,), (_THREADS,), arguments)

    def direct(self) -> bool:
        """Return whether the MPI surely takes device pointers."""
        return device_support.takes_device_pointers()

"""Device memory for what is timed: arrays of CuPy, times by events. Loads mpi4py.

Each rank takes a device of its node and a stream of its own, on which everything here is
queued.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from mpicoll.cli.common import refuse
from mpicoll.cli.memory import POISON, Array
from mpicoll.cli.mpi import MPI
from mpicoll.runtime.device import recognised
from mpicoll.runtime.device_support import bind_device
from mpicoll.runtime.link import attach
from mpicoll.runtime.staging import takes_pointers
from mpicoll.selection.settings import Settings

#: Seconds that two events are apart at least: they tell no shorter time.
RESOLUTION = 5e-7


class Cuda:
    """Memory of this rank's device."""

    name = "device"
    policy = "A call is timed by events on the device's current stream, one before, one after it."

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Take the device; collective. Raises what CuPy raises where there is none."""
        number = bind_device(comm)
        self._cupy: Any = import_module("cupy")
        # One that does not wait for the default stream, nor that one for it.
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        properties = self._cupy.cuda.runtime.getDeviceProperties(number)
        self.device: str = properties["name"].decode()
        self.addressed = False

    def try_out(self, settings: Settings, dtype: np.dtype[Any]) -> None:
        """Keep one item of ``dtype``, and see whether the MPI takes its address."""
        found = recognised(self.put(np.zeros(1, dtype)))
        assert found is not None
        self.addressed = takes_pointers(found.backend, settings)

    @property
    def words(self) -> str:
        """What it is, for the head of a table."""
        takes = "takes" if self.addressed else "takes no"
        return f"device memory, {self.device} on rank 0; this MPI {takes} device pointers"

    # -- data -------------------------------------------------------------------------

    def put(self, array: Array) -> Any:
        """Return a copy of an array on the device."""
        held = self._cupy.asarray(array)
        self._stream.synchronize()
        return held

    def fetch(self, held: Any) -> Array:
        """Return a copy of an array on the host."""
        found: Array = held.get()
        return found

    def poison(self, held: Any) -> None:
        """Fill it, and wait: an MPI's own call does not look at streams."""
        if held.size:
            held.view(np.uint8).fill(POISON)
            self._stream.synchronize()

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy."""
        self._cupy.copyto(target, source)

    def message(self, held: Any) -> Any:
        """Return its bytes by their address: how mpi4py reads it otherwise depends on versions."""
        return [MPI.buffer.fromaddress(held.data.ptr, held.nbytes), held.nbytes, MPI.BYTE]

    # -- time -------------------------------------------------------------------------

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds between events before and after the call and what it has queued."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        begin.synchronize()  # else it might be reached late, where the call itself queues nothing
        call()
        end.record(self._stream)
        end.synchronize()
        milliseconds = float(self._cupy.cuda.get_elapsed_time(begin, end))
        return max(RESOLUTION, milliseconds / 1e3)


def find(comm: MPI.Intracomm, dtype: np.dtype[Any]) -> tuple[Cuda | None, str]:
    """Return this rank's device memory, or why a rank has none; collective, alike on all ranks.

    A rank has it where CuPy finds a device that keeps items of ``dtype``.
    """
    world = MPI.Intracomm(comm)
    memory, fault = None, ""
    try:
        memory = Cuda(world)
    except ImportError as error:
        fault = f"{error}; install CuPy: pip install cupy-cuda12x (or the package that fits)"
    except Exception as error:
        fault = str(error) or type(error).__name__
    fault = _first(world, fault)
    if fault or memory is None:
        return None, fault
    settings = attach(comm).settings  # collective, so before what may fail on one rank
    try:
        memory.try_out(settings, dtype)
    except Exception as error:
        fault = f"no array of {dtype} on the device: {str(error) or type(error).__name__}"
    memory.addressed = world.allreduce(memory.addressed, MPI.LAND)
    fault = _first(world, fault)
    return (None if fault else memory), fault


def _first(world: MPI.Intracomm, fault: str) -> str:
    """Return the fault of the first rank that has one."""
    found: list[str] = world.allgather(fault)
    return next((f"rank {rank}: {words}" for rank, words in enumerate(found) if words), "")


def need(comm: MPI.Intracomm, dtype: np.dtype[Any], option: str) -> Cuda:
    """Return this rank's device memory; where a rank has none it is a usage error on all."""
    memory, fault = find(comm, dtype)
    if memory is None:
        refuse(f"{option}: no device, so nothing was measured ({fault})")
    assert memory is not None
    return memory

"""Bus bandwidth of collectives on device arrays, timed with events: one way per run.

``mpiexec -n P python jobs/bench_gpu.py --way device|staged|native|nccl``. A way is a run of
its own, since an MPI's own call may crash on device pointers. Results are checked first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

WAYS = ("device", "staged", "native", "nccl")
#: algbw times this is the busbw of nccl-tests, on P ranks.
FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda size: 2 * (size - 1) / size,
    "allgather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "alltoall": lambda size: (size - 1) / size,
    "bcast": lambda size: 1.0,
}


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--collectives", nargs="+", choices=FACTORS, default=list(FACTORS))
    parser.add_argument("--bytes", nargs="+", type=int, default=[4 << k for k in range(8, 27, 3)])
    parser.add_argument("--dtype", choices=("float32", "float16", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


class Way:
    """The five collectives in one way, on CuPy arrays of one item count per rank."""

    def __init__(self, name: str, cupy: Any) -> None:
        """Wrap the world, or make a communicator of NCCL."""
        self.world = MPI.COMM_WORLD
        self.cupy = cupy
        self.nccl: Any = None
        if name == "nccl":
            nccl = cupy.cuda.nccl
            unique = self.world.bcast(nccl.get_unique_id() if self.world.rank == 0 else None)
            self.nccl = nccl.NcclCommunicator(self.world.size, unique, self.world.rank)
            self.types = {"float16": nccl.NCCL_FLOAT16, "float32": nccl.NCCL_FLOAT32}
            self.types["float64"] = nccl.NCCL_FLOAT64
            self.sum = nccl.NCCL_SUM
        elif name != "native":
            from dataclasses import replace

            import mpicoll

            wrapped = mpicoll.Comm(self.world)
            wrapped._link.settings = replace(wrapped._link.settings, cuda_aware=name == "device")
            self.world = wrapped

    def call(self, collective: str, x: Any, y: Any) -> None:
        """Run a collective from ``x`` to ``y`` on the current stream."""
        if self.nccl is not None:
            self._nccl(collective, x, y)
            return
        if type(self.world) is MPI.Intracomm:
            self.cupy.cuda.get_current_stream().synchronize()  # the MPI's own does not look
        if collective == "bcast":
            self.world.Bcast(x, 0)
            return
        method = {"reduce_scatter": "Reduce_scatter_block"}.get(
            collective, collective.capitalize()
        )
        getattr(self.world, method)(x, y)

    def _nccl(self, collective: str, x: Any, y: Any) -> None:
        stream = self.cupy.cuda.get_current_stream().ptr
        kind, at, to = self.types[x.dtype.name], x.data.ptr, y.data.ptr
        size = self.world.size
        if collective == "allreduce":
            self.nccl.allReduce(at, to, x.size, kind, self.sum, stream)
        elif collective == "allgather":
            self.nccl.allGather(at, to, x.size, kind, stream)
        elif collective == "reduce_scatter":
            self.nccl.reduceScatter(at, to, y.size, kind, self.sum, stream)
        elif collective == "bcast":
            self.nccl.bcast(at, x.size, kind, 0, stream)
        else:
            part = x.nbytes // size
            self.cupy.cuda.nccl.groupStart()
            for peer in range(size):
                self.nccl.send(at + peer * part, x.size // size, kind, peer, stream)
                self.nccl.recv(to + peer * part, x.size // size, kind, peer, stream)
            self.cupy.cuda.nccl.groupEnd()


def buffers(collective: str, nbytes: int, dtype: str, cupy: Any) -> tuple[Any, Any]:
    """Return both sides; ``nbytes`` are those of the larger one."""
    world = MPI.COMM_WORLD
    block = max(1, nbytes // world.size // np.dtype(dtype).itemsize)
    whole = block * world.size
    sizes = {"allgather": (block, whole), "reduce_scatter": (whole, block)}
    sent, received = sizes.get(collective, (whole, whole))
    return cupy.full(sent, world.rank + 1, dtype), cupy.zeros(received, dtype)


def right(collective: str, x: Any, y: Any) -> bool:
    """Whether the results are what they have to be."""
    size = MPI.COMM_WORLD.size
    if collective == "bcast":
        return bool((x == 1).all())
    if collective in ("allgather", "alltoall"):
        return bool((y.reshape(size, -1).get() == 1 + np.arange(size)[:, None]).all())
    return bool((y == size * (size + 1) // 2).all())


def seconds(way: Way, collective: str, x: Any, y: Any, repeats: int, cupy: Any) -> float:
    """Return the median over repeats of the slowest rank's time, by events on the stream."""
    calls = 20 if max(x.nbytes, y.nbytes) <= 1 << 20 else 5
    times = []
    for _ in range(repeats + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        MPI.COMM_WORLD.Barrier()
        begin.record()
        for _ in range(calls):
            way.call(collective, x, y)
        end.record()
        end.synchronize()
        own = cupy.cuda.get_elapsed_time(begin, end) / 1000 / calls
        times.append(MPI.COMM_WORLD.allreduce(own, MPI.MAX))
    return float(statistics.median(times[1:]))


def main() -> int:
    """Print one line per collective and size."""
    options = arguments()
    world = MPI.COMM_WORLD
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        if world.rank == 0:
            print(f"no device: nothing was run ({type(error).__name__})")
        return 0
    from mpicoll.runtime.device_support import bind_device

    number = bind_device(world)
    name = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
    cupy.cuda.Stream(non_blocking=True).use()
    way = Way(options.way, cupy)
    if world.rank == 0:
        print(f"# {options.way}, {world.size} ranks, {name}, {options.dtype}")
        print(f"{'collective':15} {'bytes':>11} {'us':>10} {'busbw GB/s':>11}")
    for collective in options.collectives:
        for nbytes in options.bytes:
            x, y = buffers(collective, nbytes, options.dtype, cupy)
            way.call(collective, x, y)
            cupy.cuda.get_current_stream().synchronize()
            good = world.allreduce(right(collective, x, y), MPI.LAND)
            if not good:
                print(f"rank {world.rank}: {collective} of {nbytes} bytes is wrong", flush=True)
                return 1
            took = seconds(way, collective, x, y, options.repeats, cupy)
            moved = max(x.nbytes, y.nbytes)
            busbw = moved / took * FACTORS[collective](world.size) / 1e9
            if world.rank == 0:
                print(f"{collective:15} {moved:11} {took * 1e6:10.1f} {busbw:11.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

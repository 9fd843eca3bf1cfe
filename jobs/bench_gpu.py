"""Bus bandwidth of collectives on device arrays, timed with events: one way per run.

``mpiexec -n P python jobs/bench_gpu.py --way device|staged|native|nccl``. A way is a run of
its own, since an MPI's own call may crash on device pointers. Results are checked. What is
called and how it is timed is that of ``mpicoll bench --device cuda``; here several calls
follow each other between two events, as NCCL's own tests have it. Needs the extra ``cli``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.cli import cuda, timing
from mpicoll.cli.cases import Case, bus_factor, even

WAYS = ("device", "staged", "native", "nccl")
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "bcast")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--bytes", nargs="+", type=int, default=[4 << k for k in range(8, 27, 3)])
    parser.add_argument("--dtype", choices=("float32", "float16", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


class Nccl:
    """The five collectives of NCCL, on the current stream."""

    def __init__(self, world: MPI.Intracomm) -> None:
        """Make a communicator of the world's ranks."""
        import cupy

        self.nccl = nccl = cupy.cuda.nccl
        self.stream = cupy.cuda.get_current_stream
        self.size = world.size
        unique = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
        self.comm = nccl.NcclCommunicator(world.size, unique, world.rank)
        self.types = {
            "float16": nccl.NCCL_FLOAT16,
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
        }

    def call(self, case: Case) -> None:
        """Queue a collective."""
        collective, stream = case.shape.collective, self.stream().ptr
        kind = self.types[case.shape.dtype.name]
        x, y = case.arguments[0], case.arguments[1]
        if collective == "allreduce":
            self.comm.allReduce(x.data.ptr, y.data.ptr, x.size, kind, self.nccl.NCCL_SUM, stream)
        elif collective == "allgather":
            self.comm.allGather(x.data.ptr, y.data.ptr, x.size, kind, stream)
        elif collective == "reduce_scatter":
            here, there = x.data.ptr, y.data.ptr
            self.comm.reduceScatter(here, there, y.size, kind, self.nccl.NCCL_SUM, stream)
        elif collective == "bcast":
            self.comm.bcast(x.data.ptr, x.size, kind, case.shape.root, stream)
        else:
            part, count = x.nbytes // self.size, x.size // self.size
            self.nccl.groupStart()
            for peer in range(self.size):
                self.comm.send(x.data.ptr + peer * part, count, kind, peer, stream)
                self.comm.recv(y.data.ptr + peer * part, count, kind, peer, stream)
            self.nccl.groupEnd()


def caller(way: str) -> Callable[[Case], Callable[[], object]]:
    """Return what makes one call of a case in a way."""
    if way == "nccl":
        nccl = Nccl(MPI.COMM_WORLD)
        return lambda case: lambda: nccl.call(case)
    if way == "native":
        return lambda case: case.bound(MPI.COMM_WORLD)
    comm = mpicoll.Comm(MPI.COMM_WORLD)
    comm._link.apply(replace(comm._link.settings, memory="device", cuda_aware=way == "device"))
    return lambda case: case.bound(comm)


def repeated(call: Callable[[], object], calls: int) -> Callable[[], object]:
    """Return what calls so often."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def measured(case: Case, call: Callable[[], object], repeats: int) -> tuple[float, str]:
    """Return the median seconds of a call, of the slowest rank, and what is wrong."""
    calls = 20 if case.shape.nbytes <= 1 << 20 else 5
    contender = timing.Contender("", repeated(call, calls), case.poison, case.wrong)
    found = timing.race(MPI.COMM_WORLD, [contender], float("inf"), repeats, case.memory)[0]
    return found.summary()["median"] / calls, found.fault


def sees_device() -> bool:
    """Whether CuPy finds a device, of whatever use."""
    try:
        return bool(import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # not installed, broken, or an error of the driver, of CuPy's own kind
        return False


def main() -> int:
    """Print one line per collective and size."""
    options = arguments()
    world, dtype = MPI.COMM_WORLD, np.dtype(options.dtype)
    memory, fault = cuda.find(world, dtype)
    if memory is None:
        seen = world.allreduce(sees_device(), MPI.LOR)
        if world.rank == 0:
            what = "a device that can not be used" if seen else "no device"
            print(f"{what}: nothing was run ({fault})")
        return int(seen)
    bound = caller(options.way)
    if world.rank == 0:
        print(f"# {options.way}, {world.size} ranks, {memory.device}, {dtype}")
        print(f"{'collective':15} {'bytes':>11} {'us':>10} {'busbw GB/s':>11}")
    for collective in options.collectives:
        for nbytes in options.bytes:
            case = Case(world, even(collective, world.size, nbytes, dtype), memory)
            took, fault = measured(case, bound(case), options.repeats)
            if fault:
                if world.rank == 0:
                    print(f"{collective} of {nbytes} bytes is wrong: {fault}", flush=True)
                return 1
            moved = case.shape.nbytes
            busbw = moved / took * bus_factor(collective, world.size) / 1e9
            if world.rank == 0:
                print(f"{collective:15} {moved:11} {took * 1e6:10.1f} {busbw:11.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

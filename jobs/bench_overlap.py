"""Times how much of an allreduce hides behind computation, and what starting one costs.

    mpiexec -n 2 python jobs/bench_overlap.py
    mpiexec -n 2 python jobs/bench_overlap.py --compute away

First table: hidden = 1 - (T_both - T_compute) / T_comm, in percent. T_comm is the best blocking
allreduce of that size (mpicoll's or the MPI's own, whichever is faster), T_compute matrix
products that take about as long, T_both the non-blocking allreduce started before the same
products and waited for after them: with progress at the start and in Wait alone, with a progress
thread, and by the MPI's own Iallreduce. All by turns; medians of the slowest rank.
100: the allreduce costs no time beside the computation; 0: as much as the blocking one does after
it. Below 0 it costs more, where its own work and the computation slow each other down. Above 100,
and far below 0, it is noise: the three times are measured one after the other, and something else
used the cores during one of them. Then take more --rounds, on a machine that is free.

Products take the rank's core. With ``--compute away`` they are a pause of that time: computation
that is done elsewhere, as on an accelerator, and leaves the core to the progress thread.

Second table: Start and Wait of a persistent allreduce against the MPI's own, and a blocking call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

# Before NumPy comes with its BLAS, which else takes every core for each rank: the ranks would
# then wait for each other's threads, and the tables say nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import numpy as np
from mpi4py import MPI

import mpicoll

KIB = 1024
REPEATS = 20

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Calls: TypeAlias = "dict[str, Callable[[], Any]]"


def slowest(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Return the seconds of a call on the rank where it takes longest."""
    comm.Barrier()
    start = time.perf_counter()
    call()
    return float(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))


def by_turns(comm: MPI.Intracomm, rounds: int, calls: Calls) -> dict[str, float]:
    """Return the median seconds of every call; each round runs all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            seconds = slowest(comm, call)
            if number >= 2:  # two rounds to warm up
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


class Products:
    """Computation of about a given time: products of small matrices, one BLAS thread."""

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        self._a = np.full((192, 192), 0.5, np.float32)
        self._out = np.empty_like(self._a)
        self.repeats = 1
        self()
        once = min(slowest(comm, self) for _ in range(5))
        self.repeats = max(1, round(seconds / once))

    def __call__(self) -> None:
        for _ in range(self.repeats):
            np.matmul(self._a, self._a, out=self._out)


class Pause:
    """Computation of a given time that is not done on a core of this machine."""

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        self._seconds = float(comm.bcast(seconds))

    def __call__(self) -> None:
        time.sleep(self._seconds)


COMPUTE: dict[str, type[Products] | type[Pause]] = {"here": Products, "away": Pause}


def both(start: Callable[[], Any], compute: Callable[[], None]) -> None:
    """Start a collective, compute, and wait for it."""
    request = start()
    compute()
    request.Wait()


def overlap(
    comm: MPI.Intracomm,
    plain: mpicoll.Comm,
    threaded: mpicoll.Comm,
    mib: int,
    rounds: int,
    kind: str,
) -> str:
    """Return a line of the first table."""
    x = np.ones(mib * KIB * KIB // 4, np.float32)
    y = np.empty_like(x)
    blocking: Calls = {
        "ours": partial(plain.Allreduce, x, y),
        "theirs": partial(comm.Allreduce, x, y),
    }
    compute = COMPUTE[kind](comm, min(by_turns(comm, rounds, blocking).values()))
    ways: Calls = {
        "in Wait": partial(both, partial(plain.Iallreduce, x, y), compute),
        "thread": partial(both, partial(threaded.Iallreduce, x, y), compute),
        "native": partial(both, partial(comm.Iallreduce, x, y), compute),
    }
    found = by_turns(comm, rounds, {**blocking, "compute": compute, **ways})
    t_comm = min(found[name] for name in blocking)
    cells = [f"{100 * (1 - (found[name] - found['compute']) / t_comm):>10.0f}" for name in ways]
    return f"{mib:>5}{1e3 * t_comm:>11.2f}{1e3 * found['compute']:>14.2f}" + "".join(cells)


def repeat(plan: Any) -> None:
    """Start a persistent collective and wait for it, again and again."""
    for _ in range(REPEATS):
        plan.Start()
        plan.Wait()


def call(comm: Any, x: Array, y: Array) -> None:
    """Call the blocking collective again and again."""
    for _ in range(REPEATS):
        comm.Allreduce(x, y)


def starts(comm: MPI.Intracomm, ours: mpicoll.Comm, nbytes: int, rounds: int) -> str:
    """Return a line of the second table."""
    x = np.ones(nbytes // 8)
    y = np.empty_like(x)
    mine, theirs = ours.Allreduce_init(x, y), comm.Allreduce_init(x, y)
    calls: Calls = {
        "mine": partial(repeat, mine),
        "blocking": partial(call, ours, x, y),
        "theirs": partial(repeat, theirs),
    }
    found = {name: 1e6 * time / REPEATS for name, time in by_turns(comm, rounds, calls).items()}
    mine.Free()
    theirs.Free()
    cells = f"{found['mine']:>15.1f}{found['blocking']:>13.1f}{found['theirs']:>11.1f}"
    return f"{nbytes:>9}{cells}{found['mine'] / found['theirs']:>8.2f}"


def say(comm: MPI.Intracomm, text: str) -> None:
    """Print on rank 0."""
    if comm.Get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Run both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--compute",
        choices=COMPUTE,
        default="here",
        help="here: matrix products on the rank's core; away: a pause, as for an accelerator",
    )
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    cores = len(os.sched_getaffinity(0))
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    say(
        comm,
        f"{comm.Get_size()} ranks, {cores} cores to use, BLAS threads {threads}, "
        f"compute {options.compute}, {MPI.Get_library_version().splitlines()[0][:40].strip()}",
    )
    plain, threaded = mpicoll.Comm(comm.Dup()), mpicoll.Comm(comm.Dup(), progress="thread")
    say(comm, "\nhidden, %\n  MiB  T_comm ms  T_compute ms   in Wait    thread    native")
    for mib in options.sizes:
        say(comm, overlap(comm, plain, threaded, mib, options.rounds, options.compute))
    say(comm, "\n    bytes  Start+Wait us  blocking us  native us   ratio")
    for nbytes in (8, KIB, 64 * KIB, KIB * KIB):
        say(comm, starts(comm, plain, nbytes, options.rounds))
    plain.Free()
    threaded.Free()


if __name__ == "__main__":
    main()

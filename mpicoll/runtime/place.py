"""Where a communicator runs: the MPI, the kind of host, and how crowded its cores are."""

from __future__ import annotations

import os
import platform

from mpi4py import MPI

from mpicoll.selection.calibration import Place


def library() -> str:
    """Return name and version of the MPI, such as MPICH 4.2.3."""
    first = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", " ").replace("(R)", "").split())


def place(comm: MPI.Intracomm) -> Place:
    """Return where ``comm`` is, as rank 0 sees it; collective, by the MPI's own calls."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    try:
        cores = set().union(*node.allgather(_cores()))
        ranks = node.Get_size()
    finally:
        node.Free()
    return Place(
        host=f"{platform.machine()} {_processor()}",
        mpi=library(),
        ranks=comm.Get_size(),
        nodes=ranks < comm.Get_size(),
        load=max(1.0, ranks / len(cores)) if cores else 1.0,
    )


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()

"""Facts about this run: MPI, versions, cores, ranks per node, binding. Loads mpi4py."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from mpicoll._version import __version__
from mpicoll.cli import launch
from mpicoll.cli.devices import Place, look
from mpicoll.cli.mpi import MPI
from mpicoll.comm import Comm
from mpicoll.runtime import device_support

_THREADS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}

#: CuPy by the names of its packages.
_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "amd-cupy")


def gather_facts(comm: Comm) -> dict[str, Any]:
    """Return the facts, on rank 0 complete; collective."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = comm.gather((platform.node(), usable), root=0) or [(platform.node(), usable)]
    nodes: dict[str, list[list[int]]] = {}
    for node, cores in rows:
        nodes.setdefault(node, []).append(cores)
    started = launch.found()
    return {
        "mpi": _library(),
        "mpi_text": MPI.Get_library_version().strip("\0\n "),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "launcher": started.name if started else "none (started alone)",
        "thread_level": _THREADS[MPI.Query_thread()],
        "ranks": comm.size,
        "nodes": [
            {
                "name": node,
                "ranks": len(places),
                "cores": len(set().union(*places)),
                "binding": _binding(places),
                "oversubscribed": len(places) > len(set().union(*places)) > 0,
            }
            for node, places in nodes.items()
        ],
        "versions": versions(),
        "cpu": _cpu(),
    }


def gather_places(comm: Comm) -> list[Place]:
    """Return what every rank sees of devices, on rank 0 for all ranks; collective."""
    node = MPI.Intracomm(comm).Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    index, ranks = node.Get_rank(), node.Get_size()
    node.Free()
    told = device_support.local_rank()
    local = index if told is None else told
    seen = look()
    place = Place(
        rank=comm.rank,
        node=platform.node(),
        local=local,
        told=told is not None,
        seen=seen,
        number=device_support.device_for(local, len(seen.devices)),
        variables={k: os.environ[k] for k in device_support.VISIBLE if k in os.environ},
        # The launcher is asked where this rank is alone: it may be a singleton of many.
        obstacles=tuple(device_support.obstacles(ranks=ranks if ranks > 1 else None)),
        signs=tuple(device_support.signs()),
        kept=device_support.kept_answer(),
    )
    return comm.gather(place, root=0) or [place]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    found = {"mpicoll": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in ("mpi4py", "ml_dtypes", *_CUPY, "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def kernels() -> str:
    """Return which executor and loops run."""
    try:
        from mpicoll.kernels import describe
    except ImportError:
        return "kernels: NumPy"
    return f"kernels: {describe()}"


def header(facts: dict[str, Any]) -> list[str]:
    """Return the lines that belong on top of every measurement."""
    found = dict(facts["versions"])
    first = " · ".join(f"{name} {found[name]}" for name in ("mpicoll", "mpi4py", "numpy"))
    place = ", ".join(
        f"{node['ranks']} on {node['name']} ({node['cores']} core{'s' * (node['cores'] != 1)}, "
        f"{node['binding']}{', OVERSUBSCRIBED' * node['oversubscribed']})"
        for node in facts["nodes"][:4]
    )
    more = len(facts["nodes"]) - 4
    return [
        f"{first} · Python {found['python']} · {kernels()}",
        f"{facts['mpi']} · threads {facts['thread_level']} · {facts['cpu']}",
        f"{facts['ranks']} ranks: {place}" + (f" and {more} more nodes" if more > 0 else ""),
    ]


def _library() -> str:
    """Return name and version of the MPI, such as MPICH 4.2.3."""
    first = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", " ").replace("(R)", "").split())


def _binding(places: list[list[int]]) -> str:
    """Say how the ranks of one node are bound to its cores."""
    if not all(places):
        return "binding unknown"
    distinct = {tuple(cores) for cores in places}
    if len(distinct) == 1:
        return "ranks share all cores" if len(places) > 1 else "not shared"
    each = {len(cores) for cores in places}
    overlap = sum(map(len, places)) > len(set().union(*places))
    word = "/".join(map(str, sorted(each)))
    return f"bound to {word} core(s) each" + (", overlapping" if overlap else "")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
